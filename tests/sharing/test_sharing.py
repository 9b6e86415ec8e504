"""Two slotpins share the slots of one llama-server through Redis; what becomes of them without it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slotpin.llama.launch import free_port
from tests.real.client import OpenRequest, fetch
from tests.real.prompts import chat, prose
from tests.real.servers import Llama, Slotpin, llama
from tests.real.test_busy_slots import FLAGS, LONG, SHORT, Pair, client_of
from tests.sharing.pair import CHAT, ServerLog, Talk, all_share, sharing, slotpins, warned
from tests.sharing.redis import HOST, RedisServer, redis_server
from tests.support.processes import wait_until
from tests.support.program import TOP, assert_lines, run

ON_SLOT_0 = "conversations.slots=main-only"
PAIRS = 20
ENDLESS = 6000
SUMMARY = {"X-Slotpin-Role": "compactor"}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Llama]:
    """Stock, with the host-memory cache that spoils the answers of busy slots."""
    with llama(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def four_slots() -> Iterator[Llama]:
    with llama("--parallel", "4", "--no-cache-idle-slots") as running:
        yield running


async def _text(url: str, body: dict[str, Any]) -> str:
    async with client_of(url) as client:
        return await client.text(body)


async def _leave(url: str, body: dict[str, Any]) -> None:
    """After the first word."""
    async with client_of(url) as client, aclosing(client.words(body)) as words:
        async for _ in words:
            return


async def _answers(url: str, pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """From the server itself, one after the other."""
    return [(await _text(url, pair.running(LONG)), await _text(url, pair.waiting)) for pair in pairs]


def test_no_answer_is_spoiled_across_both(tmp_path: Path, server: Llama, redis: RedisServer) -> None:
    """All on one slot, through both at once; some clients leave in the middle."""
    pairs = [Pair(seed, own_id=False) for seed in range(PAIRS)]
    expected = asyncio.run(_answers(server.url, pairs))
    log = ServerLog(server)

    async def proof(proxies: Sequence[Slotpin]) -> list[tuple[str, str]]:
        async def both(index: int, pair: Pair) -> tuple[str, str]:
            one, other = proxies[index % 2].url, proxies[(index + 1) % 2].url
            left = _leave(other, pair.running(ENDLESS)) if index % 5 == 0 else asyncio.sleep(0)
            long, short, _ = await asyncio.gather(_text(one, pair.running(LONG)), _text(other, pair.waiting), left)
            return long, short

        return await asyncio.gather(*(both(index, pair) for index, pair in enumerate(pairs)))

    with slotpins(tmp_path, server.url, ON_SLOT_0, redis=redis.url) as proxies:
        assert asyncio.run(proof(proxies)) == expected
        for proxy in proxies:
            exchanges = proxy.program.exchanges()
            assert {(each["reason"], each["slot"]) for each in exchanges} == {("pinned", 0)}
            assert any(each["waited_ms"] > 0 for each in exchanges)
            assert not warned(proxy, "sharing_lost")
    log.assert_never_met()


def test_pinned_and_unpinned_requests_of_different_slotpins_never_meet(
    tmp_path: Path, server: Llama, redis: RedisServer
) -> None:
    """A stock server ignores `id_slot` on the Anthropic route, so nobody knows where those run."""
    stray = {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": prose(200, 61)}]}

    async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()

    async def proof(one: Slotpin, other: Slotpin) -> None:
        async with aiohttp.ClientSession() as session:
            strays = [ask(session, f"{one.url}/v1/messages", stray) for _ in range(6)]
            pinned = [ask(session, other.url + CHAT, chat(prose(200, seed), 60)) for seed in range(6)]
            await asyncio.gather(*(each for pair in zip(strays, pinned, strict=True) for each in pair))

    log = ServerLog(server)
    with slotpins(tmp_path, server.url, ON_SLOT_0, redis=redis.url) as (one, other):
        asyncio.run(proof(one, other))
        assert {each["reason"] for each in one.program.exchanges()} == {"route_ignores_slot"}
        assert {each["reason"] for each in other.program.exchanges()} == {"pinned"}
    log.assert_never_met()


def test_a_conversation_keeps_its_slot_whichever_it_comes_through(
    tmp_path: Path, four_slots: Llama, redis: RedisServer
) -> None:
    with slotpins(tmp_path, four_slots.url, redis=redis.url) as proxies:
        first, named = Talk(prose(300, 1)), Talk(prose(300, 2), x_session_affinity="s-1")
        slots: dict[str, set[int | None]] = {"first": set(), "named": set()}
        for turn in range(6):
            for name, talk, proxy in (("first", first, proxies[turn % 2]), ("named", named, proxies[(turn + 1) % 2])):
                answer = talk.turn(proxy, f"and {turn}?" if turn else "")
                slots[name].add(answer.slot)
                if turn:
                    assert answer.json["timings"]["cache_n"] > 290, (name, turn)
        assert len(slots["first"]) == len(slots["named"]) == 1
        assert slots["first"] != slots["named"]
        exchanges = [event for proxy in proxies for event in proxy.program.exchanges()]
        assert sum(event["expected"] > 290 for event in exchanges) == 10
        assert all(event["lost"] == 0 for event in exchanges if event["expected"])


def test_a_side_request_finds_its_ticket_at_the_other(tmp_path: Path, four_slots: Llama, redis: RedisServer) -> None:
    with slotpins(tmp_path, four_slots.url, redis=redis.url) as (one, other):
        refused = other.post(CHAT, chat(prose(20, 4)), **SUMMARY, x_session_affinity="s-9")
        assert (refused.status, refused.reason) == (503, "no_binding")
        main = Talk(prose(200, 5), x_session_affinity="s-9")
        assert main.turn(one).slot != 1
        side = other.post(CHAT, chat(prose(40, 6)), **SUMMARY, x_session_affinity="s-9")
        assert (side.status, side.reason, side.slot) == (200, "pinned", 1)
        assert main.turn(other, "and?").json["timings"]["cache_n"] > 190
        stranger = other.post(CHAT, chat(prose(20, 4)), **SUMMARY, x_session_affinity="s-10")
        assert (stranger.status, stranger.reason) == (503, "no_binding")


def test_a_changed_prompt_is_told_from_a_lost_cache(tmp_path: Path, four_slots: Llama, redis: RedisServer) -> None:
    """The turn before came through the other one, so this one's own memory of the conversation is old."""
    with slotpins(tmp_path, four_slots.url, redis=redis.url) as (one, other):
        talk = Talk(prose(300, 11), x_session_affinity="s-11")
        for turn, proxy in enumerate((one, other, other)):
            talk.turn(proxy, f"{turn} {prose(200, 12 + turn)}" if turn else "")
        talk.messages[2]["content"] = "something else"
        event = one.decision(talk.turn(one, "and?").request)
        assert event["cause"] == "prompt_changed", event
        assert event["expected"] > 500


