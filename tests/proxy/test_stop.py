"""The end: answers under way get their time, then nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.proxy import Client, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import DONE, LAST_CHUNK, SSE_HEAD, Connection, Request, chunk, stub_upstream

CHAT = "/v1/chat/completions"


async def endless(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
    await connection.gone()


@on_loop
async def test_stop_lets_answers_under_way_end() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
        await go_on.wait()
        await connection.send(chunk(DONE), LAST_CHUNK)

    async with (
        stub_upstream(script) as stub,
        running_proxy(settings_for(stub, timeouts={"drainSeconds": 10})) as running,
    ):
        busy, idle = await running.client(), await running.client()
        await busy.send(request("POST", CHAT, b"{}"))
        await idle.send(request("GET", "/slotpin/health"))
        await idle.read_response()
        idle = await running.client()
        await busy.read_head()
        await busy.read_chunk()
        port = running.port
        stopping = asyncio.create_task(running.proxy.stop())
        assert await asyncio.wait_for(idle.reader.read(), 2) == b""  # what is idle ends at once
        await asyncio.sleep(0.05)
        assert not stopping.done()
        try:
            late = await Client.connect(port)
        except ConnectionRefusedError:
            pass
        else:
            late.leave()
            raise AssertionError("it still takes connections")
        go_on.set()
        assert await busy.read_chunk() == DONE
        assert await busy.read_chunk() == b""
        assert await asyncio.wait_for(busy.reader.read(), 2) == b""
        await asyncio.wait_for(stopping, 2)
        assert running.logged("exchange")[-1]["outcome"] == "completed"
        await until(lambda: stub.open == 0, "the upstream connection is closed")


@on_loop
async def test_stop_breaks_off_what_takes_too_long() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
        await connection.gone()

    async with (
        stub_upstream(script) as stub,
        running_proxy(settings_for(stub, timeouts={"drainSeconds": 0.2})) as running,
    ):
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        await client.read_head()
        await client.read_chunk()
        await asyncio.wait_for(running.proxy.stop(), 2)
        data, _ = await client.read_all()
        assert not data.endswith(LAST_CHUNK)
        await until(lambda: stub.open == 0, "the upstream connection is closed")


@on_loop
async def test_it_says_once_for_how_many_answers_it_waits() -> None:
    timeouts = {"drainSeconds": 0.3}
    async with stub_upstream(endless, slots=4) as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        idle = await running.client()
        await idle.send(request("GET", "/slotpin/health"))
        await idle.read_response()
        for number in range(2):
            client = await running.client()
            await client.send(request("POST", CHAT, b'{"messages":[%d]}' % number))
            await client.read_head()
        await running.proxy.stop()
        await running.proxy.stop()
        (event,) = running.logged("waiting_for_answers")
        assert (event["answers"], event["seconds"]) == (2, 0.3)


@on_loop
async def test_without_an_answer_under_way_it_says_nothing() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, timeouts={"drainSeconds": 9})) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        await client.read_response()
        await asyncio.wait_for(running.proxy.stop(), 5)
        assert running.logged("waiting_for_answers") == []


@pytest.mark.parametrize("stage", ["before the head", "in mid-answer", "at the gate"])
@on_loop
async def test_what_the_stop_cuts_off_is_not_the_clients_doing(stage: str) -> None:
    async def script(connection: Connection, got: Request) -> None:
        await (connection.gone() if stage == "before the head" else endless(connection, got))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client, second = await running.client(), await running.client()
        await client.send(request("POST", CHAT, b'{"messages":[1]}'))
        await until(lambda: bool(stub.requests), "the request is with the server")
        if stage == "at the gate":
            await second.send(request("POST", CHAT, b'{"messages":[1]}'))
            await asyncio.sleep(0.05)
        elif stage == "in mid-answer":
            await client.read_head()
        await running.proxy.stop()
        # Told before the stop is over, so that the log has it.
        outcomes = [event["outcome"] for event in running.logged("exchange")]
        assert outcomes == ["cut_off"] * (2 if stage == "at the gate" else 1)
        await until(lambda: stub.open == 0, "the upstream connection is closed")


@on_loop
async def test_a_client_that_leaves_while_it_is_waited_for_has_left() -> None:
    async with (
        stub_upstream(endless) as stub,
        running_proxy(settings_for(stub, timeouts={"drainSeconds": 20})) as running,
    ):
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        await client.read_head()
        stopping = asyncio.create_task(running.proxy.stop())
        await until(lambda: bool(running.logged("waiting_for_answers")), "it waits")
        client.leave()
        await asyncio.wait_for(stopping, 2)
        assert [event["outcome"] for event in running.logged("exchange")] == ["client_left"]


@on_loop
async def test_requests_sent_ahead_are_not_begun_any_more() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD)
        await go_on.wait()
        await connection.send(chunk(DONE), LAST_CHUNK)

    async with (
        stub_upstream(script) as stub,
        running_proxy(settings_for(stub, timeouts={"drainSeconds": 20})) as running,
    ):
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}") * 3)
        await client.read_head()
        stopping = asyncio.create_task(running.proxy.stop())
        await asyncio.sleep(0.02)
        go_on.set()
        assert await client.read_chunk() == DONE
        await asyncio.wait_for(stopping, 2)
        assert len(stub.requests) == 1
