"""Connections to llama-server: pooled, one answer at a time, its bytes handed on as they come."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

import httptools

from slotpin.pinning.endpoints import socket_path
from slotpin.pinning.splice import Pieces
from slotpin.proxy.flow import FlowControl, Wire
from slotpin.proxy.headers import Headers, ResponseHead, read_response

# llama-server closes an idle connection after 5 s and after 100 requests (cpp-httplib's keep-alive defaults).
IDLE_SECONDS = 4.0
MAX_REQUESTS = 90
# A kept connection that breaks this soon and without a byte had been closed by the server before the request arrived.
STALE_SECONDS = 1.0
# A body up to this size is copied, so that it goes out in one send with its head.
JOINED_BYTES = 64 * 1024
NOBODY = "nothing listens there"


class UpstreamError(Exception):
    """The server can't be reached, or its answer broke off; the message is for people."""


class NotRunningError(UpstreamError):
    """Nothing listens at the server's address."""


class StaleConnectionError(UpstreamError):
    """A kept connection turned out to be closed: nothing of the request was run, so it may be sent again."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `root` is the path in front of its own routes, without a trailing slash.

    The `host` of the scheme "unix" is the socket's path.
    """

    scheme: str
    host: str
    port: int
    root: str

    @classmethod
    def of(cls, root: str) -> Self:
        """`root` as `server_root` gives it."""
        if socket := socket_path(root):
            return cls("unix", socket, 0, "")
        parts = urlsplit(root)
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or default, parts.path)

    @property
    def host_header(self) -> bytes:
        if self.scheme == "unix":
            return b"localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return (host if self.port == default else f"{host}:{self.port}").encode()

    @property
    def url(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.host}"
        return f"{self.scheme}://{self.host_header.decode()}{self.root}"


