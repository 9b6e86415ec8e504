"""A stand-in for llama-server that can misbehave at any byte: raw sockets, scripted by each test."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

Headers = list[tuple[bytes, bytes]]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: bytes = b"{}", status: bytes = b"200 OK", headers: Sequence[bytes] = ()) -> bytes:
    """A whole answer with a Content-Length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def slots_json(count: int) -> bytes:
    """What `GET /slots` of a server with `count` slots says, as far as slotpin reads it."""
    return json.dumps([{"id": slot, "n_ctx": 4096, "is_processing": False} for slot in range(count)]).encode()


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came: `head` with its line ends, `body` without chunk framing; `connection` counts from 1."""

    connection: int
    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    @property
    def method(self) -> bytes:
        return self.line.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    @property
    def headers(self) -> Headers:
        return parse_headers(self.head)

    def get_all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


def parse_headers(head: bytes) -> Headers:
    """The header lines of a head, in order, as sent."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")[1:]
    pairs = [line.partition(b": ") for line in lines]
    return [(name, value) for name, _, value in pairs]


def get_all(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name.lower()]


class Connection:
    """One accepted connection, in the hands of a script."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self._writer.transport.is_closing():
                raise ConnectionResetError("the client has left")
            self._writer.write(piece)
            await self._writer.drain()

    async def read_head(self) -> bytes:
        """Empty at the end of the connection."""
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def read_body(self, head: bytes) -> bytes:
        headers = parse_headers(head)
        lengths, encodings = get_all(headers, b"content-length"), get_all(headers, b"transfer-encoding")
        assert len(lengths) + len(encodings) <= 1, head
        if lengths:
            return await self.reader.readexactly(int(lengths[0]))
        return await self.read_chunks() if encodings else b""

    async def read_chunks(self) -> bytes:
        pieces = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return b"".join(pieces)

    async def gone(self) -> None:
        """Until the other side has closed; bytes that still come are thrown away."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def go_on_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def finish_sending(self) -> None:
        """FIN: everything that was sent still arrives."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """RST, as from a process that dies with bytes unread."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Connection, Request], Awaitable[None]]
Raw = Callable[[Connection], Awaitable[None]]


async def ok(connection: Connection, _: Request) -> None:
    await connection.send(answer())


@dataclass
class Stub:
    """`script` answers each request but the look at `/slots`, which `slots` answers (or `script`, when it is None).

    `raw` takes over whole connections instead. `accepts` and `requests` are what came, `/slots` apart in `probes`.
    """

    script: Script = ok
    slots: bytes | None = field(default_factory=lambda: answer(slots_json(2)))
    raw: Raw | None = None
    accepts: int = 0
    open: int = 0
    requests: list[Request] = field(default_factory=list)
    probes: list[Request] = field(default_factory=list)
    port: int = 0
    socket: Path | None = None
    tls: ssl.SSLContext | None = None
    base_path: str = ""
    failures: list[BaseException] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """The base URL without `/v1`."""
        if self.socket is not None:
            return f"unix:{self.socket}"
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{self.base_path}"

    @property
    def generating_accepts(self) -> int:
        """Connections that were not for a look at `/slots` (those come on a connection each)."""
        return self.accepts - len(self.probes)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepts += 1
        self.open += 1
        connection = Connection(self.accepts, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await (self.raw(connection) if self.raw is not None else self._requests(connection))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the proxy has left, in mid-request too
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()

    async def _requests(self, connection: Connection) -> None:
        while head := await connection.read_head():
            request = Request(connection.number, head, await connection.read_body(head))
            if self.slots is not None and request.target.partition(b"?")[0].endswith(b"/slots"):
                self.probes.append(request)
                await connection.send(self.slots)
            else:
                self.requests.append(request)
                await self.script(connection, request)


@asynccontextmanager
async def stub_upstream(
    script: Script = ok,
    *,
    slots: int | bytes | None = 2,
    raw: Raw | None = None,
    base_path: str = "",
    port: int = 0,
    socket: Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Stub]:
    """`slots`: how many there are, or the whole answer. A script that fails makes the test fail."""
    slots_answer = answer(slots_json(slots)) if isinstance(slots, int) else slots
    stub = Stub(script, slots_answer, raw, base_path=base_path, socket=socket, tls=tls)
    if socket is not None:
        server = await asyncio.start_unix_server(stub._serve, socket, limit=2**20, backlog=1024)
    else:
        server = await asyncio.start_server(stub._serve, "127.0.0.1", port, limit=2**20, backlog=1024, ssl=tls)
        stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()
        tasks = list(stub._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if stub.failures:
        raise stub.failures[0]
