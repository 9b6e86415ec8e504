"""The proxy as a whole: its socket, its own routes, its start and its stop."""

from __future__ import annotations

import asyncio
import json
import time

from slotpin.config import Settings
from slotpin.observe.log import Log
from slotpin.observe.status import status
from slotpin.pinning.conversations import session_ids
from slotpin.pinning.endpoints import is_loopback
from slotpin.proxy.bind import Bound, bind
from slotpin.proxy.exchange import Exchange
from slotpin.proxy.guard import Guard
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.listener import ClientConnection, Incoming
from slotpin.proxy.replies import Reply, error
from slotpin.proxy.state import State

OWN_PREFIX = b"/slotpin"
HEALTH = b"/slotpin/health"  # for whoever watches over slotpin, so without a key


class Proxy:
    """`start`, then `apply` new settings as often as you like, then `stop`."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.state = State(settings, log, time.monotonic)
        self._connections: set[ClientConnection] = set()
        self._bound: Bound | None = None
        # Where it listens takes effect at the start; the rest of `listen` with each new settings.
        self._at_start = settings.listen
        self._guarding = self.state.running
        self._guard = self._new_guard()

    async def start(self) -> None:
        """Listen; raises UserError when that can't be done."""
        self._bound = await bind(
            self._at_start.host, self._at_start.port, lambda: ClientConnection(self._handle, self._connections)
        )

    @property
    def url(self) -> str:
        """`http://host:port`, or `unix:/path`."""
        assert self._bound is not None
        return self._bound.url

    async def stop(self) -> None:
        """Take no new request, give those under way `timeouts.drainSeconds`, then break off what is left."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
        for connection in list(self._connections):
            connection.drain()
        if under_way := [connection.closed for connection in self._connections]:
            seconds = self.state.running.settings.timeouts.drain_seconds
            answers = sum(connection.is_answering for connection in self._connections)
            if answers and seconds:
                self.state.log.info("waiting_for_answers", answers=answers, seconds=seconds)
            await asyncio.wait(under_way, timeout=seconds)
        if left := list(self._connections):
            await asyncio.gather(*(connection.cut_off() for connection in left))
        await self.state.close()

    def _new_guard(self) -> Guard:
        return Guard(self.state.running.settings.listen, on_loopback=is_loopback(self._at_start.host))

    def _refusal(self, head: RequestHead) -> Reply | None:
        if self._guarding is not self.state.running:
            self._guarding, self._guard = self.state.running, self._new_guard()
        return self._guard.refusal(head)

    def _own_route(self, head: RequestHead, path: bytes) -> Reply:
        """Everything under `/slotpin/`; no other path is slotpin's."""
        method = head.method
        if method == "POST" and path == b"/slotpin/forget":
            ids = session_ids(head.get, None, self.state.running.session_headers)
            return _json({"forgotten": self.state.forget(ids)})
        if method in ("GET", "HEAD"):
            if path == HEALTH:
                return _json({"status": "ok"})
            if path == b"/slotpin/status":
                return _json(status(self.state))
        what = f"{method} {path.decode('latin-1')}"
        return error(404, "not_found", f"there is no {what}; see /slotpin/status and /slotpin/health")

    async def _handle(self, incoming: Incoming) -> None:
        path = incoming.head.target.partition(b"?")[0]
        try:
            if path != HEALTH and (refusal := self._refusal(incoming.head)):
                incoming.reply(refusal)
            elif path == OWN_PREFIX or path.startswith(OWN_PREFIX + b"/"):
                await incoming.body.read()
                incoming.reply(self._own_route(incoming.head, path))
            else:
                await Exchange(self.state, incoming).run()
        except Exception:
            self.state.log.exception("bug", path=path.decode("latin-1"))
            if incoming.started:
                incoming.abort()
            else:
                incoming.reply(error(500, "bug", "an error of slotpin's own; its log has the details"))


def _json(value: object) -> Reply:
    return Reply(200, json.dumps(value).encode(), ((b"Content-Type", b"application/json"),))
