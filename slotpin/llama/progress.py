"""Progress of a long step: one updating line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from slotpin.llama.cache import Report

STEP_PERCENT = 10
STEP_SECONDS = 30.0


class Progress:
    def __init__(self, title: str, report: Report, terminal: TextIO | None = None) -> None:
        self._title = title
        self._report = report
        self._terminal = terminal or sys.stderr
        self._updating = self._terminal.isatty()
        self._told = -STEP_PERCENT
        self._told_at = time.monotonic()

    def update(self, percent: int) -> None:
        line = f"{self._title}: {percent:3d} %"
        if self._updating:
            print(f"\r{line}", end="", file=self._terminal, flush=True)
        elif percent >= self._told + STEP_PERCENT or time.monotonic() >= self._told_at + STEP_SECONDS:
            self._told = percent - percent % STEP_PERCENT
            self._told_at = time.monotonic()
            self._report(line)

    def close(self) -> None:
        """Leave the updating line, so that what follows starts on its own."""
        if self._updating:
            print(file=self._terminal, flush=True)
