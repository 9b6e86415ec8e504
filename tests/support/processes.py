"""Helpers for tests that start and kill real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `code` in an interpreter of its own, from the repository's top folder; read its stdout line by line."""
    top = Path(__file__).parents[2]
    command = [sys.executable, "-u", "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=top)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Poll `condition`; the test fails if it is still false after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie counts as dead: its memory and its sockets are gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
