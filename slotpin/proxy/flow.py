"""One connection's transport, and its back-pressure: who writes waits while its buffer is full."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable


class Wire:
    """A transport to which everything may be said after its end too, as asyncio's own let one; uvloop's raise."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def is_reading(self) -> bool:
        return not self._transport.is_closing() and self._transport.is_reading()

    @property
    def unsent(self) -> int:
        """Bytes that wait for the other side."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def read(self, on: bool) -> None:
        """Go on reading, or stop for now."""
        if self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        """Once everything is sent."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def reset(self) -> None:
        """Abort, and let the other side know that what it has is not all (RST)."""
        if not self._transport.is_closing():
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    @property
    def peer(self) -> str:
        """The other side's IP address; empty for a unix socket."""
        address = self._transport.get_extra_info("peername")
        return address[0] if isinstance(address, tuple) else ""


class FlowControl:
    """Fed by the protocol's `pause_writing` and `resume_writing`; `on_change` hears of each (True: paused)."""

    __slots__ = ("_waiter", "on_change", "paused")

    def __init__(self) -> None:
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
