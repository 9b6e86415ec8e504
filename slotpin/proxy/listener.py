"""The client's side: HTTP/1.1 on a socket, one request at a time, answers written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from slotpin.proxy.deadline import Deadline
from slotpin.proxy.flow import FlowControl, Wire
from slotpin.proxy.headers import Headers, RequestHead, header_lines, response_head
from slotpin.proxy.replies import Reply, error

# A head larger than this is refused; llama-server takes 100 header lines of 8 KiB and a target of 8 KiB.
MAX_HEAD_BYTES = 1024 * 1024
# A body that is streamed through is read no further than this ahead of the server.
BODY_HIGH_WATER = 256 * 1024
# Bytes of later requests that a client may send ahead while one is being answered.
PIPELINE_HIGH_WATER = 64 * 1024
HEAD_SECONDS = 30.0
# How long a client that still sends may take to read an answer that came early, before the connection goes.
LINGER_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 75.0


class RequestBody:
    """A body as it arrives. Read it whole, or piece by piece with back-pressure on the client."""

    __slots__ = (
        "_buffered",
        "_discarded",
        "_expects_continue",
        "_hold",
        "_limit",
        "_paused",
        "_pieces",
        "_waiter",
        "_whole",
        "_wire",
        "complete",
    )

    def __init__(self, wire: Wire, expects_continue: bool, hold: Callable[[object, bool], None]) -> None:
        self._wire = wire
        self._hold = hold
        self._expects_continue = expects_continue
        self._pieces: list[bytes] = []  # an empty deque takes 760 bytes, a list 56
        self._whole: bytearray | None = None  # what came since somebody wants all of it
        self._buffered = 0
        self._limit: int | None = BODY_HIGH_WATER
        self._paused = False
        self._discarded = False
        self._waiter: asyncio.Future[None] | None = None
        self.complete = False

    def feed(self, data: bytes) -> None:
        if self._discarded:
            return
        if self._whole is not None:
            self._whole += data
            return
        self._pieces.append(data)
        self._buffered += len(data)
        if self._limit is not None and self._buffered > self._limit and not self._paused:
            self._paused = True
            self._hold(self, True)
        self._wake()

    def feed_end(self) -> None:
        self.complete = True
        self._resume()
        self._wake()

    def take(self) -> bytes:
        """The whole body, once it is complete."""
        if len(self._pieces) == 1:
            return self._pieces.pop()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    async def read(self) -> bytes | bytearray:
        """The whole body, of any size."""
        if self.complete:
            return self.take()
        self._limit = None
        self._ask()
        # One buffer that grows: pieces that are joined at the end would need the memory twice.
        self._whole = bytearray().join(self._pieces)
        self._pieces.clear()
        self._resume()
        await self._more()
        body, self._whole = self._whole, None
        return body

    async def next(self) -> bytes | None:
        """The next piece; None after the last one."""
        self._ask()
        while not self._pieces:
            if self.complete:
                return None
            self._resume()
            await self._more()
        piece = self._pieces.pop(0)
        self._buffered -= len(piece)
        return piece

    def discard(self) -> None:
        """Read on, but keep nothing."""
        self._discarded = True
        self._whole = None
        self._pieces.clear()
        self._resume()

    def _ask(self) -> None:
        # RFC 9110 section 10.1.1: the client waits for this before it sends the body.
        if self._expects_continue and not self.complete and not self._pieces:
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._hold(self, False)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Incoming:
    """One request and the way back to its client. After `start`, exactly one of `finish` and `abort` ends it.

    What is written goes out with the next `flush` or `finish`, in one piece: each send costs the most of all.
    """

    __slots__ = ("_chunked", "_close", "_connection", "_out", "body", "head", "started")

    def __init__(self, connection: ClientConnection, head: RequestHead, body: RequestBody) -> None:
        self.head = head
        self.body = body
        self.started = False
        self._connection = connection
        self._out: list[bytes] = []
        self._chunked = False
        self._close = not head.keep_alive

    @property
    def flow(self) -> FlowControl:
        return self._connection.flow

    @property
    def peer(self) -> str:
        """The client's address; empty on a unix socket."""
        return self._connection.peer

    @property
    def cut_off(self) -> bool:
        """Whether slotpin's own stop broke the connection off, and not the client."""
        return self._connection.was_cut_off

    def start(self, status: int, phrase: bytes, lines: bytes, length: int | None, has_body: bool = True) -> None:
        """Write the answer's head. `lines` are its end-to-end headers; `length` None: the body's end is not known."""
        self.started = True
        if has_body and length is None:
            if self.head.http10:
                self._close = True  # nothing but the end of the connection can end the body
            else:
                self._chunked = True
                lines += b"Transfer-Encoding: chunked\r\n"
        # A body that was not read to its end would be taken for the next request.
        if self._connection.draining or not self.body.complete:
            self._close = True
        if self._close:
            lines += b"Connection: close\r\n"
        elif self.head.http10:
            lines += b"Connection: keep-alive\r\n"
        self._out.append(response_head(status, phrase, lines))

    def write(self, data: bytes) -> None:
        self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def flush(self) -> None:
        out = self._out
        if out:
            self._connection.write(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def finish(self) -> None:
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._connection.done(self, close=self._close)

    def reply(self, reply: Reply, lines: bytes = b"") -> None:
        """Send an answer of slotpin's own; `lines` are more headers for it."""
        lines = b"%b%bContent-Length: %d\r\n" % (header_lines(reply.headers), lines, len(reply.body))
        self.start(reply.status, reply.phrase, lines, len(reply.body))
        if self.head.method != "HEAD":
            self.write(reply.body)
        self.finish()

    def fail(self, reply: Reply) -> None:
        """Say so where the answer has not begun; else there is but one way to show it."""
        if self.started:
            self.abort()
        else:
            self.reply(reply)

    def abort(self) -> None:
        """Break the connection off: an answer that is not complete must not look as if it were."""
        self._connection.abort(reset=self.head.http10)


class Work(Protocol):
    """What is done for a request."""

    def cancel(self) -> object:
        """The client is gone, or its request has turned out to be none."""


Handler = Callable[[Incoming], Work | None]


class ClientConnection(asyncio.Protocol):
    def __init__(self, handler: Handler, connections: set[ClientConnection]) -> None:
        # For the life of the connection.
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._wire: Wire
        self._parser = httptools.HttpRequestParser(self)
        self._deadline: Deadline
        self.flow: FlowControl
        self.draining = False
        self.was_cut_off = False
        self._lingers = False  # answered early: what still comes of the request is thrown away
        self._deaf = False
        self._is_kept = False  # between two requests
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # The request that is being answered, and those that the client sent ahead.
        self._current: Incoming | None = None
        self._work: Work | None = None
        self._is_new = False  # it is to be handled as soon as what came with its head is taken in
        self._ahead: list[Incoming] = []
        self._ahead_bytes = 0
        self._last_words: Reply | None = None  # to what can't be read, once everything before it is answered
        # Who wants nothing more to be read for now: bodies, and the connection itself for requests sent ahead.
        self._holds: set[object] = set()
        # The request that is being read.
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0  # also of trailers and chunk extensions: what was read since the last byte of a body
        self._upgrading = False
        self._reading_head = True
        self._body: RequestBody

    def drain(self) -> None:
        """Close after the answer that is under way, or now if there is none."""
        self.draining = True
        if self._current is None:
            self._wire.close()

    @property
    def is_answering(self) -> bool:
        return self._current is not None

    @property
    def peer(self) -> str:
        return self._wire.peer

    async def cut_off(self) -> None:
        """End it now, whatever is under way, and wait until that has taken notice."""
        self.was_cut_off = True
        if (current := self._current) is not None:
            current.abort()
        self._wire.abort()
        await self.closed

    def write(self, data: bytes) -> None:
        self._wire.write(data)

    def abort(self, reset: bool = False) -> None:
        """`reset`: where the end of the connection could be taken for the end of the body (HTTP/1.0)."""
        if reset:
            self._wire.reset()
        else:
            self._wire.abort()

    def done(self, incoming: Incoming, close: bool) -> None:
        """The answer to `incoming` is complete."""
        if incoming is not self._current:
            return
        self._current = self._work = None
        if not incoming.body.complete:
            # Closing with unread bytes would reset the connection, and the client might never see the answer.
            incoming.body.discard()
            self._lingers = True
            self._wire.write_eof()
            self._deadline.set(LINGER_SECONDS)
        elif close or self.draining:
            self._wire.close()
        elif self._last_words is not None and not self._ahead:
            self._refuse(self._last_words)
        elif self._ahead:
            following = self._ahead.pop(0)
            if not self._ahead:
                self._forget_ahead()  # the rest of its body may still have to come
            self._begin(following)
            # Not at once: answers that need no waiting would pile up on the stack.
            self._loop.call_soon(self._handle_new)
        else:
            self._forget_ahead()
            self._is_kept = True
            self._deadline.set(KEEP_ALIVE_SECONDS)

    def hold(self, who: object, on: bool) -> None:
        """Read nothing more from the client until everybody who held it has let go."""
        if on:
            self._holds.add(who)
            self._wire.read(on=False)
            return
        self._holds.discard(who)
        if not self._holds:
            self._wire.read(on=True)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop derives its own from nothing
        self._wire = Wire(transport)
        self.flow = FlowControl()
        self._connections.add(self)
        self._deadline = Deadline(transport.close)
        self._deadline.set(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._last_words is not None:
            return
        self._head_bytes += len(data)
        if self._current is not None and self._current.body.complete:
            self._count_ahead(len(data))
        readable = self._parse(data)
        if self._is_new:
            self._handle_new()
        if readable and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(error(431, "head_too_large", f"the request head is larger than {MAX_HEAD_BYTES} bytes"))

    def _parse(self, data: bytes) -> bool:
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError as problem:
                # What our own callbacks found wrong stands behind the parser's complaint of them.
                why = problem.__context__ or problem
                self._refuse(error(400, "bad_request", f"the request is not HTTP/1.1: {why}"))
                return False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        for left in filter(None, (self._current, *self._ahead)):
            left.body.discard()
        del self._parser  # it and the connection hold each other
        self._leave()
        self.flow.lost()
        self._ahead.clear()
        self._is_new = False
        work, self._current, self._work = self._work, None, None
        if work is not None:
            work.cancel()

    def pause_writing(self) -> None:
        self.flow.pause()

    def resume_writing(self) -> None:
        self.flow.resume()
        if self._is_new:
            self._loop.call_soon(self._handle_new)

    # httptools

    def on_message_begin(self) -> None:
        if self._is_kept:
            self._is_kept = False
            self._deadline.set(HEAD_SECONDS)
        self._target = b""
        self._headers = []
        self._reading_head = True

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head:  # a trailer must not become a header (RFC 9110 section 6.5.1)
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._head_bytes = 0
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ValueError(version)
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            self._upgrading = True  # the parser takes what follows for another protocol, even a body
            return
        head = RequestHead(
            self._parser.get_method().decode("ascii"),
            _origin_form(self._target),
            self._headers,
            version == "1.0",
            self._parser.should_keep_alive(),
        )
        self._body = RequestBody(self._wire, head.expects_continue, self.hold)
        incoming = Incoming(self, head, self._body)
        if self._current is None:
            self._begin(incoming)
        else:
            self._ahead.append(incoming)

    def on_body(self, data: bytes) -> None:
        self._head_bytes = 0
        self._body.feed(data)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._reading_head = True
        self._head_bytes = 0
        self._body.feed_end()
        if self._current is None:
            self._wire.close()  # the answer came early, and now the client has sent the rest

    def _without_upgrade(self) -> bytes:
        """The head that was just read, to be read again without its upgrade, as RFC 9110 section 7.8 allows."""
        upgrading, self._upgrading = self._upgrading, False
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        self._parser = httptools.HttpRequestParser(self)
        if not upgrading:
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self._target, version)]
        lines.extend(name + b": " + value for name, value in self._headers if name.lower() != b"upgrade")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _begin(self, incoming: Incoming) -> None:
        self._deadline.clear()
        self._current = incoming
        self._is_new = True

    def _handle_new(self) -> None:
        # A client that does not take the answers before it gets no further ones.
        if self._is_new and not self.flow.paused and (incoming := self._current) is not None:
            self._is_new = False
            work = self._handler(incoming)
            if self._current is incoming:  # else it is over
                self._work = work

    def _leave(self) -> None:
        self._connections.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)

    def _count_ahead(self, size: int) -> None:
        self._ahead_bytes += size
        if self._ahead_bytes > PIPELINE_HIGH_WATER:
            self.hold(self, True)

    def _forget_ahead(self) -> None:
        self._ahead_bytes = 0
        self.hold(self, False)

    def _refuse(self, reply: Reply) -> None:
        """Answer a request that can't be read; nothing after it can be read either."""
        if self._lingers:
            self._deaf = True  # it has its answer
            return
        current = self._current
        if current is not None and current.body.complete:
            self._last_words = reply
            if self._ahead and not self._ahead[-1].body.complete:
                self._ahead.pop()
            return
        if self._wire.is_closing or (current is not None and current.started):
            self._wire.abort()
            return
        self._is_new = False
        if current is not None and self._work is not None:
            self._work.cancel()  # it has begun with a body that turned out to be none
        lines = header_lines([*reply.headers, (b"Content-Length", b"%d" % len(reply.body)), (b"Connection", b"close")])
        self._wire.write(response_head(reply.status, reply.phrase, lines) + reply.body)
        self._wire.close()


def _origin_form(target: bytes) -> bytes:
    """The path and query of a request target (RFC 9112 section 3.2.2 lets a client send the absolute form)."""
    if target.startswith(b"/") or target == b"*":
        return target
    parts = urlsplit(target)
    path = parts.path or b"/"
    return path + b"?" + parts.query if parts.query else path
