"""One gate a slot: who waits, who is let in, and what a client sees meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from slotpin.config import Compactor
from slotpin.pinning.decision import Unverified
from slotpin.proxy.gates import Gates
from tests.support.clock import Clock
from tests.support.proxy import Client, Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Connection,
    Request,
    Stub,
    answer,
    chunk,
    stub_upstream,
)

TURN = b'{"stream":true,"messages":[{"role":"user","content":"a"}]}'
NEXT = (
    b'{"stream":true,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},'
    b'{"role":"user","content":"c"}]}'
)
CHAT = "/v1/chat/completions"


class Server:
    """Streams an answer to each request when it is told to; its slots are busy as the test says."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []
        self.begins = True  # with a first piece of its answer
        self.stub: Stub

    async def script(self, connection: Connection, got: Request) -> None:
        if got.target == b"/props":
            await connection.send(answer())
            return
        finish = asyncio.Event()
        self.waiting.append(finish)
        await connection.send(SSE_HEAD)
        if self.begins:
            await connection.send(chunk(b'data: {"choices":[]}\n\n'))
        await finish.wait()
        await connection.send(chunk(DONE), LAST_CHUNK)

    def show(self, busy: Sequence[int] = (), count: int = 2) -> None:
        slots = [{"id": slot, "n_ctx": 4096, "is_processing": slot in busy} for slot in range(count)]
        self.stub.slots = answer(json.dumps(slots).encode())

    async def until_asked(self, count: int) -> None:
        await until(lambda: len(self.waiting) >= count, f"{count} requests have reached the server")


@asynccontextmanager
async def held(gate: Mapping[str, object] | None = None) -> AsyncIterator[tuple[Server, Running, Client]]:
    """A server that works on the first turn, the proxy in front of it, and that turn's client."""
    server = Server()
    async with (
        stub_upstream(server.script) as server.stub,
        running_proxy(settings_for(server.stub, gate=gate or {})) as proxy,
    ):
        first = await send(proxy, TURN)
        await server.until_asked(1)
        yield server, proxy, first


async def send(proxy: Running, body: bytes, *headers: bytes) -> Client:
    client = await proxy.client()
    await client.send(request("POST", CHAT, body, headers))
    return client


@on_loop
async def test_second_turn_waits_until_the_first_message_ends() -> None:
    async with held() as (server, proxy, first):
        second = await send(proxy, NEXT)
        await until(lambda: waiting_at(proxy, 0) == 1, "the second turn waits at the gate")
        await asyncio.sleep(0.1)
        assert len(server.stub.requests) == 1
        server.waiting[0].set()
        assert (await first.read_response()).body.endswith(DONE)
        await server.until_asked(2)
        server.waiting[1].set()
        assert (await second.read_response()).get(b"X-Slotpin-Slot") == b"0"


def waiting_at(proxy: Running, slot: int) -> int:
    state = proxy.proxy.state
    return state.server(state.running.probe_target).gates.waiting(slot)


@on_loop
async def test_main_and_compactor_do_not_wait_for_each_other() -> None:
    async with held() as (server, proxy, _):
        await send(proxy, b'{"messages":[]}', b"X-Slotpin-Role: compactor")
        await server.until_asked(2)
        for finish in server.waiting:
            finish.set()


@on_loop
async def test_requests_are_let_in_as_they_came() -> None:
    async with held() as (server, proxy, _):
        for number in range(5):
            await send(proxy, TURN[:-1] + b',"seed":%d}' % number)
            await until(lambda count=number: waiting_at(proxy, 0) == count + 1, "it waits")  # type: ignore[misc]
        for number in range(6):
            await server.until_asked(number + 1)
            server.waiting[number].set()
        await proxy.until_outcome("completed", 6)
        seeds = [json.loads(each.body).get("seed") for each in server.stub.requests]
        assert seeds == [None, 0, 1, 2, 3, 4]


@on_loop
async def test_client_that_leaves_gives_up_its_place_at_once() -> None:
    async with held() as (server, proxy, _):
        leaving = await send(proxy, NEXT)
        await until(lambda: waiting_at(proxy, 0) == 1, "it waits")
        leaving.leave()
        await until(lambda: waiting_at(proxy, 0) == 0, "its place is free")
        server.waiting[0].set()
        await proxy.until_outcome("completed")
        assert len(server.stub.requests) == 1
        await proxy.until_outcome("client_left")


@on_loop
async def test_after_an_abort_the_gate_opens_when_the_server_says_idle() -> None:
    async with held() as (server, proxy, first):
        server.show(busy=[0])
        first.leave()
        await proxy.until_outcome("client_left")
        second = await send(proxy, NEXT)
        looks = len(server.stub.probes)
        await until(lambda: len(server.stub.probes) > looks, "slotpin looks at the slots")
        await asyncio.sleep(0.1)
        assert len(server.stub.requests) == 1
        server.show(busy=[])
        await server.until_asked(2)
        server.waiting[1].set()
        assert (await second.read_response()).status == 200


