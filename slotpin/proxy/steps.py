"""Work that is done at once as far as it can be; only what has to wait becomes a task."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


class Steps:
    """Runs one coroutine. `tasks` has those that wait, for as long as they do.

    Until its first `in_a_task` the coroutine must await nothing that would suspend it.
    """

    __slots__ = ("_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def run(self, steps: Coroutine[Any, Any, None]) -> None:
        try:
            steps.send(None)
        except StopIteration:
            return
        # The task goes on where the coroutine has stopped: to be sent None is what both a fresh one and a bare `yield`
        # wait for.
        self._task = asyncio.get_running_loop().create_task(steps)
        self._tasks.add(self._task)
        self._task.add_done_callback(self._ended)

    @types.coroutine
    def in_a_task(self) -> Generator[None, None, None]:
        """What follows may wait."""
        if self._task is None:
            yield

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._task = None  # one that was cancelled holds what it was at

    def cancel(self) -> bool:
        """Whether there was something to cancel."""
        return self._task is not None and self._task.cancel()
