"""The proxy in this process, on a port of its own, and clients that write and read raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, ParamSpec
from urllib.parse import urlsplit

import structlog

import slotpin
from slotpin.config import Settings
from slotpin.loop import run
from slotpin.observe.log import Log
from slotpin.pinning.endpoints import socket_path
from slotpin.proxy.app import Proxy
from tests.support.stub_upstream import Headers, Stub, get_all, parse_headers

P = ParamSpec("P")
Event = MutableMapping[str, Any]
_PACKAGE = Path(slotpin.__file__).parent


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on an event loop of its own, of the kind that slotpin serves on; one that hangs fails."""

    @functools.wraps(test)
    def on_its_loop(*args: P.args, **kwargs: P.kwargs) -> None:
        run(asyncio.wait_for(test(*args, **kwargs), 30))

    return on_its_loop


async def until(condition: Callable[[], bool], what: str, seconds: float = 5) -> None:
    """Poll `condition`; fail if it is still false after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


def settings_for(
    stub: Stub, enabled: bool | str = "auto", compactor: Stub | None = None, **sections: Mapping[str, object]
) -> Settings:
    """Settings for a proxy in front of `stub`; `sections` are further ones as in the file, merged key by key."""
    tree: dict[str, dict[str, object]] = {
        "listen": {"port": 0},
        "main": {"baseUrl": f"{stub.url}/v1"},
        "compactor": {"apiKey": "compactor-key"},
        "llamaCppSlots": {"enabled": enabled},
        "timeouts": {"drainSeconds": 0},
    }
    if compactor is not None:
        tree["compactor"]["baseUrl"] = f"{compactor.url}/v1"
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Settings.model_validate(tree, by_alias=True, by_name=False)


def capturing_log() -> tuple[Log, list[Event]]:
    """A log, and the events that were written to it (their text under `event`, their level under `level`)."""
    events: list[Event] = []

    def keep(_: object, level: str, event: Event) -> Event:
        events.append({**event, "level": level})
        raise structlog.DropEvent

    log: Log = structlog.wrap_logger(
        structlog.PrintLogger(), processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    return log, events


@dataclass
class Running:
    """`events` is the log; `complaints` what asyncio and its libraries had to say, which has to stay empty."""

    proxy: Proxy
    events: list[Event]
    complaints: list[str] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    @property
    def port(self) -> int:
        port = urlsplit(self.proxy.url).port
        assert port is not None
        return port

    def logged(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    async def client(self) -> Client:
        socket = socket_path(self.proxy.url)
        client = await (Client.connect_unix(socket) if socket else Client.connect(self.port))
        self.clients.append(client)
        return client

    async def fetch(
        self,
        target: str = "/v1/chat/completions",
        body: bytes | None = b'{"messages":[]}',
        headers: Sequence[bytes] = (),
        method: str | None = None,
        host: bytes = b"localhost",
    ) -> Response:
        """One request on a connection of its own."""
        client = await self.client()
        try:
            method = method or ("GET" if body is None else "POST")
            await client.send(request(method, target, body, headers, host=host))
            return await client.read_response(method)
        finally:
            await client.close()

    async def status(self) -> dict[str, Any]:
        response = await self.fetch("/slotpin/status", None)
        assert response.status == 200
        shown: dict[str, Any] = json.loads(response.body)
        return shown

    async def bindings(self) -> tuple[int, int]:
        """How many are open, how many ended."""
        shown = (await self.status())["bindings"]
        return shown["open"], shown["ended"]

    async def until_outcome(self, outcome: str, count: int = 1) -> None:
        await until(
            lambda: [event["outcome"] for event in self.logged("exchange")].count(outcome) >= count,
            f"{count} exchanges that end as {outcome}",
        )


class _Complaints(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(logging.Formatter().format(record))


@asynccontextmanager
async def running_proxy(settings: Settings) -> AsyncIterator[Running]:
    """A proxy that is stopped at the end; then nothing of it may be left, and nothing may have been complained of."""
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    log, events = capturing_log()
    running = Running(Proxy(settings, log), events)
    handler = _Complaints(running.complaints)
    loop.set_exception_handler(lambda _, context: running.complaints.append(repr(context)))
    logging.getLogger().addHandler(handler)
    try:
        await running.proxy.start()
        yield running
    finally:
        await running.proxy.stop()
        for client in running.clients:
            client.leave()
        await asyncio.sleep(0)
        logging.getLogger().removeHandler(handler)
    await until(lambda: not _tasks_of_the_proxy(before), f"no task is left: {_tasks_of_the_proxy(before)}")
    assert running.complaints == []
    assert running.logged("bug") == []


def _tasks_of_the_proxy(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() - before if is_of_the_proxy(task)]


def is_of_the_proxy(task: asyncio.Task[Any]) -> bool:
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    return code is not None and Path(code.co_filename).is_relative_to(_PACKAGE)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer as read from the wire; `body` is without chunk framing, `chunks` as they were cut."""

    head: bytes
    body: bytes
    chunks: tuple[bytes, ...] = ()

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def phrase(self) -> bytes:
        return self.head.partition(b"\r\n")[0].split(b" ", 2)[2]

    @property
    def headers(self) -> Headers:
        return parse_headers(self.head)

    def get_all(self, name: bytes) -> list[bytes]:
        return get_all(self.headers, name)

    def get(self, name: bytes) -> bytes | None:
        return next(iter(self.get_all(name)), None)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def request(
    method: str,
    target: str | bytes,
    body: bytes | None = None,
    headers: Sequence[bytes] = (),
    *,
    version: bytes = b"1.1",
    host: bytes = b"localhost",
) -> bytes:
    """The bytes of a request; a body goes with its Content-Length."""
    target = target.encode() if isinstance(target, str) else target
    lines = [b"%s %s HTTP/%s" % (method.encode(), target, version), b"Host: " + host, *headers]
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