@on_loop
async def test_nobody_looks_while_nobody_waits() -> None:
    async with held() as (server, proxy, first):
        first.leave()
        await proxy.until_outcome("client_left")
        looks = len(server.stub.probes)
        await asyncio.sleep(2.5)
        assert len(server.stub.probes) == looks


@on_loop
async def test_wait_that_takes_too_long_is_refused() -> None:
    async with held({"waitSeconds": 0.3}) as (server, proxy, first):
        refused = await (await send(proxy, NEXT)).read_response()
        holder = (await first.read_head()).partition(b"X-Slotpin-Request: ")[2][:12].decode()
        assert refused.status == 503
        assert refused.error["code"] == "slot_busy"
        assert "slot 0 is held by main request" in refused.error["message"]
        assert holder in refused.error["message"]
        assert refused.get(b"Retry-After") is not None
        assert len(server.stub.requests) == 1
        server.waiting[0].set()


@on_loop
async def test_client_that_streams_gets_signs_of_life_while_it_waits() -> None:
    async with held({"keepAliveSeconds": 0.1}) as (server, proxy, _):
        second = await send(proxy, NEXT)
        head = await second.read_head()
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        assert b"X-Slotpin-Slot: 0\r\n" in head
        for _ in range(2):
            assert (await second.read_chunk()).startswith(b":")
        server.waiting[0].set()
        await server.until_asked(2)
        server.waiting[1].set()
        pieces = []
        while piece := await second.read_chunk():
            pieces.append(piece)
        events = [piece for piece in pieces if not piece.startswith(b":")]
        assert b"".join(events) == b'data: {"choices":[]}\n\n' + DONE


@on_loop
async def test_client_that_does_not_stream_gets_nothing_before_the_answer() -> None:
    async with held({"keepAliveSeconds": 0.05}) as (server, proxy, _):
        second = await send(proxy, NEXT.replace(b'"stream":true,', b""))
        await asyncio.sleep(0.3)
        server.stub.script = whole
        server.waiting[0].set()
        response = await second.read_response()
        assert response.body == b"{}"


async def whole(connection: Connection, _: Request) -> None:
    await connection.send(answer())


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        (CHAT, b'{"error":{"code":400,"message":"too long"}}', b'{"error":{"code":400,"message":"too long"}}'),
        ("/v1/responses", b'{"error":{"code":400}}', b'{"error":{"code":400}}'),
        (CHAT, b"no JSON", b'{"error":{"code":400,"message":"no JSON","type":"server_error"}}'),
    ],
)
def test_error_after_a_sign_of_life_is_an_event(path: str, body: bytes, event: bytes) -> None:
    async def overflow(connection: Connection, _: Request) -> None:
        await connection.send(answer(body, b"400 Bad Request"))

    @on_loop
    async def test() -> None:
        server = Server()
        async with (
            stub_upstream(server.script) as server.stub,
            running_proxy(
                settings_for(server.stub, gate={"keepAliveSeconds": 0.05}, conversations={"slots": "main-only"})
            ) as proxy,
        ):
            await send(proxy, TURN)
            await server.until_asked(1)
            second = await proxy.client()
            await second.send(request("POST", path, NEXT))
            await second.read_head()
            server.stub.script = overflow
            server.waiting[0].set()
            pieces = []
            while piece := await second.read_chunk():
                pieces.append(piece)
            assert pieces[-1] == b"data: %b\n\n" % event
            await proxy.until_outcome("upstream_refused")

    test()


@on_loop
async def test_unpinned_request_and_a_pinned_one_never_start_together() -> None:
    """Which slot the server gives the first can't be known before it is busy there."""
    server = Server()
    async with stub_upstream(server.script) as server.stub, running_proxy(settings_for(server.stub)) as proxy:
        server.show(count=3)
        await send(proxy, TURN.replace(b'"stream"', b'"n":2,"stream"'))
        await server.until_asked(1)
        await send(proxy, TURN)
        await asyncio.sleep(0.3)
        assert len(server.waiting) == 1
        server.show(busy=[1, 2], count=3)
        await server.until_asked(2)
        for finish in server.waiting:
            finish.set()


@on_loop
async def test_slot_that_somebody_else_uses_is_waited_for() -> None:
    """A request that went past slotpin runs there: a stock server would spoil its answer."""
    server = Server()
    async with stub_upstream(server.script) as server.stub, running_proxy(settings_for(server.stub)) as proxy:
        server.show(busy=[0])
        client = await send(proxy, TURN)
        await asyncio.sleep(0.3)
        assert server.waiting == []
        server.show(busy=[])
        await server.until_asked(1)
        server.waiting[0].set()
        assert (await client.read_response()).status == 200


@on_loop
async def test_nobody_is_met_once_all_strays_are_over() -> None:
    gates = Gates(no_look, Clock())
    strays = [await gates.enter(None, "a stray") for _ in range(2)]
    for stray in strays:
        gates.sent(stray, pinned=False)
    for left, stray in enumerate(strays, 1):
        assert gates.could_meet(pinned=True)
        gates.leave(stray, settled=True)
        gates.leave(stray, settled=True)  # once more does nothing
        assert gates.could_meet(pinned=True) == (left < len(strays))


