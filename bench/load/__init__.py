"""The C programs of `bench.proxy`: compiled once, run from here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slotpin.errors import UserError
from slotpin.llama.cache import cache_dir, locked, publish
from slotpin.llama.series import choose

HERE = Path(__file__).parent
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
BUILD = f"b9999-0a1b2c3d+slotpin.{choose('all').digest}"


@cache
def program(name: str) -> Path:
    """The compiled `name`.c. Raises UserError."""
    source = HERE / f"{name}.c"
    content = source.read_bytes() + (HERE / "http.h").read_bytes()
    key = hashlib.sha256(content + repr(FLAGS).encode()).hexdigest()[:16]
    path = cache_dir() / "bench" / f"{name}-{key}" / name
    if not path.is_file():
        compiler = shutil.which("cc")
        if compiler is None:
            raise UserError("there is no C compiler cc in PATH: install gcc or clang", exit_code=1)
        with locked("bench", print), publish(path.parent) as staging:
            subprocess.run([compiler, *FLAGS, "-o", str(staging / name), str(source)], check=True)
    return path


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds; 0 where nothing was measured."""

    count: int
    p50: int = 0
    p99: int = 0
    max: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of the load client has measured. `delay` is of content frames, from the stub to the client."""

    seconds: float
    answered: int
    failed: int
    latency: Times
    first: Times
    delay: Times

    @classmethod
    def parse(cls, output: str) -> Load:
        found: dict[str, Any] = json.loads(output)
        times = {name: Times(**found[name]) for name in ("latency", "first", "delay")}
        return cls(found["seconds"], found["answered"], found["failed"], **times)


async def run_load(
    port: int, path: str, body: Path, *, connections: int, seconds: float, requests: int = 0, session: str = "load"
) -> Load:
    """Raises UserError where the target answers nothing, or not all with 200."""
    arguments = [str(port), str(connections), str(seconds), str(requests), path, str(body), session]
    process = await asyncio.create_subprocess_exec(
        program("load"), *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise UserError(said.decode().strip(), exit_code=1)
    load = Load.parse(output.decode())
    if load.failed or not load.answered:
        raise UserError(f"{load.failed} requests failed, {load.answered} did not: {said.decode().strip()}", exit_code=1)
    return load


@contextmanager
def running_stub(slots: int, folder: Path) -> Iterator[int]:
    """Its port. Slots are saved into `folder`."""
    command = [str(program("stub")), str(slots), BUILD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@dataclass(slots=True)
class Wire:
    """A raw connection that is kept, for what the load client can't do."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def get(self, path: str) -> str:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None, head
        return (await self.reader.readexactly(int(length[1]))).decode()

    def post(self, path: str, body: bytes, session: str) -> None:
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Authorization: Bearer sk-bench",
            f"X-Slotpin-Session: {session}",
            f"Content-Length: {len(body)}",
        ]
        own = body.replace(b"#SESSION", f"{session:>8}".encode()[-8:])
        self.writer.write("\r\n".join([*head, "", ""]).encode() + own)


@asynccontextmanager
async def wire(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