class Client:
    """A raw connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, limit: int = 2**20) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    @classmethod
    async def connect_unix(cls, path: str, limit: int = 2**20) -> Client:
        return cls(*await asyncio.open_unix_connection(path, limit=limit))

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.send_nowait(piece)
            await self._writer.drain()

    def send_nowait(self, data: bytes) -> None:
        if not self._writer.transport.is_closing():
            self._writer.write(data)

    async def read_head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def read_chunk(self) -> bytes:
        """The next chunk of a chunked body, empty for the last one."""
        size = int((await self.reader.readline()).strip(), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def read_response(self, method: str = "POST") -> Response:
        head = await self.read_head()
        headers = parse_headers(head)
        lengths, encodings = get_all(headers, b"content-length"), get_all(headers, b"transfer-encoding")
        assert len(lengths) + len(encodings) <= 1, head
        status = int(head.split(b" ", 2)[1])
        if method == "HEAD" or status in (204, 304):
            return Response(head, b"")
        if encodings:
            assert encodings == [b"chunked"]
            chunks = []
            while data := await self.read_chunk():
                chunks.append(data)
            return Response(head, b"".join(chunks), tuple(chunks))
        if lengths:
            return Response(head, await self.reader.readexactly(int(lengths[0])))
        return Response(head, await self.reader.read(-1))

    async def read_all(self) -> tuple[bytes, bool]:
        """Everything until the end, and whether the connection was reset."""
        data = bytearray()
        try:
            while piece := await self.reader.read(65536):
                data += piece
        except ConnectionError:
            return bytes(data), True
        return bytes(data), False

    def finish_sending(self) -> None:
        """FIN: to a proxy that is as good as a client that has left."""
        self._writer.write_eof()

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def go_on_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """RST, as from a process that was killed with bytes unread."""
        if not self._writer.transport.is_closing():
            self._writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
