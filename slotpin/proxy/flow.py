"""Back-pressure on one transport: who writes waits while its buffer is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class FlowControl:
    """Fed by the protocol's `pause_writing` and `resume_writing`; `on_change` hears of each (True: paused)."""

    __slots__ = ("_transport", "_waiter", "on_change", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiter: asyncio.Future[None] | None = None
        self.paused = False
        self.on_change: Callable[[bool], None] | None = None

    def pause(self) -> None:
        self.paused = True
        if self.on_change is not None:
            self.on_change(True)

    def resume(self) -> None:
        self.paused = False
        self._wake()
        if self.on_change is not None:
            self.on_change(False)

    def lost(self) -> None:
        """The connection is gone: nobody needs to wait for it any more."""
        self.paused = False
        self._wake()

    async def drain(self) -> None:
        if self.paused:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiter)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