@on_loop
async def test_client_that_leaves_in_the_moment_of_its_turn() -> None:
    """Its place goes to the next one, and whoever held the slot has its answer."""
    gates = Gates(no_look, Clock())
    holder = await gates.enter(0, "holder")
    leaving = asyncio.create_task(gates.enter(0, "leaving"))
    following = asyncio.create_task(gates.enter(0, "following"))
    await asyncio.sleep(0)
    leaving.cancel()
    gates.leave(holder, settled=True)
    assert (await following).who == "following"
    assert leaving.cancelled()
    gates.leave(following.result(), settled=True)
    assert gates.is_open(0)


async def no_look() -> Unverified:
    raise AssertionError("nobody needs to look")


@pytest.mark.parametrize("order", [False, True])
@on_loop
async def test_any_order_of_leaving_and_turns_frees_the_slot(order: bool) -> None:
    gates = Gates(no_look, Clock())
    holder = await gates.enter(0, "holder")
    waiting = [asyncio.create_task(gates.enter(0, str(number))) for number in range(5)]
    await asyncio.sleep(0)
    if order:
        gates.leave(holder, settled=True)
    for task in waiting:
        task.cancel()
    if not order:
        gates.leave(holder, settled=True)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert gates.is_open(0) and not list(gates)


@on_loop
async def test_unpinned_request_that_waits_too_long_is_refused() -> None:
    server = Server()
    async with (
        stub_upstream(server.script) as server.stub,
        running_proxy(settings_for(server.stub, gate={"waitSeconds": 0.3})) as proxy,
    ):
        server.begins = False
        await send(proxy, TURN)
        await server.until_asked(1)
        refused = await (await send(proxy, TURN.replace(b'"stream"', b'"n":2,"stream"'))).read_response()
        assert (refused.status, refused.error["code"]) == (503, "slot_busy")
        server.waiting[0].set()


@pytest.mark.parametrize(("own", "slot"), [(b"-2", 0), (b"true", 1), (b"1.5", 1), (b"-3", 1)])
def test_odd_id_is_gated_where_the_server_takes_it(own: bytes, slot: int) -> None:
    @on_loop
    async def test() -> None:
        server = Server()
        async with stub_upstream(server.script) as server.stub, running_proxy(settings_for(server.stub)) as proxy:
            await send(proxy, TURN.replace(b'"stream"', b'"id_slot":%d,"stream"' % slot))
            await server.until_asked(1)
            await send(proxy, TURN.replace(b'"stream"', b'"id_slot":%b,"stream"' % own))
            await until(lambda: waiting_at(proxy, slot) == 1, "it waits for the slot that the server takes it to mean")
            for number in range(2):
                await server.until_asked(number + 1)
                server.waiting[number].set()
            await proxy.until_outcome("completed", 2)

    test()


@on_loop
async def test_another_key_or_spelling_is_the_same_server() -> None:
    async with held() as (server, proxy, _):
        url = server.stub.url.replace("127.0.0.1", "localhost")
        compactor = Compactor(base_url=f"{url}/v1", api_key=SecretStr("another"))
        settings = settings_for(server.stub, main={"baseUrl": f"{url}/v1"})
        proxy.proxy.state.apply(settings.model_copy(update={"compactor": compactor}))
        await send(proxy, NEXT)
        await until(lambda: waiting_at(proxy, 0) == 1, "the next turn waits for the first")
        for number in range(2):
            await server.until_asked(number + 1)
            server.waiting[number].set()
        await proxy.until_outcome("completed", 2)


@pytest.mark.parametrize("count", [10**6, 10**18])
@on_loop
async def test_any_number_of_completions_costs_nothing(count: int) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as proxy:
        answered = await proxy.fetch("/completion", b'{"prompt":"a","n_cmpl":%d}' % count)
        assert answered.get(b"X-Slotpin-Reason") == b"several_completions"
        assert (await proxy.bindings())[0] == 0


@on_loop
async def test_conversation_of_a_few_tokens_gives_up_the_main_slot() -> None:
    """A first "Hi" must not leave the conversation after it without a slot of its own."""
    few, many = (answer(b'{"timings":{"prompt_n":%d,"cache_n":0}}' % count) for count in (20, 2000))
    hi, turn, other = (b'{"messages":[{"role":"user","content":"%b"}]}' % text for text in (b"Hi", b"A", b"B"))
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as proxy:
        for body, said, slot in ((hi, few, b"0"), (turn, many, b"0"), (other, many, b"1"), (turn, many, b"0")):

            async def script(connection: Connection, _: Request, said: bytes = said) -> None:
                await connection.send(said)

            stub.script = script
            assert (await proxy.fetch(body=body)).get(b"X-Slotpin-Slot") == slot
