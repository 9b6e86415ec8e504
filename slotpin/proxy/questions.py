"""aiohttp's client for what slotpin asks on its own account; seldom, so each question has its own connection.

llama-server closes idle connections after five seconds: one that is never kept can't be stale.
"""

from __future__ import annotations

import ssl
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from slotpin.pinning.endpoints import socket_path
from slotpin.proxy.upstream import tls_problem


class Questions:
    """Over TCP and TLS, and over unix sockets, each of which needs a client of its own in aiohttp."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def ask(
        self, method: str, root: str, path: str, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """`root`: a base URL without `/v1`. `options` are those of `aiohttp.ClientSession.request`."""
        socket = socket_path(root)
        session = self._sessions.get(socket or urlsplit(root).scheme)
        if session is None:
            session = self._sessions[socket or urlsplit(root).scheme] = _session(socket, root)
        url = f"{'http://localhost' if socket else root}{path}"
        return session.request(method, url, allow_redirects=False, **options)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()


def _session(socket: str, root: str) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if socket:
        connector = aiohttp.UnixConnector(socket, force_close=True)
    elif root.startswith("https:"):
        connector = aiohttp.TCPConnector(force_close=True, ssl=ssl.create_default_context())
    else:
        connector = aiohttp.TCPConnector(force_close=True)
    no_limit = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=no_limit)


NOBODY = "nothing listens there"


def why_no_answer(error: Exception) -> str:
    """Of what `ask` may raise, in a few words."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return tls_problem(error.certificate_error)
        case aiohttp.ClientConnectorSSLError():
            return tls_problem(error.os_error)
        case aiohttp.ClientConnectorDNSError():
            return "there is no host of that name"
        case aiohttp.ClientConnectorError():
            return NOBODY
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "it closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "it broke off its answer"
    return "its answer is not HTTP"
