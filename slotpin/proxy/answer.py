"""The way back: llama-server's answer goes to the client as it comes, watched for its message end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slotpin.pinning.message_end import MessageEndScanner
from slotpin.proxy.headers import Headers, end_to_end, framing
from slotpin.proxy.listener import Incoming
from slotpin.proxy.upstream import UpstreamError


class Answer:
    """The sink of one exchange. `scanner` watches an event stream; any other body ends the message with its own end."""

    def __init__(
        self,
        incoming: Incoming,
        own_headers: Headers,
        scanner: MessageEndScanner | None,
        on_message_end: Callable[[], None] | None = None,
    ) -> None:
        self.own_headers = own_headers
        self.status = 0
        self.message_ended = False
        self._incoming = incoming
        self._scanner = scanner
        self._on_message_end = on_message_end
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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
        length, _ = framing(headers)
        has_body = self._incoming.head.method != "HEAD" and status not in (204, 304)
        if not _is_event_stream(headers):
            self._scanner = None
        self._incoming.start(status, phrase, [*end_to_end(headers), *self.own_headers], length, has_body)

    def on_data(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._scanner is not None and not self.message_ended and self._scanner.feed(data):
            self._end_message()

    def on_complete(self) -> None:
        if self._scanner is None and self.status < 400:
            self._end_message()
        self._incoming.finish()
        if not self._done.done():
            self._done.set_result(None)

    def on_broken(self, error: UpstreamError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _end_message(self) -> None:
        self.message_ended = True
        if self._on_message_end is not None:
            self._on_message_end()


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
