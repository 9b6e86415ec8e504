"""The proxy as a whole: its socket, its own routes, its start and its stop."""

from __future__ import annotations

import asyncio
import socket
import time

from slotpin.config import Settings
from slotpin.observe.log import Log
from slotpin.pinning.endpoints import is_loopback
from slotpin.proxy.bind import Bound, address_of, bind
from slotpin.proxy.exchange import Exchange
from slotpin.proxy.guard import Guard
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.listener import ClientConnection, Incoming, Work
from slotpin.proxy.own_routes import OwnRoutes, is_own
from slotpin.proxy.replies import Reply
from slotpin.proxy.state import State

# For whoever watches over slotpin and the server behind it, so without a key: llama-server wants none there either.
_HEALTH = frozenset({b"/slotpin/health", b"/health", b"/v1/health"})


class Proxy:
    """`start`, then `apply` new settings as often as you like, then `stop`.

    `inherited` is a socket that listens already; where that is counts, not the settings.
    """

    def __init__(self, settings: Settings, log: Log, inherited: socket.socket | None = None) -> None:
        self.state = State(settings, log, time.monotonic)
        self._own = OwnRoutes(self.state)
        self._connections: set[ClientConnection] = set()
        self._bound: Bound | None = None
        # Where it listens takes effect at the start; the rest of `listen` with each new settings.
        self._at_start = settings.listen
        if inherited is not None:
            host, port = address_of(inherited)
            self._at_start = settings.listen.model_copy(update={"host": host, "port": port})
        self._inherited = inherited
        self._guarding = self.state.running
        self._guard = self._new_guard()

    async def start(self) -> None:
        """Listen; raises UserError when that can't be done."""
        self._bound = await bind(
            self._at_start.host,
            self._at_start.port,
            lambda: ClientConnection(self._handle, self._connections),
            self._inherited,
        )
        await self.state.meet_others()

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
        self._own.close()
        for connection in list(self._connections):
            connection.drain()
        if under_way := [connection.closed for connection in self._connections]:
            seconds = self.state.running.settings.timeouts.drain_seconds
            answers = sum(connection.is_answering for connection in self._connections) - self._own.viewers
            if answers > 0 and seconds:
                self.state.log.info("waiting_for_answers", answers=answers, seconds=seconds)
            await asyncio.wait(under_way, timeout=seconds)
        if left := list(self._connections):
            await asyncio.gather(*(connection.cut_off() for connection in left))
        if tasks := list(self.state.tasks):
            await asyncio.wait(tasks)  # each has been cancelled
        await self.state.close()

    def _new_guard(self) -> Guard:
        return Guard(self.state.running.settings.listen, on_loopback=is_loopback(self._at_start.host))

    def _refusal(self, head: RequestHead) -> Reply | None:
        if self._guarding is not self.state.running:
            self._guarding, self._guard = self.state.running, self._new_guard()
        return self._guard.refusal(head)

    def _handle(self, incoming: Incoming) -> Work | None:
        path = incoming.head.target.partition(b"?")[0]
        open_to_all = path in _HEALTH and incoming.head.method in ("GET", "HEAD")
        if not open_to_all and (refusal := self._refusal(incoming.head)):
            incoming.reply(refusal)
            return None
        if is_own(path):
            return self._own.begin(incoming, path)
        exchange = Exchange(self.state, incoming)
        exchange.begin()
        return exchange
