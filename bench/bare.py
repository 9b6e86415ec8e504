"""The least that a proxy on uvloop can do: it passes bytes on, both ways, and understands none of them.

`bench.proxy` has it for a floor: what this takes, Python and its event loop take.

    python -m bench.bare PORT UPSTREAM_PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One end of a pair."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.other: Side | None = None
        self.early = b""  # what came before the other end was there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
        else:
            self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.abort()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()


class Client(Side):
    def __init__(self, upstream_port: int) -> None:
        super().__init__()
        self._upstream_port = upstream_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self.other = await loop.create_connection(Side, "127.0.0.1", self._upstream_port)
        self.other.other = self
        if self.transport.is_closing():
            self.other.transport.abort()
        else:
            self.other.transport.write(self.early)


async def serve(port: int, upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(upstream_port), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    port, upstream_port = map(int, sys.argv[1:])
    uvloop.run(serve(port, upstream_port))


if __name__ == "__main__":
    main()
