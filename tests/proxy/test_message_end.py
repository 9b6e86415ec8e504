"""When an answer is complete, as the bindings in `/slotpin/status` show it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.proxy import Client, Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Connection,
    Request,
    answer,
    chunk,
    ok,
    stub_upstream,
)

RECORDED = Path(__file__).parents[1] / "pinning" / "streams"
DELTA = b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n'
LATE_ERROR = b'data: {"error":{"code":500,"message":"Compute error.","type":"server_error"}}\n\n'


async def begin(running: Running, target: str = "/v1/chat/completions", body: bytes = b"{}") -> Client:
    client = await running.client()
    await client.send(request("POST", target, body))
    return client


def stream_then_wait(*frames: bytes) -> object:
    """The frames, and then nothing: the server is still working, or has not yet written its terminator."""

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, *map(chunk, frames))
        await connection.gone()

    return script


SHAPES = {
    "chat": ("/v1/chat/completions", b"{}"),
    "completions": ("/v1/completions", b"{}"),
    "native": ("/completion", b"{}"),
    "native_two": ("/completion", b'{"prompt":["a","b"]}'),
    "native_four": ("/completion", b'{"prompt":["a","b"],"n_cmpl":2}'),
    "anthropic": ("/v1/messages", b"{}"),
    "responses": ("/v1/responses", b"{}"),
}
# Main requests that ran in any slot are no ticket.
UNSAFE = {
    "anthropic": b"route_ignores_slot",
    "native_two": b"several_completions",
    "native_four": b"several_completions",
}


@pytest.mark.parametrize("shape", SHAPES)
@on_loop
async def test_a_client_that_leaves_after_the_end_has_its_answer(shape: str) -> None:
    """Pi stops reading at the last event and closes 20 ms later, before the chunked terminator."""
    target, body = SHAPES[shape]
    stream = (RECORDED / f"{shape}.txt").read_bytes()
    async with stub_upstream(stream_then_wait(stream)) as stub, running_proxy(settings_for(stub)) as running:  # type: ignore[arg-type]
        client = await begin(running, target, body)
        await client.read_head()
        received = b""
        while len(received) < len(stream):
            received += await client.read_chunk()
        assert received == stream
        assert await running.bindings() == (0, 1)  # at the message end, not at the client's leave
        await asyncio.sleep(0.02)
        client.leave()
        await running.until_outcome("completed")
        assert await running.bindings() == (0, 1)
        await until(lambda: stub.open == 0, "the upstream connection is closed")
        stub.script = ok
        ticket = UNSAFE.get(shape, b"pinned")
        assert (await running.fetch("/compactor/v1/chat/completions", b"{}")).get(b"X-Slotpin-Reason") == ticket


@pytest.mark.parametrize("shape", SHAPES)
@on_loop
async def test_a_client_that_leaves_before_the_end_has_not(shape: str) -> None:
    target, body = SHAPES[shape]
    stream = (RECORDED / f"{shape}.txt").read_bytes()
    cut = stream.rstrip().rfind(b"\n\n") + 2 if shape not in ("native_two", "native_four") else len(stream) // 2
    if shape in ("chat", "completions"):
        assert stream[cut:].startswith(b"data: [DONE]")
    async with stub_upstream(stream_then_wait(stream[:cut])) as stub, running_proxy(settings_for(stub)) as running:  # type: ignore[arg-type]
        client = await begin(running, target, body)
        await client.read_head()
        received = b""
        while len(received) < cut:
            received += await client.read_chunk()
        assert await running.bindings() == (1, 0)
        client.leave()
        await running.until_outcome("client_left")
        assert await running.bindings() == (0, 0)
        await until(lambda: stub.open == 0, "the upstream connection is closed")
        refused = await running.fetch("/compactor/v1/chat/completions", b"{}")
        assert (refused.status, refused.error["code"]) == (503, "no_binding")


@on_loop
async def test_a_whole_body_ends_with_its_last_byte() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{ }")
        await go_on.wait()
        await connection.send(b"\n")

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await begin(running)
        await client.read_head()
        assert await running.bindings() == (1, 0)
        go_on.set()
        assert await client.reader.readexactly(4) == b"{ }\n"
        await client.close()
        assert await running.bindings() == (0, 1)


@on_loop
async def test_done_inside_a_json_body_means_nothing() -> None:
    async def script(connection: Connection, _: Request) -> None:
        body = b'{"content":"x"}\ndata: [DONE]\n\n'
        await connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n" + body
        )
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await begin(running)
        await client.read_head()
        await asyncio.sleep(0.02)
        assert await running.bindings() == (1, 0)
        client.leave()
        await running.until_outcome("client_left")
        assert await running.bindings() == (0, 0)


@on_loop
async def test_a_binding_is_open_from_the_arrival_on() -> None:
    """A compactor call that comes while main is still evaluating its prompt has its ticket."""

    async def script(connection: Connection, request: Request) -> None:
        if b'"side"' in request.body:
            await connection.send(answer())
        else:
            await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await begin(running)
        await until(lambda: bool(stub.requests), "main is with the server")
        assert await running.bindings() == (1, 0)
        side = await running.fetch("/compactor/v1/chat/completions", b'{"side":1}')
        assert (side.status, side.get(b"X-Slotpin-Slot")) == (200, b"1")
        client.leave()
        await running.until_outcome("client_left")
        assert await running.bindings() == (0, 0)


@pytest.mark.parametrize(
    "status", [b"400 Bad Request", b"401 Unauthorized", b"404 Not Found", b"413 X", b"500 X", b"501 X", b"503 X"]
)
@on_loop
async def test_an_error_status_passes_and_drops_the_binding(status: bytes) -> None:
    body = b'{"error":{"code":400,"type":"exceed_context_size_error","message":"the request exceeds"}}'

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(body, status, [b"Content-Type: application/json; charset=utf-8"]))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch()
        assert (response.status, response.phrase, response.body) == (int(status[:3]), status[4:], body)
        assert response.get(b"Content-Type") == b"application/json; charset=utf-8"
        assert await running.bindings() == (0, 0)
        assert (await running.status())["outcomes"] == {"upstream_refused": 1}


@on_loop
async def test_a_late_error_passes_and_drops_the_binding() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(DELTA), chunk(LATE_ERROR), LAST_CHUNK)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch()
        assert response.body == DELTA + LATE_ERROR
        assert await running.bindings() == (0, 0)
        refused = await running.fetch("/compactor/v1/chat/completions", b"{}")
        assert refused.error["code"] == "no_binding"


async def break_in_head(connection: Connection, _: Request) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Le")
    connection.close()


async def break_in_chunk(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, chunk(DELTA), b"ff\r\ndata")
    connection.close()


async def break_after_chunk(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, chunk(DELTA))
    connection.close()


async def break_by_reset(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, chunk(DELTA))
    await asyncio.sleep(0.05)
    connection.reset()


async def break_in_length(connection: Connection, _: Request) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nsome")
    connection.close()


async def break_by_garbage(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, chunk(DELTA), b"not a chunk size\r\n")
    await connection.gone()


BREAKS = [break_in_chunk, break_after_chunk, break_by_reset, break_in_length, break_by_garbage]


@pytest.mark.parametrize("script", BREAKS)
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/stream/abc"])
@on_loop
async def test_a_broken_answer_is_broken_off(script: object, target: str) -> None:
    """Never ended politely: the client has to see that something is missing."""
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:  # type: ignore[arg-type]
        client = await begin(running, target)
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert not data.endswith(LAST_CHUNK)
        assert b"some" in data if b"Content-Length" in data else DELTA in data
        assert await running.bindings() == (0, 0)
        await client.close()
        await until(lambda: stub.open == 0, "the upstream connection is closed")


@pytest.mark.parametrize("script", [break_after_chunk, break_by_garbage])
@on_loop
async def test_a_broken_answer_is_broken_off_for_http_1_0_too(script: object) -> None:
    """There the end of the connection is the end of the body: only a reset says that it is not."""
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:  # type: ignore[arg-type]
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", b"{}", version=b"1.0"))
        _, reset = await client.read_all()
        assert reset
        await client.close()


@on_loop
async def test_broken_in_the_head_is_an_error_of_its_own() -> None:
    async with stub_upstream(break_in_head) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch()
        assert response.status == 502
        assert response.error["message"].startswith("slotpin: ")
        assert await running.bindings() == (0, 0)
        assert len(stub.requests) == 1  # it was with the server: not sent a second time


@on_loop
async def test_broken_after_the_message_end_is_success() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(DELTA), chunk(DONE))
        connection.close()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await begin(running)
        data, _ = await client.read_all()
        assert data.endswith(DONE + b"\r\n")
        assert await running.bindings() == (0, 1)
        await running.until_outcome("completed")
        await client.close()


@on_loop
async def test_the_next_main_request_ends_the_ticket() -> None:
    """One binding serves many compactor calls until then."""

    async def script(connection: Connection, request: Request) -> None:
        if b'"hang"' in request.body:
            await connection.gone()
        await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()
        sides = await asyncio.gather(*(running.fetch("/compactor/v1/chat/completions", b"{}") for _ in range(5)))
        assert {side.get(b"X-Slotpin-Reason") for side in sides} == {b"pinned"}
        client = await begin(running, body=b'{"hang":1}')
        await until(lambda: b'"hang"' in stub.requests[-1].body, "the next main request is with the server")
        assert await running.bindings() == (1, 0)
        client.leave()
        await running.until_outcome("client_left")
        assert (await running.fetch("/compactor/v1/chat/completions", b"{}")).error["code"] == "no_binding"


@on_loop
async def test_conversations_are_kept_apart_by_their_session() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(headers=[b"X-Session-Affinity: a"])
        own = await running.fetch("/compactor/v1/chat/completions", headers=[b"X-Session-Affinity: a"])
        other = await running.fetch("/compactor/v1/chat/completions", headers=[b"X-Session-Affinity: b"])
        assert own.get(b"X-Slotpin-Reason") == b"pinned"
        assert other.error["code"] == "no_binding"
