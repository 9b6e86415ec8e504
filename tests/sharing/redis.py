"""A Redis of a test's own, which keeps nothing over its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slotpin.llama.launch import free_port
from tests.support.debian import debian_program
from tests.support.processes import wait_until

HOST = "127.0.0.1"


class RedisServer:
    """`start` and `kill` as often as a test likes; it has the same port each time and begins empty."""

    def __init__(self, home: Path, cluster: bool) -> None:
        self._home = home
        self._cluster = cluster
        self.port = _port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://{HOST}:{self.port}"

    def start(self) -> None:
        program = debian_program("redis-server")
        own: tuple[str, ...] = (
            "--bind",
            HOST,
            "--port",
            str(self.port),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self._home),
        )
        own += ("--cluster-enabled", "yes") if self._cluster else ()
        log = self._home / "redis.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(program.path), *own], env=os.environ | program.environment, stdout=out, stderr=subprocess.STDOUT
            )
        before = log.read_bytes().count(b"Ready to accept")
        wait_until(lambda: log.read_bytes().count(b"Ready to accept") > before, "Redis is ready")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _port() -> int:
    """Free, and low enough for a cluster's own, which is 10000 above it."""
    while (port := free_port(HOST, 0)) > 55_000:
        pass
    return port


@contextmanager
def redis_server(home: Path, *, cluster: bool = False) -> Iterator[RedisServer]:
    home.mkdir(exist_ok=True)
    server = RedisServer(home, cluster)
    server.start()
    try:
        yield server
    finally:
        with suppress(AssertionError):
            server.kill()
