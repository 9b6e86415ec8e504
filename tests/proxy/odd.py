"""Bodies and answers whose bytes would not survive being read and written anew, and what arrived of them."""

from __future__ import annotations

from tests.support.proxy import running_proxy, settings_for
from tests.support.stub_upstream import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Connection,
    Request,
    Stub,
    answer,
    chunk,
)

# A body whose bytes would not survive a parser: escapes, order, spaces, numbers, a doubled key.
ODD_JSON = (
    b' {"z":1e400,"a" : -0,"\\u0061":[1.0,1],"big":1234567890123456789012345678901234567890,\r\n'
    b'"t":"\\ud83d\\ude00 \xc3\xa9 \\/","t":null, "messages":[{"role":"user","content":"hi"}]}\n '
)
ODD_BYTES = bytes(range(256)) * 3
GENERATING = ["/chat/completions", "/completions", "/completion", "/infill", "/responses"]
INSERTED = {"main": b'"id_slot":0,"cache_prompt":true,', "compactor": b'"id_slot":1,"cache_prompt":true,'}
FRAMES = [
    b'data: {"x":"\xc3',
    b'\xa9"}\n\n',
    b": comment\n\n",
    b"event: x\r\ndata: y\r\n\r\n",
    # The message end of every shape, one of which will be meant.
    b'data: {"stop":true}\n\n',
    b"event: message_stop\ndata: {}\n\n",
    b"event: response.completed\ndata: {}\n\n",
    DONE,
    b"data: tail",
]


async def odd_answer(connection: Connection, _: Request) -> None:
    await connection.send(answer(ODD_BYTES, headers=[b"Content-Type: application/octet-stream"]))


async def odd_stream(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, *map(chunk, FRAMES), LAST_CHUNK)


def without_inserted(body: bytes, role: str) -> bytes:
    brace = body.index(b"{") + 1
    inserted = INSERTED[role]
    assert body[brace:].startswith(inserted), body[:200]
    return body[:brace] + body[brace + len(inserted) :]


async def relayed(stub: Stub, target: bytes | str, method: str = "GET", sent: bytes | None = None) -> Request:
    """The request as the server got it, sent through a proxy in front of `stub`."""
    async with running_proxy(settings_for(stub)) as running:
        response = await running.fetch(
            target if isinstance(target, str) else target.decode("latin-1"), sent, (), method
        )
        assert response.status == 200
    return stub.requests[-1]
