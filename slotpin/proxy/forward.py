"""The way there: one request goes to its server, its answer to the client, and a failure becomes an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from slotpin.pinning.splice import Pieces
from slotpin.proxy.answer import Answer
from slotpin.proxy.headers import RequestHead, upstream_head, via, with_forwarded
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import error
from slotpin.proxy.state import Running, State
from slotpin.proxy.upstream import Address, NotRunningError, StaleConnectionError, UpstreamConnection, UpstreamError

Forwarded = Literal["completed", "upstream_broke", "upstream_refused", "unreachable"]


class Forward:
    """For one exchange. `reached`: the server has been sent something, and may be working on it."""

    def __init__(self, state: State, running: Running, incoming: Incoming) -> None:
        self._state = state
        self._running = running
        self._incoming = incoming
        self.reached = False

    async def send(
        self, address: Address, target: bytes, body: Pieces | None, answer: Answer, authorization: bytes | None
    ) -> Forwarded:
        """Send the request and relay its answer. `body` None: pass the client's on while it arrives."""
        incoming = self._incoming
        if body is None and incoming.body.complete:
            body = (await incoming.body.read(),)
        length = incoming.head.content_length if body is None else sum(map(len, body))
        if target != b"*":
            target = address.root.encode() + target
        head = upstream_head(self._head(answer), target, address.host_header, length, authorization)
        pool = self._state.pool(address)
        connection: UpstreamConnection | None = None
        try:
            # What is passed on while it arrives can't be sent again, so it gets a connection that can't be stale.
            connection = await pool.acquire(fresh=body is None)
            try:
                await self._transfer(connection, head, body, answer, sized=length is not None)
            except StaleConnectionError:
                if body is None:
                    raise
                connection = None
                connection = await pool.acquire(fresh=True)
                await self._transfer(connection, head, body, answer, sized=True)
        except UpstreamError as problem:
            # It may come back with other slots.
            self._state.probe.forget(self._running.probe_target)
            if answer.status:
                incoming.abort()
                return "completed" if answer.message_ended else "upstream_broke"
            if isinstance(problem, NotRunningError):
                text = f"llama-server is not running at {address.url}"
            else:
                what = "cannot reach" if connection is None else "no answer from"
                text = f"{what} llama-server at {address.url}: {problem}"
            answer.fail(error(502, "upstream_unreachable", text))
            return "unreachable"
        finally:
            if connection is not None:
                # The next request of this connection, sent ahead, may have set its own already.
                if incoming.flow.on_change == connection.throttle:
                    incoming.flow.on_change = None
                pool.release(connection)
        if answer.status >= 400:
            return "upstream_refused"
        return "completed" if answer.message_ended else "upstream_broke"

    def _head(self, answer: Answer) -> RequestHead:
        """The client's, with what slotpin adds to it; the answer gets its part as well."""
        head, listen = self._incoming.head, self._running.settings.listen
        if listen.forwarded_headers:
            head = with_forwarded(head, self._incoming.peer)
        if listen.via:
            head = replace(head, headers=[*head.headers, via(head.http10)])
            answer.own_headers = [*answer.own_headers, via(http10=False)]
        return head

    async def _transfer(
        self, connection: UpstreamConnection, head: bytes, body: Pieces | None, answer: Answer, *, sized: bool
    ) -> None:
        """One try: until the answer is complete. Raises UpstreamError."""
        self._incoming.flow.on_change = connection.throttle
        connection.start(self._incoming.head.method, head, body or (), answer)
        self.reached = True
        idle_seconds = self._running.settings.timeouts.idle_seconds
        if body is not None:
            connection.limit_silence(idle_seconds)
            await answer.wait()
            return
        upload = asyncio.create_task(self._upload(connection, sized, idle_seconds))
        try:
            await answer.wait()
        finally:
            if not upload.done():
                upload.cancel()
                connection.abort()  # the answer came early: half a request is left on this connection

    async def _upload(self, connection: UpstreamConnection, sized: bool, idle_seconds: float) -> None:
        async for piece in self._incoming.body.pieces():
            connection.write(piece if sized else b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.flow.drain()
        if not sized:
            connection.write(b"0\r\n\r\n")
        connection.limit_silence(idle_seconds)
