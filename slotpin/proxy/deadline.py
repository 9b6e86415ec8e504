"""A deadline that moves with every request and is seldom met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_due` once, when the time that was set last is over. Setting it anew makes no new timer where the one
    that runs is early enough to look again: connections do so for each request."""

    __slots__ = ("_at", "_loop", "_on_due", "_timer")

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_due = on_due
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """From now on."""
        self._at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._at:
            self._start(self._at)

    def clear(self) -> None:
        self._at = None

    def close(self) -> None:
        self._at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._at is None:
            return
        if self._loop.time() < self._at:
            self._start(self._at)
        else:
            self._at = None
            self._on_due()
