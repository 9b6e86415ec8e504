"""The proxy as a whole: its socket, its own routes, its start and its stop."""

from __future__ import annotations

import asyncio
import errno
import json
import time

from slotpin.config import Settings
from slotpin.errors import UserError
from slotpin.observe.log import Log
from slotpin.observe.status import status
from slotpin.pinning.conversations import session_ids
from slotpin.proxy.exchange import Exchange
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.listener import ClientConnection, Incoming
from slotpin.proxy.replies import Reply, error
from slotpin.proxy.state import State

OWN_PREFIX = b"/slotpin"


class Proxy:
    """`start`, then `apply` new settings as often as you like, then `stop`."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.state = State(settings, log, time.monotonic)
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; raises UserError when that can't be done."""
        listen = self.state.running.settings.listen
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self._handle, self._connections), listen.host, listen.port, backlog=1024
            )
        except (OSError, OverflowError) as problem:
            raise UserError(_cannot_listen(listen.host, listen.port, problem)) from None

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Take no new request, give those under way `timeouts.drainSeconds`, then break off what is left."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()
        if under_way := [connection.closed for connection in self._connections]:
            await asyncio.wait(under_way, timeout=self.state.running.settings.timeouts.drain_seconds)
        for connection in list(self._connections):
            connection.abort()
        await self.state.close()

    def _own_route(self, head: RequestHead, path: bytes) -> Reply:
        """Everything under `/slotpin/`; no other path is slotpin's."""
        method = head.method
        if method == "POST" and path == b"/slotpin/forget":
            ids = session_ids(head.get, None, self.state.running.session_headers)
            return _json({"forgotten": self.state.forget(ids)})
        if method in ("GET", "HEAD"):
            if path == b"/slotpin/health":
                return _json({"status": "ok"})
            if path == b"/slotpin/status":
                return _json(status(self.state))
        what = f"{method} {path.decode('latin-1')}"
        return error(404, "not_found", f"there is no {what}; see /slotpin/status and /slotpin/health")

    async def _handle(self, incoming: Incoming) -> None:
        path = incoming.head.target.partition(b"?")[0]
        try:
            if path == OWN_PREFIX or path.startswith(OWN_PREFIX + b"/"):
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


def _cannot_listen(host: str, port: int, problem: Exception) -> str:
    code = problem.errno if isinstance(problem, OSError) else None
    if code == errno.EADDRINUSE:
        return f"cannot listen on {host}:{port}: the port is in use; choose another with --port or listen.port"
    if code == errno.EACCES:
        return f"cannot listen on {host}:{port}: that needs more rights; choose a port above 1023"
    if code == errno.EADDRNOTAVAIL:
        return f"cannot listen on {host}:{port}: this machine has no such address; see listen.host"
    return f"cannot listen on {host}:{port}: {problem}; see listen.host and listen.port"
