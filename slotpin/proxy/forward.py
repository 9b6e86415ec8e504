"""The way there: one request goes to its server, its answer to the client, and a failure becomes an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from slotpin.pinning.splice import Pieces
from slotpin.proxy.answer import Answer
from slotpin.proxy.headers import RequestHead, header_lines, upstream_head, via, with_forwarded
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import error
from slotpin.proxy.state import Running, State
from slotpin.proxy.steps import Steps
from slotpin.proxy.upstream import (
    Address,
    NotRunningError,
    StaleConnectionError,
    UpstreamConnection,
    UpstreamError,
    UpstreamPool,
)

Forwarded = Literal["completed", "upstream_broke", "upstream_refused", "unreachable"]


class Forward:
    """For one exchange: `send`, and then either `on_over` hears how it went, or `leave` breaks it off.

    `reached`: the server has been sent something, and may be working on it.
    """

    __slots__ = (
        "_answer",
        "_body",
        "_connection",
        "_head",
        "_incoming",
        "_on_over",
        "_pool",
        "_running",
        "_state",
        "_upload",
        "reached",
    )

    def __init__(
        self,
        state: State,
        running: Running,
        incoming: Incoming,
        answer: Answer,
        on_over: Callable[[Forwarded], None],
    ) -> None:
        self._state = state
        self._running = running
        self._incoming = incoming
        self._answer = answer
        self._on_over = on_over
        self._pool: UpstreamPool
        self._head = b""
        self._body: Pieces | None = None
        self._connection: UpstreamConnection | None = None
        self._upload: asyncio.Task[None] | None = None
        self.reached = False

    async def send(
        self, address: Address, target: bytes, body: Pieces | None, authorization: bytes | None, steps: Steps
    ) -> None:
        """Until the request is under way. `body` None: pass the client's on while it arrives."""
        incoming = self._incoming
        if body is None and incoming.body.complete:
            body = (incoming.body.take(),)
        length = incoming.head.content_length if body is None else sum(map(len, body))
        if target != b"*" and address.root:
            target = address.root.encode() + target
        self._pool = self._state.pool(address)
        self._head = upstream_head(self._request_head(), target, self._pool.host_header, length, authorization)
        self._body = body
        # What is passed on while it arrives can't be sent again, so it gets a connection that can't be stale.
        connection = self._pool.kept() if body is not None else None
        if connection is None:
            await steps.in_a_task()
            try:
                connection = await self._pool.connect()
            except UpstreamError as problem:
                self._over(problem)
                return
        self._start(connection)
        if body is None:
            self._upload = asyncio.create_task(self._pass_body(connection, sized=length is not None))

    def forget_body(self) -> None:
        """The answer has begun, so it can't be sent again."""
        self._body = None

    def leave(self) -> None:
        """Nobody waits for the answer any more."""
        if (connection := self._release()) is not None:
            connection.abort()

    def _start(self, connection: UpstreamConnection) -> None:
        """One try: until `over` is called."""
        self._connection = connection
        self._answer.on_over = self._over
        self._incoming.flow.on_change = connection.throttle
        self.reached = True
        connection.start(self._incoming.head.method, self._head, self._body or (), self._answer)
        if self._body is not None and (seconds := self._running.settings.timeouts.idle_seconds):
            connection.limit_silence(seconds)

    def _over(self, problem: UpstreamError | None) -> None:
        """The answer is complete, or the try has failed."""
        connection = self._release()
        if connection is not None:
            self._pool.release(connection)
        answer = self._answer
        if problem is None:
            refused = answer.status >= 400
            self._on_over("upstream_refused" if refused else "completed" if answer.message_ended else "upstream_broke")
        elif isinstance(problem, StaleConnectionError) and self._body is not None:
            self._upload = asyncio.create_task(self._try_again())
        else:
            self._failed(problem, connected=connection is not None)

    def _release(self) -> UpstreamConnection | None:
        self._answer.on_over = _nobody_waits  # they hold each other
        connection, self._connection = self._connection, None
        upload, self._upload = self._upload, None
        if upload is not None and not upload.done():
            upload.cancel()
            if connection is not None:
                connection.abort()  # the answer came early: half a request is left on this connection
        # The next request of this connection, sent ahead, may have set its own already.
        if connection is not None and self._incoming.flow.on_change == connection.throttle:
            self._incoming.flow.on_change = None
        return connection

    async def _try_again(self) -> None:
        try:
            connection = await self._pool.connect()
        except UpstreamError as problem:
            self._upload = None
            self._over(problem)
        else:
            self._upload = None
            self._start(connection)

    def _failed(self, problem: UpstreamError, *, connected: bool) -> None:
        address, answer = self._pool.address, self._answer
        # It may come back with other slots.
        self._state.probe.forget(self._running.probe_target)
        if answer.status:
            self._incoming.abort()
            self._on_over("completed" if answer.message_ended else "upstream_broke")
            return
        if isinstance(problem, NotRunningError):
            text = f"llama-server is not running at {address.url}"
        else:
            what = "no answer from" if connected else "cannot reach"
            text = f"{what} llama-server at {address.url}: {problem}"
        answer.fail(error(502, "upstream_unreachable", text))
        self._on_over("unreachable")

    def _request_head(self) -> RequestHead:
        """The client's, with what slotpin adds to it; the answer gets its part as well."""
        head, listen = self._incoming.head, self._running.settings.listen
        if listen.forwarded_headers:
            head = with_forwarded(head, self._incoming.peer)
        if listen.via:
            head = replace(head, headers=[*head.headers, via(head.http10)])
            self._answer.own_lines += header_lines([via(http10=False)])
        return head

    async def _pass_body(self, connection: UpstreamConnection, *, sized: bool) -> None:
        while (piece := await self._incoming.body.next()) is not None:
            connection.write(piece if sized else b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.flow.drain()
        if not sized:
            connection.write(b"0\r\n\r\n")
        if seconds := self._running.settings.timeouts.idle_seconds:
            connection.limit_silence(seconds)


def _nobody_waits(_problem: UpstreamError | None) -> None:
    pass
