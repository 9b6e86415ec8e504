"""The proxy that one writes in an afternoon: aiohttp on both sides, the body read, changed and written anew.

`bench.proxy` compares slotpin with it. It pins every generating request to slot 0.

    python -m bench.naive PORT UPSTREAM_PORT
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

UPSTREAM = web.AppKey("upstream", str)
SESSION = web.AppKey("session", aiohttp.ClientSession)
OURS = {"host", "connection", "content-length", "transfer-encoding"}


async def forward(request: web.Request) -> web.StreamResponse:
    data = await request.read()
    if request.method == "POST":
        data = json.dumps({**json.loads(data), "id_slot": 0}).encode()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in OURS}
    url = request.app[UPSTREAM] + request.path_qs
    async with request.app[SESSION].request(request.method, url, data=data, headers=headers) as answer:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OURS}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
    return response


async def with_session(app: web.Application) -> AsyncIterator[None]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app[SESSION] = session
        yield


def main() -> None:
    port, upstream_port = map(int, sys.argv[1:])
    app = web.Application(client_max_size=2**30)
    app[UPSTREAM] = f"http://127.0.0.1:{upstream_port}"
    app.cleanup_ctx.append(with_session)
    app.router.add_route("*", "/{path:.*}", forward)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
