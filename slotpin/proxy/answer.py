"""The way back: llama-server's answer goes to the client as it comes, watched for its message end and its counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slotpin.pinning.counters import Counters, CounterScanner
from slotpin.pinning.message_end import MessageEndScanner, Shape
from slotpin.proxy.headers import Headers, end_to_end, framing
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import Reply, late_error
from slotpin.proxy.upstream import UpstreamError


class Watch:
    """What is looked for in the answer to a generating request, and who hears of it.

    `on_begin`: the server works on it. `completions`: how many native answers share one stream.
    """

    def __init__(
        self,
        shape: Shape,
        completions: int,
        on_begin: Callable[[], None],
        on_message_end: Callable[[Counters | None], None],
    ) -> None:
        self.shape = shape
        self.end: MessageEndScanner | None = MessageEndScanner(shape, completions)
        self.counters = CounterScanner(shape)
        self.on_begin = on_begin
        self.on_message_end = on_message_end
        self.begun = False

    def feed(self, data: bytes) -> bool:
        """Take the next bytes of the body; True once the message end has been seen in them."""
        # The server's own sign of life, an SSE comment, also comes while a request waits for its slot.
        if not self.begun and not data.startswith(b":"):
            self.begun = True
            self.on_begin()
        self.counters.feed(data)
        return self.end is not None and self.end.feed(data)


class Answer:
    """The sink of one exchange. A body that is no readable event stream ends the message with its own end.

    Where the client has had the head of an event stream already, an error goes out as an event.
    """

    def __init__(self, incoming: Incoming, watch: Watch | None) -> None:
        self.own_headers: Headers = []  # to be set before anything is sent
        self.status = 0
        self.message_ended = False
        self.complete = False
        self._incoming = incoming
        self._watch = watch
        self._read: list[bytes] = []  # of the body, what came in the read that is being taken in
        self._late: bytearray | None = None  # the body of what has to become an event
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, reply: Reply) -> None:
        """Answer with an error of slotpin's own, before anything of the server's came."""
        if self._incoming.started:
            assert self._watch is not None
            self._incoming.write(late_error(self._watch.shape, reply.status, reply.body))
            self._incoming.finish()
        else:
            self._incoming.reply(reply.with_headers(self.own_headers))

    async def wait(self) -> None:
        """Until the answer is complete; raises UpstreamError when it breaks off."""
        try:
            await self._done
        except UpstreamError:
            self._done = asyncio.get_running_loop().create_future()  # a second try starts anew
            raise

    # upstream.Sink

    def on_head(self, status: int, phrase: bytes, headers: Headers) -> None:
        self.status = status
        readable_stream = _is_event_stream(headers)
        if self._watch is not None and not readable_stream:
            self._watch.end = None
        if self._incoming.started:
            if status != 200 or not readable_stream:
                self._late = bytearray()
            return
        length, _ = framing(headers)
        has_body = self._incoming.head.method != "HEAD" and status not in (204, 304)
        self._incoming.start(status, phrase, [*end_to_end(headers), *self.own_headers], length, has_body)

    def on_data(self, data: bytes) -> None:
        self._read.append(data)

    def on_read(self) -> None:
        self._relay()
        self._incoming.flush()

    def on_complete(self) -> None:
        self._relay()
        self.complete = True
        if self._late is not None:
            assert self._watch is not None
            self._incoming.write(late_error(self._watch.shape, self.status, bytes(self._late)))
        elif self._watch is not None and self._watch.end is None and self.status < 400:
            self._end_message()
        self._incoming.finish()
        if not self._done.done():
            self._done.set_result(None)

    def on_broken(self, error: UpstreamError) -> None:
        self.on_read()
        if not self._done.done():
            self._done.set_exception(error)

    def _relay(self) -> None:
        if not self._read:
            return
        data = self._read[0] if len(self._read) == 1 else b"".join(self._read)
        self._read.clear()
        if self._late is not None:
            self._late += data
            return
        self._incoming.write(data)
        if self._watch is not None and not self.message_ended and self._watch.feed(data):
            self._end_message()

    def _end_message(self) -> None:
        self.message_ended = True
        if self._watch is not None:
            self._watch.on_message_end(self._watch.counters.result())


def _is_event_stream(headers: Headers) -> bool:
    """Whether the message end can be seen in the bytes: an event stream that is not compressed."""
    event_stream = encoded = False
    for name, value in headers:
        match name.lower():
            case b"content-type":
                event_stream = value.lower().startswith(b"text/event-stream")
            case b"content-encoding":
                encoded = value.strip().lower() != b"identity"
    return event_stream and not encoded
