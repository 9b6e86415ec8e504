"""Start llama-server, wait until it answers, and stop it; it never outlives this process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slotpin.errors import UserError
from slotpin.llama.guard import guarded, tied
from slotpin.proxy.questions import Questions
from slotpin.proxy.upstream import UpstreamError

DEFAULT_PARALLEL = 4
DEFAULT_CTX_SIZE = 32768
# Cells of the KV cache that have memory from the start, where the server can let the rest follow its use.
INITIAL_CTX = 4096
POLL_SECONDS = 0.1
HEALTH_SECONDS = 2.0
STOP_SECONDS = 5.0

# Addresses that a server listens on but that no client can connect to.
_CONNECT = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def server_args(
    model: Path,
    host: str,
    port: int,
    *,
    parallel: int = DEFAULT_PARALLEL,
    ctx_size: int = DEFAULT_CTX_SIZE,
    extra: Sequence[str] = (),
) -> list[str]:
    """llama-server's arguments with slotpin's defaults; `extra` wins, as the later of two flags does there (arg.cpp).

    `ctx_size` is the unified pool of all slots, in tokens. Without `--no-cache-idle-slots` a new task would clear
    every idle slot.
    """
    where = ["--model", str(model), "--host", host, "--port", str(port)]
    slots = ["--parallel", str(parallel), "--ctx-size", str(ctx_size)]
    return [*where, *slots, "--kv-unified", "--no-cache-idle-slots", "--slots", *extra]


def lazy_kv_args(binary: Path) -> list[str]:
    """The flag that makes KV memory follow its use, where `binary` is a server that has it (patch lazy-kv)."""
    flag = "--slot-initial-ctx"
    shown = subprocess.run(
        [binary, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    return [flag, str(INITIAL_CTX)] if flag in shown.stdout else []


def free_port(host: str, preferred: int) -> int:
    """`preferred` if nothing listens there, else a port that the system chooses.

    Raises UserError if `host` is not an address of this machine.
    """
    for port in (preferred, 0):
        try:
            return try_port(host, port)
        except OSError as error:
            if port == 0:
                raise UserError(f"cannot listen on {host}: {error.strerror or error}") from error
    raise AssertionError("unreachable")


def try_port(host: str, port: int) -> int:
    """Bind and let go at once; the port that was bound. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
        probe.bind(address)
        bound: int = probe.getsockname()[1]
        return bound


class LlamaServer:
    """One llama-server process. `host` and `port` are where `args` make it listen.

    With `guard` a small shell watches over it (any POSIX system), else the kernel does (Linux); its output goes to
    `log_path`, emptied at each start.
    """

    def __init__(
        self,
        binary: Path,
        args: Sequence[str],
        host: str,
        port: int,
        log_path: Path,
        *,
        guard: bool = sys.platform != "linux",
    ) -> None:
        self.log_path = log_path
        self._binary = binary
        self._args = list(args)
        self._host = host
        self._port = port
        self._guard = guard
        self._process: asyncio.subprocess.Process | None = None

    @property
    def base_url(self) -> str:
        """Without `/v1`, at an address that can be connected to."""
        host = _CONNECT.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id, with `guard` that of the shell above it."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._started.returncode

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("llama-server was not started")
        return self._process

    async def start(self) -> None:
        """Start the process, from the main thread. Raises UserError (exit 1) if it can't run or the port is taken."""
        if not os.access(self._binary, os.X_OK):
            raise UserError(f"{self._binary} is not a program; build it with slotpin build", exit_code=1)
        self._check_port()
        command = [str(self._binary), *self._args]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(guarded(command) if self._guard else tied(command)),
                stdin=asyncio.subprocess.PIPE,  # the guard's life line: closed when this process ends
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches us alone; stop() ends the server
            )

    def _check_port(self) -> None:
        try:
            try_port(self._host, self._port)
        except OSError as error:
            raise UserError(
                f"llama-server cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "choose another port",
                exit_code=1,
            ) from error

    async def wait_ready(self) -> None:
        """Return when the model is loaded (perhaps minutes). Raises UserError (exit 1) if the process ends first."""
        with Questions() as questions:
            while not await self._answers(questions):
                if self.returncode is not None:
                    error = telling_error(self.log_path.read_text(errors="replace"))
                    raise UserError(f"llama-server ended before it was ready: {error} (log: {self.log_path})", 1)
                await asyncio.sleep(POLL_SECONDS)

    async def _answers(self, questions: Questions) -> bool:
        """While the model loads, every route answers 503 (server-http.cpp)."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return (await questions.ask("GET", self.base_url, "/health")).status != 503
        except (UpstreamError, TimeoutError):
            return False

    async def wait(self) -> int:
        """Wait for the process to end; its exit status."""
        return await self._started.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after five seconds. Returns when the process is gone; no error if it was never there."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and return when the process is gone."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()


def telling_error(log: str) -> str:
    """The first error in llama-server's log, without its time stamp: the later ones follow from it.

    Log lines read `0.00.004.305 E gguf_init_from_reader: …`; argument errors `error: …`.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if found := re.match(r"[\d.]+ E (.+)", line):
            return found[1]
        if line.startswith(("error", "terminate called", "GGML_ASSERT")):
            return line
    return lines[-1] if lines else "it wrote nothing"