def tls_problem(error: Exception) -> str:
    """What is wrong with a server's certificate, or with its TLS, in a line for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE can name a file with its CA"
    reason = getattr(error, "reason", None) or str(error)
    return f"TLS fails ({reason}); is it http:// instead of https://?"


class Sink(Protocol):
    """Takes an answer: its head, then of its body what comes in each read, which may be nothing.

    `on_complete` and `on_broken` end it, and exactly one of them is called, once.
    """

    def on_head(self, status: int, phrase: bytes, head: ResponseHead) -> None: ...
    def on_read(self, data: bytes) -> None: ...
    def on_complete(self, data: bytes) -> None: ...
    def on_broken(self, data: bytes, error: UpstreamError) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, on_lost: Callable[[UpstreamConnection], None]) -> None:
        # For the life of the connection.
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._wire: Wire
        self.flow: FlowControl
        self.requests = 0
        self.idle_since = 0.0
        self.closed = False
        self.is_throttled = False
        self._pieces: list[bytes] = []  # of the body, what came in the read that is being taken in
        self.on_body = self._pieces.append  # for httptools
        self._parser = httptools.HttpResponseParser(self)
        # For one answer.
        self._sink: Sink | None = None
        self._method = ""
        self._sent_at = 0.0
        self._phrase = b""
        self._headers: Headers = []
        self._heard_at = 0.0  # 0: not yet
        self._due_since = 0.0
        self._until_close = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop derives its own from nothing
        self._wire = Wire(transport)
        self.flow = FlowControl()

    def start(self, method: str, head: bytes, body: Pieces, sink: Sink) -> None:
        """Send a request head and what there is of its body, which `write` goes on with; the answer goes to `sink`."""
        self.requests += 1
        self._sink = sink
        self._method = method
        self._sent_at = self._loop.time()
        self._heard_at = 0.0
        self._until_close = False
        if sum(map(len, body)) <= JOINED_BYTES:
            self._wire.write(b"".join((head, *body)))
        else:
            for piece in (head, *body):
                self._wire.write(piece)

    def write(self, data: bytes) -> None:
        self._wire.write(data)

    def limit_silence(self, seconds: float) -> None:
        """The request is sent: from now on the answer breaks when nothing of it comes for so long. 0: for ever."""
        if seconds and self._sink is not None:
            self._due_since = self._loop.time()
            self._loop.call_later(seconds, self._look_for_silence, self.requests, seconds)

    def _look_for_silence(self, request: int, seconds: float) -> None:
        if self._sink is None or self.requests != request:
            return
        now = self._loop.time()
        if not self._wire.is_reading:
            self._due_since = now  # it is the client that takes nothing
        left = max(self._heard_at, self._due_since) + seconds - now
        if left <= 0:
            self._break(UpstreamError(f"nothing came for {seconds:g} s (timeouts.idleSeconds)"))
        else:
            self._loop.call_later(left, self._look_for_silence, request, seconds)

    def throttle(self, paused: bool) -> None:
        """Stop or go on reading the answer: the client takes it more slowly than the server sends it."""
        self.is_throttled = paused
        self._wire.read(on=not paused)

    def abort(self) -> None:
        """Close at once, so that llama-server sees that nobody waits any more and frees the slot."""
        self._sink = None
        self._wire.abort()

    @property
    def reusable(self) -> bool:
        # An answer that came early leaves the rest of its request behind.
        sent = not self.closed and not self._wire.is_closing and self._wire.unsent == 0
        return sent and self._sink is None and self.requests < MAX_REQUESTS

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            self._wire.abort()  # bytes that nobody asked for: the connection can't be trusted any more
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(UpstreamError(f"its answer is not HTTP/1.1 ({error})"))
        if self._sink is not None:
            self._sink.on_read(self._taken())

    def eof_received(self) -> None:
        if self._sink is not None and self._until_close:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.flow.lost()
        self._on_lost(self)
        if self._sink is None:
            return
        stale = self.requests > 1 and not self._heard_at and self._loop.time() - self._sent_at < STALE_SECONDS
        kind = StaleConnectionError if stale else UpstreamError
        self._break(kind("it closed the connection before the answer was complete"))

    def pause_writing(self) -> None:
        self.flow.pause()

    def resume_writing(self) -> None:
        self.flow.resume()

    # httptools

    def on_message_begin(self) -> None:
        self._phrase, self._headers = b"", []
        if self._sink is None:
            self._wire.abort()  # a second answer to one request

    def on_status(self, phrase: bytes) -> None:
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._sink is None:
            return  # an interim answer: the real one follows
        head = read_response(self._headers)
        has_body = self._method != "HEAD" and status not in (204, 304)
        self._until_close = has_body and head.length is None and not head.chunked
        self._sink.on_head(status, self._phrase, head)
        if self._method == "HEAD":
            # The parser would wait for the body that the head announces.
            self._wire.abort()
            self._finish()

    def on_message_complete(self) -> None:
        if self._sink is not None and self._parser.get_status_code() >= 200:
            if not self._parser.should_keep_alive():
                self._wire.close()
                self.closed = True
            self._finish()

    def _taken(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return data

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_complete(self._taken())

    def _break(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._wire.abort()
        if sink is not None:
            sink.on_broken(self._taken(), error)


class UpstreamPool:
    """Kept connections to one server. `kept` or `connect`, and `release`, are the whole life of a use.

    `on_restart` is called when the server closes a connection that it should have kept: it may be another process soon.
    """

    def __init__(self, address: Address, connect_seconds: float, on_restart: Callable[[], None]) -> None:
        self.address = address
        self.host_header = address.host_header
        self._on_restart = on_restart
        self.connect_seconds = connect_seconds
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        self._expiry: asyncio.TimerHandle | None = None

    def kept(self) -> UpstreamConnection | None:
        """A connection that was used before and is ready for a request."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    def release(self, connection: UpstreamConnection) -> None:
        """Keep the connection when its answer is complete, else close it."""
        if not connection.reusable:
            connection.abort()
            return
        if connection.is_throttled:
            connection.throttle(False)
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._expiry is None:
            self._expiry = loop.call_later(IDLE_SECONDS, self._expire)

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()

    async def connect(self) -> UpstreamConnection:
        """A new connection; raises UpstreamError."""
        try:
            async with asyncio.timeout(self.connect_seconds):
                connection = await self._open()
        except TimeoutError:
            raise UpstreamError(f"no answer within {self.connect_seconds:g} s") from None
        except ssl.SSLError as error:
            raise UpstreamError(tls_problem(error)) from None
        except OSError as error:
            if _is_refused(error):
                raise NotRunningError(NOBODY) from None
            # asyncio's own text names its call.
            number = error.errno or 0
            raise UpstreamError(os.strerror(number) if number > 0 else error.strerror or str(error)) from None
        self._all.add(connection)
        return connection

    async def _open(self) -> UpstreamConnection:
        loop, address = asyncio.get_running_loop(), self.address
        if address.scheme == "unix":
            _, connection = await loop.create_unix_connection(lambda: UpstreamConnection(self._lost), address.host)
        else:
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(self._lost), address.host, address.port, ssl=self._ssl
            )
        return connection

    def _lost(self, connection: UpstreamConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            self._on_restart()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        for connection in [kept for kept in self._idle if kept.idle_since <= oldest]:
            self._idle.remove(connection)
            connection.abort()
        self._expiry = None
        if self._idle:
            self._expiry = loop.call_at(self._idle[0].idle_since + IDLE_SECONDS, self._expire)


def _is_refused(error: OSError) -> bool:
    """Also where a name has several addresses: asyncio puts what each said into one text."""
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):  # the latter where there is no such socket
        return True
    said = str(error)
    return error.errno is None and said.count(f"[Errno {errno.ECONNREFUSED}]") == said.count("[Errno ") > 0
