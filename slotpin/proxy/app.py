"""The proxy as a whole: its socket, its own routes, its start and its stop."""

from __future__ import annotations

import asyncio
import errno
import time

from aiohttp import web

from slotpin.config import Settings
from slotpin.errors import UserError
from slotpin.observe.log import Log
from slotpin.observe.status import status
from slotpin.proxy.exchange import Exchange
from slotpin.proxy.listener import ClientConnection, Incoming
from slotpin.proxy.replies import error
from slotpin.proxy.state import State

OWN_PREFIX = b"/slotpin"


class Proxy:
    """`start`, then `apply` new settings as often as you like, then `stop`."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.state = State(settings, log, time.monotonic)
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._own_routes: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; raises UserError when that can't be done."""
        listen = self.state.running.settings.listen
        self._own_routes = web.AppRunner(own_routes(self.state), access_log=None, handle_signals=False)
        await self._own_routes.setup()
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
        if self._own_routes is not None:
            await self._own_routes.cleanup()
        await self.state.close()

    async def _handle(self, incoming: Incoming) -> None:
        path = incoming.head.target.partition(b"?")[0]
        try:
            if path == OWN_PREFIX or path.startswith(OWN_PREFIX + b"/"):
                assert self._own_routes is not None
                assert self._own_routes.server is not None
                await incoming.hand_over(self._own_routes.server())
            else:
                await Exchange(self.state, incoming).run()
        except Exception:
            self.state.log.exception("bug", path=path.decode("latin-1"))
            if incoming.started:
                incoming.abort()
            else:
                incoming.reply(error(500, "bug", "an error of slotpin's own; its log has the details"))


def own_routes(state: State) -> web.Application:
    """Everything under `/slotpin/`; no other path is slotpin's."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def show_status(_: web.Request) -> web.Response:
        return web.json_response(status(state))

    async def unknown(request: web.Request) -> web.Response:
        reply = error(404, "not_found", f"there is no {request.path}; see /slotpin/status and /slotpin/health")
        return web.Response(status=reply.status, body=reply.body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/slotpin/health", health)
    app.router.add_get("/slotpin/status", show_status)
    app.router.add_route("*", "/{path:.*}", unknown)
    return app


def _cannot_listen(host: str, port: int, problem: Exception) -> str:
    code = problem.errno if isinstance(problem, OSError) else None
    if code == errno.EADDRINUSE:
        return f"cannot listen on {host}:{port}: the port is in use; choose another with --port or listen.port"
    if code == errno.EACCES:
        return f"cannot listen on {host}:{port}: that needs more rights; choose a port above 1023"
    if code == errno.EADDRNOTAVAIL:
        return f"cannot listen on {host}:{port}: this machine has no such address; see listen.host"
    return f"cannot listen on {host}:{port}: {problem}; see listen.host and listen.port"
