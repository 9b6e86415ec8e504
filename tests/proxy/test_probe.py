"""The look at `GET /slots`, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slotpin.config import Settings
from slotpin.pinning.decision import Probed, Unverified
from slotpin.pinning.reasons import Reason
from slotpin.pinning.topology import Topology
from slotpin.proxy.probe import PROBE_SECONDS, Probe, Target
from slotpin.proxy.state import Running
from tests.support.clock import Clock
from tests.support.proxy import on_loop, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    LAST_CHUNK,
    Connection,
    Request,
    Stub,
    answer,
    chunk,
    slots_json,
    stub_upstream,
)


@asynccontextmanager
async def probing(clock: Clock | None = None, seconds: float = PROBE_SECONDS) -> AsyncIterator[Probe]:
    probe = Probe(clock or Clock(), seconds)
    try:
        yield probe
    finally:
        await probe.close()


def target(stub: Stub, key: str = "sk-placeholder") -> Target:
    return Target(stub.url, key)


def start(coroutine: Coroutine[Any, Any, Probed]) -> asyncio.Task[Probed]:
    return asyncio.create_task(coroutine)


def unverified(probed: Probed) -> Unverified:
    assert isinstance(probed, Unverified), probed
    return probed


def ids(probed: Probed) -> tuple[int, ...]:
    assert isinstance(probed, Topology), probed
    return probed.ids


async def hang(connection: Connection) -> None:
    await connection.read_head()
    await connection.gone()


@on_loop
async def test_asks_slots_with_the_api_key() -> None:
    async with stub_upstream(slots=3) as stub, probing() as probe:
        assert ids(await probe.topology(target(stub, "secret"))) == (0, 1, 2)
        (asked,) = stub.probes
    assert asked.line == b"GET /slots HTTP/1.1"
    assert asked.get_all(b"authorization") == [b"Bearer secret"]
    assert asked.body == b""


@pytest.mark.parametrize(
    ("base_url", "asked"),
    [
        ("", b"/slots"),
        ("/", b"/slots"),
        ("/v1", b"/slots"),
        ("/v1/", b"/slots"),
        ("/llm/v1", b"/llm/slots"),
        ("/llm", b"/llm/slots"),
        ("/v1/v1", b"/v1/slots"),
    ],
)
@on_loop
async def test_the_base_url_loses_one_v1(base_url: str, asked: bytes) -> None:
    async with stub_upstream() as stub, probing() as probe:
        tree = {"compactor": {"baseUrl": stub.url + base_url}}
        running = Running.of(Settings.model_validate(tree, by_alias=True, by_name=False), 1)
        assert ids(await probe.topology(running.probe_target)) == (0, 1)
        assert [request.target for request in stub.probes] == [asked]


@on_loop
async def test_a_topology_is_kept_for_five_seconds_from_its_completion() -> None:
    clock = Clock()
    release = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await release.wait()
        await connection.send(answer(slots_json(2)))

    async with stub_upstream(script, slots=None) as stub, probing(clock) as probe:
        first = start(probe.topology(target(stub)))
        await until(lambda: len(stub.requests) == 1, "the request arrives")
        clock.now += 1.5  # the answer takes this long: the five seconds begin only then
        release.set()
        await first
        clock.now += 4.9
        assert ids(await probe.topology(target(stub))) == (0, 1)
        assert len(stub.requests) == 1
        clock.now += 0.2
        assert ids(await probe.topology(target(stub))) == (0, 1)
        assert len(stub.requests) == 2


@on_loop
async def test_use_does_not_make_a_topology_last_longer() -> None:
    clock = Clock()
    async with stub_upstream() as stub, probing(clock) as probe:
        for _ in range(4):
            await probe.topology(target(stub))
            clock.now += 1.7
        assert len(stub.probes) == 2


@on_loop
async def test_a_failure_is_not_kept() -> None:
    async with stub_upstream(slots=answer(b"{}", b"503 Service Unavailable")) as stub, probing() as probe:
        assert unverified(await probe.topology(target(stub))).reason is Reason.PROBE_FAILED
        stub.slots = answer(slots_json(2))
        assert ids(await probe.topology(target(stub))) == (0, 1)
        assert len(stub.probes) == 2


@on_loop
async def test_an_invalid_topology_is_not_kept() -> None:
    async with stub_upstream(slots=answer(b"[]x")) as stub, probing() as probe:
        assert unverified(await probe.topology(target(stub))).reason is Reason.TOPOLOGY_INVALID
        stub.slots = answer(slots_json(4))
        assert ids(await probe.topology(target(stub))) == (0, 1, 2, 3)


@on_loop
async def test_a_server_that_never_answers_costs_two_seconds_once() -> None:
    """The real limit, with waiters that come while the probe hangs."""
    loop = asyncio.get_running_loop()
    async with stub_upstream(raw=hang) as stub, probing() as probe:
        began = loop.time()
        first = start(probe.topology(target(stub)))
        await asyncio.sleep(1)
        later = [start(probe.topology(target(stub))) for _ in range(5)]
        results = await asyncio.gather(first, *later)
        assert 1.8 < loop.time() - began < 2.7
        assert {unverified(result).reason for result in results} == {Reason.PROBE_FAILED}
        assert stub.accepts == 1
        await until(lambda: stub.open == 0, "the connection is closed")


async def dribble_head(connection: Connection) -> None:
    await connection.read_head()
    for byte in answer(slots_json(2)):
        await connection.send(bytes([byte]))
        await asyncio.sleep(0.05)


async def dribble_body(connection: Connection) -> None:
    await connection.read_head()
    await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for byte in slots_json(2):
        await connection.send(chunk(bytes([byte])))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("raw", [dribble_head, dribble_body])
@on_loop
async def test_the_limit_is_for_the_whole_exchange(raw: Any) -> None:
    loop = asyncio.get_running_loop()
    async with stub_upstream(raw=raw) as stub, probing(seconds=0.3) as probe:
        began = loop.time()
        failed = unverified(await probe.topology(target(stub)))
        assert loop.time() - began < 1
        assert failed.reason is Reason.PROBE_FAILED
        await until(lambda: stub.open == 0, "the connection is closed")


@on_loop
async def test_concurrent_probes_share_one_request() -> None:
    release = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await release.wait()
        await connection.send(answer(slots_json(2)))

    async with stub_upstream(script, slots=None) as stub, probing() as probe:
        waiting = [start(probe.topology(target(stub))) for _ in range(50)]
        await until(lambda: bool(stub.requests), "the request arrives")
        waiting += [start(probe.topology(target(stub))) for _ in range(50)]
        await asyncio.sleep(0.02)
        release.set()
        assert {ids(probed) for probed in await asyncio.gather(*waiting)} == {(0, 1)}
        assert len(stub.requests) == 1
        assert probe.times.count == 1


@on_loop
async def test_a_waiter_that_leaves_takes_nothing_from_the_others() -> None:
    release = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await release.wait()
        await connection.send(answer(slots_json(2)))

    async with stub_upstream(script, slots=None) as stub, probing() as probe:
        first, second, third = (start(probe.topology(target(stub))) for _ in range(3))
        await until(lambda: bool(stub.requests), "the request arrives")
        first.cancel()
        third.cancel()
        await asyncio.sleep(0.02)
        assert first.cancelled() and third.cancelled()
        release.set()
        assert ids(await second) == (0, 1)
        assert len(stub.requests) == 1


@on_loop
async def test_keys_and_urls_are_kept_apart() -> None:
    async def script(connection: Connection, request: Request) -> None:
        allowed = request.get_all(b"authorization") == [b"Bearer right"]
        await connection.send(answer(slots_json(2)) if allowed else answer(b"{}", b"401 Unauthorized"))

    async with stub_upstream(script, slots=None) as one, stub_upstream(slots=5) as other, probing() as probe:
        right, wrong, elsewhere = await asyncio.gather(
            probe.topology(target(one, "right")),
            probe.topology(target(one, "wrong")),
            probe.topology(target(other, "right")),
        )
        assert ids(right) == (0, 1)
        assert unverified(wrong).reason is Reason.PROBE_FAILED
        assert ids(elsewhere) == (0, 1, 2, 3, 4)
        # What is kept for the right key is no answer for the wrong one, nor for another path on the same server.
        assert unverified(await probe.topology(target(one, "wrong"))).reason is Reason.PROBE_FAILED
        await probe.topology(Target(f"{one.url}/llm", "right"))
        assert len(one.requests) == 4
        assert ids(await probe.topology(target(one, "right"))) == (0, 1)
        assert len(one.requests) == 4


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (b"401 Unauthorized", "API key"),
        (b"403 Forbidden", "API key"),
        (b"404 Not Found", "compactor.baseUrl"),
        (b"501 Not Implemented", "start llama-server with --slots"),
        (b"503 Service Unavailable", "model is loading"),
        (b"500 Internal Server Error", "500"),
        (b"204 No Content", "204"),
    ],
)
@on_loop
async def test_a_status_says_what_to_do(status: bytes, words: str) -> None:
    body = b"" if status.startswith(b"204") else slots_json(2)
    async with stub_upstream(slots=answer(body, status)) as stub, probing() as probe:
        failed = unverified(await probe.topology(target(stub)))
    assert failed.reason is Reason.PROBE_FAILED
    assert words in failed.detail


@on_loop
async def test_a_redirect_is_not_followed() -> None:
    """It could carry the API key to another place."""
    async with stub_upstream(slots=3) as elsewhere:
        moved = answer(b"", b"302 Found", [b"Location: " + elsewhere.url.encode() + b"/slots"])
        async with stub_upstream(slots=moved) as stub, probing() as probe:
            failed = unverified(await probe.topology(target(stub)))
        assert failed.reason is Reason.PROBE_FAILED
        assert "302" in failed.detail
        assert elsewhere.accepts == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>not found</html>",
        b"null",
        b"{}",
        b'{"slots":[{"id":0},{"id":1}]}',
        b"[0,1]",
        b'[{"id":"0"},{"id":"1"}]',
        b'[{"id":0},{"id":0}]',
        b'[{"id":0},{"n_ctx":1}]',
        b'[{"id":0.5},{"id":1}]',
        b'[{"id":true},{"id":1}]',
        b'[{"id":0},{"id":1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
@on_loop
async def test_what_is_not_a_topology(body: bytes) -> None:
    async with stub_upstream(slots=answer(body)) as stub, probing() as probe:
        assert unverified(await probe.topology(target(stub))).reason is Reason.TOPOLOGY_INVALID


@on_loop
async def test_other_fields_do_not_matter() -> None:
    body = json.dumps([{"id": 1, "n_ctx": "many", "new": [{}]}, {"id": 0}]).encode()
    async with stub_upstream(slots=answer(body)) as stub, probing() as probe:
        assert sorted(ids(await probe.topology(target(stub)))) == [0, 1]


@on_loop
async def test_an_endless_answer_is_given_up() -> None:
    """A broken server must not fill the memory: the read stops at a bound, or at the two seconds."""
    sent = 0

    async def raw(connection: Connection) -> None:
        nonlocal sent
        await connection.read_head()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
        while True:
            await connection.send(b" " * 65536)
            sent += 65536

    async with stub_upstream(raw=raw) as stub, probing() as probe:
        unverified(await probe.topology(target(stub)))
        await until(lambda: stub.open == 0, "the connection is closed")
    assert sent < 64 * 1024 * 1024


@on_loop
async def test_nothing_listens() -> None:
    async with stub_upstream() as stub:
        pass
    async with probing() as probe:
        failed = unverified(await asyncio.wait_for(probe.topology(target(stub)), 1))
        assert failed.reason is Reason.PROBE_FAILED
        assert "listens" in failed.detail


async def close_at_once(connection: Connection) -> None:
    connection.close()


async def close_in_head(connection: Connection) -> None:
    await connection.read_head()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Le")


async def close_in_body(connection: Connection) -> None:
    await connection.read_head()
    await connection.send(answer(slots_json(2))[:-1])


async def close_in_chunks(connection: Connection) -> None:
    await connection.read_head()
    # All of the JSON is there, but the server did not say that it was.
    await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(slots_json(2)))


async def reset(connection: Connection) -> None:
    await connection.read_head()
    connection.reset()


async def garbage(connection: Connection) -> None:
    await connection.read_head()
    await connection.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


@pytest.mark.parametrize("raw", [close_at_once, close_in_head, close_in_body, close_in_chunks, reset, garbage])
@on_loop
async def test_a_broken_answer(raw: Any) -> None:
    async with stub_upstream(raw=raw) as stub, probing() as probe:
        failed = unverified(await probe.topology(target(stub)))
        assert failed.reason is Reason.PROBE_FAILED
        stub.raw = None
        assert ids(await probe.topology(target(stub))) == (0, 1)


@on_loop
async def test_chunked_and_cut_at_every_byte() -> None:
    async def raw(connection: Connection) -> None:
        await connection.read_head()
        whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(slots_json(2)) + LAST_CHUNK
        for byte in whole:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)

    async with stub_upstream(raw=raw) as stub, probing() as probe:
        assert ids(await probe.topology(target(stub))) == (0, 1)


@on_loop
async def test_a_closed_probe_leaves_nothing_behind() -> None:
    async with stub_upstream(raw=hang) as stub:
        before = asyncio.all_tasks()
        async with probing() as probe:
            waiting = start(probe.topology(target(stub)))
            await until(lambda: stub.accepts == 1, "the connection")
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: stub.open == 0, "the connection is closed")
        assert [task for task in asyncio.all_tasks() - before if "Probe" in repr(task)] == []


class Swap:
    """What llama-swap answers, with one model loaded."""

    def __init__(self) -> None:
        self.loaded = "one"

    async def script(self, connection: Connection, got: Request) -> None:
        path = got.target.partition(b"?")[0]
        if path == b"/running":
            listed = [{"model": self.loaded, "state": "ready"}, {"model": "half", "state": "starting"}]
            await connection.send(answer(json.dumps({"running": listed}).encode()))
        elif path == b"/upstream/%s/slots" % self.loaded.encode():
            await connection.send(answer(slots_json(2)))
        elif path.startswith((b"/v1/", b"/upstream/")):
            await connection.send(answer())
        else:
            await connection.send(answer(b"404 page not found", b"404 Not Found"))


@on_loop
async def test_llama_swap_is_asked_for_the_slots_of_a_loaded_model_only() -> None:
    swap = Swap()
    async with stub_upstream(swap.script, slots=None) as stub, running_proxy(settings_for(stub)) as running:

        async def reason(model: str) -> bytes | None:
            return (await running.fetch(body=b'{"model":"%s","messages":[]}' % model.encode())).get(b"X-Slotpin-Reason")

        assert await reason("one") == b"pinned"
        for unloaded in ("two", "half"):
            assert await reason(unloaded) == b"model_not_loaded"
        swap.loaded = "two"
        assert await reason("two") == b"pinned"
        asked = {got.target for got in stub.requests if got.target.startswith(b"/upstream/")}
        assert asked == {b"/upstream/one/slots", b"/upstream/two/slots"}
        shown = await running.status()
        assert set(shown["models"]) == {"one", "two"}