def test_a_killed_one_holds_its_slot_no_longer_than_its_lease(
    tmp_path: Path, server: Llama, redis: RedisServer
) -> None:
    log = ServerLog(server)
    with slotpins(tmp_path, server.url, ON_SLOT_0, redis=redis.url) as (one, other):
        expected = fetch(server.url + CHAT, chat("hello", SHORT)).json["choices"][0]["message"]["content"]
        endless = OpenRequest(one.url + CHAT, chat(prose(50, 1), ENDLESS, stream=True))
        endless.read_until(b"content")
        waiting = OpenRequest(other.url + CHAT, chat("hello", SHORT))
        wait_until(lambda: bool(other.status["gates"]), "the other waits")
        one.program.process.send_signal(signal.SIGKILL)
        answer = waiting.read_until(b"timings").decode()
        assert expected in answer or expected.encode("unicode_escape").decode() in answer
        assert "x-slotpin-reason: pinned" in answer.lower()
        wait_until(lambda: sharing(other)["otherSlotpins"] == 0, "it is missed")
        endless.close()
        waiting.close()
    log.assert_never_met()


def test_a_restart_of_the_server_ends_the_epoch_for_both(tmp_path: Path, redis: RedisServer) -> None:
    with llama("--parallel", "3") as first:
        port = int(first.url.rpartition(":")[2])
        with slotpins(tmp_path, first.url, redis=redis.url) as (one, other):
            talk = Talk(prose(300, 21), x_session_affinity="s-21")
            for proxy in (one, other, one, other):
                talk.turn(proxy, "" if not talk.messages else "and?")
            assert one.status["server"]["epoch"] == other.status["server"]["epoch"]
            before = one.status["server"]["epoch"]
            first.kill()
            wait_until(lambda: free_port(HOST, port) == port, "its port is free")
            with llama("--parallel", "3", port=port):
                wait_until(lambda: one.status["topology"]["ageSeconds"] > 5, "what is known of the slots is old")
                answer = talk.turn(one, "and?")
                assert answer.json["timings"]["cache_n"] == 0
                assert one.decision(answer.request)["cause"] == "server_restarted"
                again = talk.turn(other, "and?")
                assert again.json["timings"]["cache_n"] > 290
                assert other.decision(again.request)["lost"] == 0
                wait_until(
                    lambda: one.status["server"]["epoch"] == other.status["server"]["epoch"] != before, "both know"
                )


