"""slotpin's own routes, all of them under `/slotpin`: they show no text of a prompt and no secret."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from urllib.parse import parse_qs, unquote_to_bytes

import msgspec

from slotpin.observe import page
from slotpin.observe.board import board
from slotpin.observe.records import Record, find
from slotpin.observe.status import status
from slotpin.observe.words import explained
from slotpin.pinning.conversations import session_ids
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import BUG, Reply, error
from slotpin.proxy.state import State
from slotpin.proxy.steps import Steps

PREFIX = b"/slotpin"
# How often a page hears of what has changed.
EVENT_SECONDS = 1.0
MAX_VIEWERS = 32
# As many as a list has if nobody asks for another number.
LISTED = 100


def is_own(path: bytes) -> bool:
    return path == PREFIX or path.startswith(PREFIX + b"/")


class OwnRoutes:
    """`close` ends the event streams, which would go on for ever."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._closing = asyncio.Event()
        self._viewers = 0
        self._pages: dict[bytes, Callable[[RequestHead], Reply]] = {
            b"": lambda _: page.PAGE,
            b"/": lambda _: page.PAGE,
            b"/health": lambda _: HEALTHY,
            b"/status": lambda _: _json(status(state)),
            b"/metrics": self._metrics,
            b"/requests": self._requests,
        }

    @property
    def viewers(self) -> int:
        """Event streams that are open."""
        return self._viewers

    def close(self) -> None:
        self._closing.set()

    def begin(self, incoming: Incoming, path: bytes) -> Steps:
        steps = Steps(self._state.tasks)
        steps.run(self._handle(incoming, path, steps))
        return steps

    async def _handle(self, incoming: Incoming, path: bytes, steps: Steps) -> None:
        incoming.body.discard()  # none is looked at, so none needs memory
        try:
            if path == PREFIX + b"/metrics":
                # Few have a Prometheus, so this is loaded late: it takes a while, and answers are to flow on meanwhile.
                await steps.in_a_task()
                await asyncio.to_thread(importlib.import_module, "slotpin.observe.metrics")
            if path == PREFIX + b"/events" and incoming.head.method == "GET":
                await steps.in_a_task()
                await self._events(incoming)
            else:
                incoming.reply(self._reply(incoming.head, path))
        except Exception:
            self._state.log_bug(incoming.head.target)
            incoming.fail(BUG)

    def _reply(self, head: RequestHead, path: bytes) -> Reply:
        name = path.removeprefix(PREFIX)
        if head.method == "POST" and name == b"/forget":
            ids = session_ids(head.get, None, self._state.running.session_sources)
            return _json({"forgotten": self._state.forget(ids)})
        if head.method in ("GET", "HEAD"):
            if name in self._pages:
                return self._pages[name](head)
            if name.startswith(b"/requests/"):
                return self._request(unquote_to_bytes(name.removeprefix(b"/requests/")).decode("utf-8", "replace"))
        what = f"{head.method} {path.decode('latin-1')}"
        return error(404, "not_found", f"there is no {what}; see /slotpin/, /slotpin/status and /slotpin/health")

    def _metrics(self, head: RequestHead) -> Reply:
        from slotpin.observe.metrics import exposition

        body, content_type = exposition(self._state, (head.get(b"accept") or b"").decode("latin-1"))
        return Reply(200, body, ((b"Content-Type", content_type.encode()),))

    def _requests(self, head: RequestHead) -> Reply:
        query = parse_qs(head.target.partition(b"?")[2].decode("latin-1"))
        limit = query.get("limit", [str(LISTED)])[-1]
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 10):
            return error(400, "invalid_limit", "limit: use a whole number from 0")
        observer = self._state.observer
        return _json({"underWay": observer.under_way, "ended": observer.records.latest(int(limit))})

    def _request(self, beginning: str) -> Reply:
        """By its id or the beginning of one; `latest` is the last one that ended, or else is under way."""
        observer = self._state.observer
        if beginning == "latest":
            found = observer.records.latest(1) or observer.under_way[-1:]
        else:
            found = find(iter(observer), beginning)
        if not found:
            return error(404, "unknown_request", self._unknown(beginning))
        if len(found) > 1 and found[0].id != beginning:
            ids = ", ".join(record.id for record in found[:5])
            return error(409, "ambiguous_request", f"several requests begin with {beginning}: {ids}")
        return _json(_Explained(found[0], explained(found[0])))

    def _unknown(self, beginning: str) -> str:
        records = self._state.observer.records
        if not records.count:
            return "no request that generates has come through since slotpin was started"
        kept = len(list(records))
        which = "no request is known" if beginning == "latest" else f"no request {beginning} is known"
        return f"{which}; kept are the last {kept} that generate, of {records.count} since slotpin was started"

    async def _events(self, incoming: Incoming) -> None:
        """What has ended since, and the board, for as long as somebody reads."""
        if self._viewers >= MAX_VIEWERS:
            incoming.reply(error(503, "too_many_viewers", f"{MAX_VIEWERS} pages are open already"))
            return
        records = self._state.observer.records
        last = (incoming.head.get(b"last-event-id") or b"").decode("latin-1")
        number = int(last) if last.isascii() and last.isdecimal() and len(last) < 16 else -1
        incoming.start(200, b"OK", b"Content-Type: text/event-stream\r\nCache-Control: no-store\r\n", None)
        self._viewers += 1
        try:
            while not self._closing.is_set():
                for place, record in records.after(number):
                    if self._closing.is_set():
                        break
                    await self._send(incoming, _event(b"exchange", record, place))
                    number = place
                await self._send(incoming, _event(b"board", board(self._state)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), EVENT_SECONDS)
            if incoming.flow.paused:
                incoming.abort()  # a reader that has stopped must not hold up the end
            else:
                incoming.finish()
        finally:
            self._viewers -= 1

    async def _send(self, incoming: Incoming, data: bytes) -> None:
        """At once, and no faster than it is read."""
        incoming.write(data)
        incoming.flush()
        if not incoming.flow.paused:
            return
        waiting = [asyncio.ensure_future(each) for each in (incoming.flow.drain(), self._closing.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


class _Explained(msgspec.Struct):
    request: Record
    explained: list[tuple[str, str]]


_JSON = (b"Content-Type", b"application/json")
# Balancers compare it byte by byte.
HEALTHY = Reply(200, b'{"status": "ok"}', (_JSON,))


def _event(name: bytes, value: object, number: int | None = None) -> bytes:
    """WHATWG HTML section 9.2.5; JSON has no line ends in it."""
    identified = b"id: %d\n" % number if number is not None else b""
    return b"%bevent: %b\ndata: %b\n\n" % (identified, name, msgspec.json.encode(value))


def _json(value: object) -> Reply:
    return Reply(200, msgspec.json.encode(value), (_JSON,))
