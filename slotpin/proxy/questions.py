"""What slotpin asks on its own account, and the whole answer; seldom, so each question has its own connection.

llama-server closes idle connections after five seconds: one that is never kept can't be stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from slotpin.proxy.headers import ResponseHead
from slotpin.proxy.upstream import Address, UpstreamError, UpstreamPool

CONNECT_SECONDS = 10.0
# /slots is about 3 KiB a slot; a body of this size is something else.
MAX_BODY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """`lines`: its end-to-end headers as they came. `body`: no more than its first MAX_BODY_BYTES, about."""

    status: int
    lines: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """By their names in lower case."""
        parted = (line.partition(": ") for line in self.lines.decode("latin-1").split("\r\n")[:-1])
        return {name.lower(): value for name, _, value in parted}


class Questions:
    """Over TCP, TLS and unix sockets. No redirect is followed: it could carry the API key to another place."""

    def __init__(self) -> None:
        self._pools: dict[Address, UpstreamPool] = {}  # each with what TLS needs

    async def ask(
        self,
        method: str,
        root: str,
        path: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
    ) -> Answer:
        """`root`: a base URL without `/v1`. Raises UpstreamError; how long it may take is for the caller to say."""
        address = Address.of(root)
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = UpstreamPool(address, CONNECT_SECONDS, lambda: None)
        length = {"Content-Length": str(len(body))} if body else {}
        fields = {"Host": address.host_header.decode(), "Connection": "close", **headers, **length}
        lines = [f"{method} {address.root}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        collected = _Collected()
        try:
            connection = await pool.connect()
        except UnicodeError:  # no name that DNS could have
            raise UpstreamError("there is no host of that name") from None
        try:
            connection.start(method, "\r\n".join((*lines, "", "")).encode(), (body,), collected)
            return await collected.answer
        finally:
            connection.abort()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _Collected:
    """A `Sink` that keeps what comes."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._lines = b""
        self._body = bytearray()

    def on_head(self, status: int, phrase: bytes, head: ResponseHead) -> None:
        self._status, self._lines = status, head.lines

    def on_read(self, data: bytes) -> None:
        self._body += data
        if len(self._body) >= MAX_BODY_BYTES:
            self.on_complete(b"")

    def on_complete(self, data: bytes) -> None:
        self._body += data
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, self._lines, bytes(self._body)))

    def on_broken(self, data: bytes, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
