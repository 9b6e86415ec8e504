"""A client that leaves: the server sees it at once, at every stage, and nothing is left behind.

`running_proxy` checks at its end that no task is left and that nothing was complained of.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.proxy import Client, Running, is_of_the_proxy, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    SSE_HEAD,
    Connection,
    Request,
    Stub,
    answer,
    chunk,
    slots_json,
    stub_upstream,
)

CHAT = "/v1/chat/completions"
TARGETS = [CHAT, "/compactor/v1/chat/completions", "/v1/stream/abc"]


def tasks_of_the_proxy() -> int:
    return sum(map(is_of_the_proxy, asyncio.all_tasks()))


async def everything_is_back(stub: Stub, running: Running) -> None:
    """At once means well within the second in which llama-server would look for itself."""
    await until(lambda: stub.open == 0, "the upstream connection is closed", 0.5)
    await until(lambda: tasks_of_the_proxy() == 0, "no task is left", 0.5)
    assert (await running.bindings())[0] == 0


async def leave(client: Client, politely: bool) -> None:
    if politely:
        await client.close()
    else:
        client.leave()


politely = pytest.mark.parametrize("politely", [True, False], ids=["FIN", "RST"])


@politely
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("framing", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("enabled", [False, True])
@on_loop
async def test_while_the_body_is_being_sent(enabled: bool, framing: bytes, target: str, politely: bool) -> None:
    async with stub_upstream(raw=Connection.gone) as stub, running_proxy(settings_for(stub, enabled)) as running:
        client = await running.client()
        await client.send(request("POST", target, None, [framing]), chunk(b"some of it"))
        await asyncio.sleep(0.02)
        await leave(client, politely)
        await everything_is_back(stub, running)
        assert await running.bindings() == (0, 0)


@politely
@on_loop
async def test_during_the_probe(politely: bool) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, got: Request) -> None:
        if got.target == b"/slots":
            await go_on.wait()
            await connection.send(answer(slots_json(2)))
        else:
            await connection.send(answer())

    async with stub_upstream(script, slots=None) as stub, running_proxy(settings_for(stub)) as running:
        first, second = await running.client(), await running.client()
        await first.send(request("POST", CHAT, b"{}"))
        await second.send(request("POST", CHAT, b'{"second":1}'))
        await until(lambda: bool(stub.requests), "the probe is under way")
        await leave(first, politely)
        await asyncio.sleep(0.02)
        go_on.set()
        assert (await second.read_response()).status == 200  # its probe was not taken away
        assert [got.target for got in stub.requests] == [b"/slots", CHAT.encode()]
        assert b'"second"' in stub.requests[-1].body
        assert await running.bindings() == (0, 1)
        await second.close()


@politely
@pytest.mark.parametrize("target", TARGETS)
@on_loop
async def test_before_the_first_byte_of_the_answer(target: str, politely: bool) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, True)) as running:
        client = await running.client()
        await client.send(request("POST", target, b"{}"))
        await until(lambda: bool(stub.requests), "the request is with the server")
        await leave(client, politely)
        await everything_is_back(stub, running)


@politely
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sent", [(SSE_HEAD,), (SSE_HEAD, chunk(b"data: x\n\n")), (SSE_HEAD, b"ff\r\nhalf a chunk")])
@on_loop
async def test_in_mid_answer(sent: tuple[bytes, ...], target: str, politely: bool) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(*sent)
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, True)) as running:
        client = await running.client()
        await client.send(request("POST", target, b"{}"))
        await client.read_head()
        await leave(client, politely)
        await everything_is_back(stub, running)
        await running.fetch("/slotpin/health", None)


@on_loop
async def test_while_the_server_goes_on_sending() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD)
        while True:
            await connection.send(chunk(b"data: x\n\n"))
            await asyncio.sleep(0.001)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        for _ in range(3):
            await client.read_head()
            break
        await client.close()
        await everything_is_back(stub, running)
        assert await running.bindings() == (0, 0)


@politely
@on_loop
async def test_with_more_requests_sent_ahead(politely: bool) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}") * 5)
        await until(lambda: bool(stub.requests), "the first request is with the server")
        await leave(client, politely)
        await everything_is_back(stub, running)
        assert len(stub.requests) == 1  # what nobody waits for is not begun


@politely
@pytest.mark.parametrize("size", [250_000, 262_200, 300_000, 500_000, 600_000])
@pytest.mark.parametrize("target", [CHAT, "/upload"])
@on_loop
async def test_after_a_body_that_came_faster_than_it_could_go(target: str, size: int, politely: bool) -> None:
    """The body is here to its end before the server is even connected: the client must be listened to again."""

    async def script(connection: Connection, got: Request) -> None:
        if got.target == b"/then":
            await connection.gone()
        await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, False)) as running:
        client = await running.client()
        await client.send(request("POST", target, bytes(size)))
        assert (await client.read_response()).status == 200
        await client.send(request("GET", "/then"))
        await until(lambda: stub.requests[-1].target == b"/then", "the next request of the connection", 1)
        await leave(client, politely)
        await everything_is_back(stub, running)


@on_loop
async def test_while_the_server_does_not_take_the_body() -> None:
    async def raw(connection: Connection) -> None:
        await connection.read_head()
        connection.stop_reading()
        await stop.wait()
        connection.go_on_reading()
        await connection.gone()

    stop = asyncio.Event()
    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        sending = asyncio.create_task(client.send(request("POST", "/upload", bytes(40_000_000))))
        await asyncio.sleep(0.3)
        client.leave()
        await asyncio.gather(sending, return_exceptions=True)
        # While nothing more is read from the client, its leave can't be seen; nothing runs on the server meanwhile.
        stop.set()
        await everything_is_back(stub, running)


@on_loop
async def test_many_that_leave_at_once() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
        await connection.gone()

    async with stub_upstream(script, slots=202) as stub, running_proxy(settings_for(stub)) as running:
        clients = [await running.client() for _ in range(200)]
        for number, client in enumerate(clients):
            # Each a conversation with a slot of its own, so that none has to wait.
            client.send_nowait(request("POST", CHAT, b'{"messages":[%d]}' % number))
        await until(lambda: len(stub.requests) == 200, "all are with the server")
        for client in clients:
            client.leave()
        await until(lambda: stub.open == 0, "all upstream connections are closed", 2)
        await everything_is_back(stub, running)
        assert await running.bindings() == (0, 0)