def test_redis_killed_and_restarted_empty(tmp_path: Path, server: Llama) -> None:
    """Nothing is lost, no answer is spoiled, people are told, and pinning comes back."""
    pairs = [Pair(seed, own_id=False) for seed in range(6)]
    expected = asyncio.run(_answers(server.url, pairs))
    log = ServerLog(server)
    reasons: list[str] = []

    async def rounds(proxies: Sequence[Slotpin], over: asyncio.Event) -> int:
        done = 0
        while not over.is_set():
            index = done % len(pairs)
            one, other = proxies[done % 2].url, proxies[(done + 1) % 2].url
            got = await asyncio.gather(_text(one, pairs[index].running(LONG)), _text(other, pairs[index].waiting))
            assert (got[0], got[1]) == expected[index], index
            done += 1
        return done

    async def proof(running: RedisServer, proxies: Sequence[Slotpin]) -> None:
        over = asyncio.Event()
        traffic = [asyncio.create_task(rounds(proxies, over)) for _ in range(2)]
        steps = asyncio.create_task(asyncio.to_thread(_kill_and_restart, running, proxies, reasons))
        try:
            await asyncio.wait([*traffic, steps], return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.set()
        await steps
        assert min(await asyncio.gather(*traffic)) > 0  # each went on; how far depends on the machine

    with (
        redis_server(tmp_path / "redis") as running,
        slotpins(tmp_path, server.url, ON_SLOT_0, redis=running.url) as proxies,
    ):
        asyncio.run(proof(running, proxies))
        assert {"pinned", "sharing_lost"} <= set(reasons)
        for proxy in proxies:
            assert {each["outcome"] for each in proxy.program.exchanges()} == {"completed"}
            assert len(warned(proxy, "sharing_lost")) == 1
            assert sharing(proxy)["losses"] == 1
            metrics = fetch(proxy.url + "/slotpin/metrics").body.decode()
            assert 'slotpin_sharing{state="on"} 1.0' in metrics
            assert "slotpin_sharing_losses_total 1.0" in metrics
    log.assert_never_met()


def _kill_and_restart(running: RedisServer, proxies: Sequence[Slotpin], reasons: list[str]) -> None:
    def reason_of_next() -> str:
        count = len(proxies[0].program.events("exchange"))
        wait_until(lambda: len(proxies[0].program.events("exchange")) > count, "a request has ended")
        reason: str = proxies[0].program.events("exchange")[-1]["reason"]
        reasons.append(reason)
        return reason

    assert reason_of_next() == "pinned"
    running.kill()
    wait_until(lambda: all(sharing(each)["state"] == "lost" for each in proxies), "both miss Redis")
    wait_until(lambda: reason_of_next() == "sharing_lost", "the server chooses the slots")
    running.start()
    all_share(proxies)
    wait_until(lambda: reason_of_next() == "pinned", "pinning is back")


def test_at_a_patched_server_the_loss_of_redis_costs_no_wait(tmp_path: Path) -> None:
    with (
        llama("--parallel", "3", patched=True) as server,
        redis_server(tmp_path / "redis") as running,
        slotpins(tmp_path, server.url, redis=running.url) as (one, other),
    ):
        talk = Talk(prose(300, 31), x_session_affinity="s-31")
        assert [talk.turn(proxy, f"and {n}?" if n else "").slot for n, proxy in enumerate((one, other))] == [0, 0]
        running.kill()
        wait_until(lambda: sharing(one)["state"] == "lost", "Redis is missed")
        lost = talk.turn(one, "and?")
        assert (lost.reason, lost.slot) == ("sharing_lost", None)
        assert lost.json["timings"]["cache_n"] > 290
        assert "Redis" in warned(one, "sharing_lost")[0]["message"]
        side = one.post(CHAT, chat("hi"), **SUMMARY, x_session_affinity="s-31")
        assert (side.status, side.reason) == (503, "sharing_lost")
        running.start()
        all_share([one, other])
        wait_until(lambda: talk.turn(other, "and?").reason == "pinned", "pinning is back")


def test_redis_is_not_there_at_the_start(tmp_path: Path) -> None:
    gone = "sharing.redisUrl=redis://user:secret-word@127.0.0.1:1"
    with llama(patched=True) as server, slotpins(tmp_path, server.url, gone, count=1) as (proxy,):
        answer = proxy.post(CHAT, chat("hello"))
        assert (answer.status, answer.reason) == (200, "sharing_lost")
        assert "127.0.0.1:1" in warned(proxy, "sharing_lost")[0]["message"]
        assert "secret-word" not in proxy.program.err + proxy.program.out


def test_a_missing_client_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "__init__.py").write_text("raise ImportError")
    done = run(
        *(tmp_path, "serve", "--port", "0", "--set", "sharing.redisUrl=redis://127.0.0.1:1"),
        PYTHONPATH=f"{tmp_path}{os.pathsep}{TOP}",
    )
    assert done.returncode == 2
    assert_lines(done.stderr, "sharing.redisUrl is set, but the client is missing: pip install 'slotpin[redis]'")
