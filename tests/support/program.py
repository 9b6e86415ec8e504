"""slotpin as a user starts it: a process with a home folder of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

import psutil

from tests.support.processes import wait_until

TOP = Path(__file__).parents[2]
DEADLINE = 60.0


def environment(home: Path) -> dict[str, str]:
    """Nothing of the developer's: no configuration, no cache, no variable. A warning of Python's is an error."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": str(TOP),
        # A client that connects in the moment of the end leaves an open transport to the interpreter: no matter.
        "PYTHONWARNINGS": "error,ignore::ResourceWarning",
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "slotpin", *arguments]


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself; the current folder is `home`."""
    return subprocess.run(
        command(*arguments),
        cwd=home,
        env=environment(home) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


class Program:
    """A command that runs until it is told to end. Killed with the block, if it still runs then."""

    def __init__(self, home: Path, *arguments: str, **variables: str) -> None:
        number = len(list(home.glob("*.stdout")))
        self._stdout, self._stderr = home / f"{number}.stdout", home / f"{number}.stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command(*arguments),
                cwd=home,
                env=environment(home) | variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        return self._stdout.read_text()

    @property
    def err(self) -> str:
        return self._stderr.read_text()

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end; waits until it says so."""

        def said() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.out}{self.err}"
            return "enabled:" in self.out

        wait_until(said, "slotpin is ready", DEADLINE)
        found = re.match(r"slotpin \S+ listens on (http://\S+)\n", self.out)
        assert found, self.out
        return found[1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = DEADLINE) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """What it has logged as JSON so far: the events called `name` that have these fields."""
        lines = [line for line in self.err.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [event for event in events if event["event"] == name and fields.items() <= event.items()]

    def exchanges(self, **fields: object) -> list[dict[str, Any]]:
        """The exchanges that have these fields. A client may have its whole answer a moment before the exchange is
        logged, so while it runs it is asked first whether one is under way still."""
        if self.process.poll() is None:
            url = f"{self.url}/slotpin/status"
            wait_until(lambda: not json.loads(urlopen(url, timeout=DEADLINE).read())["underWay"], "all have ended")
        return self.events("exchange", **fields)


def assert_lines(stderr: str, *beginnings: str) -> None:
    """Standard error is exactly these lines for people, each starting so."""
    lines = stderr.splitlines()
    assert len(lines) == len(beginnings), stderr
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"slotpin: {beginning}"), stderr


def children(pid: int) -> Sequence[int]:
    """Ids of the processes that `pid` has started and that run still."""
    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        # What a dead parent left behind has another parent now; nothing is left to find it by.
        return []
    return [child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE]


def command_line(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []
