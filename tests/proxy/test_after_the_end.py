"""What comes when one side has ended already leaves no error in the log; `running_proxy` looks for those."""

from __future__ import annotations

import asyncio
import gc

from slotpin.proxy.exchange import Exchange
from slotpin.proxy.forward import Forward
from tests.support.proxy import on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import SSE_HEAD, Connection, Request, answer, chunk, stub_upstream

CHAT = "/v1/chat/completions"


async def at_full_speed(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b"data: x\n\n") * 50)


@on_loop
async def test_clients_that_leave_while_the_server_sends_at_full_speed() -> None:
    async with stub_upstream(at_full_speed) as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(10):
            client = await running.client()
            await client.send(request("POST", CHAT, b'{"stream":true}'))
            await client.read_head()
            client.leave()
            await client.close()
        await running.until_outcome("client_left", 10)


@on_loop
async def test_a_server_that_goes_while_a_body_is_sent_to_it() -> None:
    async def reset(connection: Connection) -> None:
        await connection.read_head()
        connection.reset()

    async with stub_upstream(raw=reset) as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(20):
            client = await running.client()
            await client.send(request("POST", "/tokenize", None, [b"Content-Length: 3000000"]))
            for _ in range(30):
                client.send_nowait(b"x" * 100_000)
                await asyncio.sleep(0)
            assert (await client.read_response()).status == 502
            await client.close()


@on_loop
async def test_a_rest_that_is_no_request_after_an_early_answer() -> None:
    """The answer stands, and nothing is made of the rest."""
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for rest in (b"zzz\r\n", b"0\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"1;" + b"x" * 2_000_000):
            client = await running.client()
            await client.send(request("POST", CHAT, None, [b"Transfer-Encoding: chunked"], host=b"elsewhere.example"))
            assert (await client.read_response()).status == 403
            client.send_nowait(rest)
            assert (await client.read_all())[0] == b""
            await client.close()
        assert stub.requests == []


@on_loop
async def test_an_own_route_waits_for_no_body() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", "/slotpin/health", None, [b"Content-Length: 999999999999"]))
        response = await client.read_response()
        assert (response.status, response.get(b"connection")) == (404, b"close")
        await client.close()


def exchanges_held() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, (Exchange, Forward))]


@on_loop
async def test_an_exchange_is_gone_at_its_end() -> None:
    """At once, not when a garbage collection finds it: the body that it holds may be large."""

    async def by_target(connection: Connection, received: Request) -> None:
        if received.target == b"/reset":
            connection.reset()
        elif b"stream" in received.body:
            await at_full_speed(connection, received)
        else:
            await connection.send(answer(status=b"400 Bad Request" if b"bad" in received.body else b"200 OK"))

    async with stub_upstream(by_target) as stub, running_proxy(settings_for(stub)) as running:
        gc.collect()
        gc.disable()
        try:
            assert (await running.fetch(CHAT)).status == 200
            assert (await running.fetch(CHAT, b'{"bad":1}')).status == 400
            assert (await running.fetch(CHAT, b"[]")).status == 200
            assert (await running.fetch("/compactor/v1/chat/completions")).status == 503
            assert (await running.fetch("/reset", b"")).status == 502
            client = await running.client()
            await client.send(request("POST", CHAT, b'{"stream":true}'))
            await client.read_head()
            waiting = await running.client()
            await waiting.send(request("POST", CHAT, b'{"messages":[]}'))
            await until(
                lambda: running.proxy.state.observer.under_way[-1].outcome == "waiting", "it waits for its slot"
            )
            waiting.leave()
            client.leave()
            await running.until_outcome("client_left", 2)
            await until(lambda: not exchanges_held(), "no exchange is held")
        finally:
            gc.enable()
