"""The way back: llama-server's answer goes to the client as it comes, watched for its message end and its counters."""

from __future__ import annotations

from collections.abc import Callable

from slotpin.pinning.counters import Counters, CounterScanner
from slotpin.pinning.message_end import MessageEndScanner, Shape
from slotpin.proxy.headers import ResponseHead
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import Reply, late_error
from slotpin.proxy.upstream import UpstreamError


class Watch:
    """What is looked for in the answer to a generating request, and who hears of it.

    `on_begin`: the server works on it. `completions`: how many native answers share one stream. `end` is for a stream.
    """

    __slots__ = ("begun", "completions", "counters", "end", "on_begin", "on_message_end", "shape")

    def __init__(
        self,
        shape: Shape,
        completions: int,
        on_begin: Callable[[], None],
        on_message_end: Callable[[Counters | None], None],
    ) -> None:
        self.shape = shape
        self.completions = completions
        self.end: MessageEndScanner | None = None
        self.counters = CounterScanner(shape)
        self.on_begin = on_begin
        self.on_message_end = on_message_end
        self.begun = False

    def expect_stream(self) -> None:
        self.end = MessageEndScanner(self.shape, self.completions)

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

    `own_lines` are header lines of slotpin's, `on_over` who hears of the end or of why there is none; both are set
    before anything is sent. Where the client has the head of an event stream already, an error goes out as an event.
    """

    __slots__ = ("_incoming", "_late", "_watch", "complete", "message_ended", "on_over", "own_lines", "status")

    def __init__(self, incoming: Incoming, watch: Watch | None) -> None:
        self.own_lines = b""
        self.on_over: Callable[[UpstreamError | None], None]
        self.status = 0
        self.message_ended = False
        self.complete = False
        self._incoming = incoming
        self._watch = watch
        self._late: bytearray | None = None  # the body of what has to become an event

    def fail(self, reply: Reply) -> None:
        """Answer with an error of slotpin's own, before anything of the server's came."""
        if self._incoming.started:
            assert self._watch is not None
            self._incoming.write(late_error(self._watch.shape, reply.status, reply.body))
            self._incoming.finish()
        else:
            self._incoming.reply(reply, self.own_lines)

    # upstream.Sink

    def on_head(self, status: int, phrase: bytes, head: ResponseHead) -> None:
        self.status = status
        if self._watch is not None and head.event_stream:
            self._watch.expect_stream()
        if self._incoming.started:
            if status != 200 or not head.event_stream:
                self._late = bytearray()
            return
        has_body = self._incoming.head.method != "HEAD" and status not in (204, 304)
        self._incoming.start(status, phrase, head.lines + self.own_lines, head.length, has_body)

    def on_read(self, data: bytes) -> None:
        if data:
            self._relay(data)
        self._incoming.flush()

    def on_complete(self, data: bytes) -> None:
        if data:
            self._relay(data)
        self.complete = True
        watch = self._watch
        if self._late is not None:
            assert watch is not None
            self._incoming.write(late_error(watch.shape, self.status, bytes(self._late)))
        elif watch is not None and watch.end is None and self.status < 400:
            self._end_message(watch)
        self._incoming.finish()
        self.on_over(None)

    def on_broken(self, data: bytes, error: UpstreamError) -> None:
        self.on_read(data)
        self.on_over(error)

    def _relay(self, data: bytes) -> None:
        if self._late is not None:
            self._late += data
            return
        self._incoming.write(data)
        watch = self._watch
        if watch is not None and not self.message_ended and watch.feed(data):
            self._end_message(watch)

    def _end_message(self, watch: Watch) -> None:
        self.message_ended = True
        watch.on_message_end(watch.counters.result())
