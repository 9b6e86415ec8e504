"""Claims of slots in a real Redis, as three slotpins make them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from slotpin.proxy.gates import Pass
from slotpin.proxy.sharing.shared import Claimed, Options, Shared
from tests.sharing.redis import RedisServer, redis_server
from tests.support.proxy import on_loop

LEASE = 1.0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as running:
        yield running


@asynccontextmanager
async def slotpins(redis: RedisServer, count: int = 3) -> AsyncIterator[Sequence[Shared]]:
    losses: list[str] = []
    found = [
        Shared(Options(redis.url, "test", LEASE, f"p{n}"), "server", time.monotonic, losses.append)
        for n in range(count)
    ]
    try:
        for each in found:
            await each.start()
        await asyncio.sleep(max(each.opens_in for each in found))
        yield found
    finally:
        for each in found:
            await each.close()


def at(slot: int | None, width: int = 1) -> Pass:
    return Pass(slot, "test", 0.0, width)


async def claim(shared: Shared, entered: Pass, who: str = "c") -> Claimed:
    claimed = await shared.claim(entered, who, None, 0.0)
    assert claimed is not None
    return claimed


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110, Redis tells nobody
            await asyncio.sleep(0.01)


async def queue(redis: RedisServer, length: int) -> None:
    """Wait until so many wait for slots."""
    async with Redis.from_url(redis.url) as client:

        async def is_so_long() -> bool:
            (key,) = await client.keys("test:*:queue") or [b"none"]
            return bool(await client.zcard(key) == length)

        await until(is_so_long)


@on_loop
async def test_a_slot_goes_to_whoever_asked_first_and_is_still_there(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, two, three):
        held = at(0)
        assert (await claim(one, held, "c1")).ran == ""
        assert (await claim(two, at(1))).free_from is None
        order: list[str] = []

        async def wait(shared: Shared, name: str) -> None:
            entered = at(0)
            claimed = await claim(shared, entered, name)
            order.append(f"{claimed.ran} {name}")
            shared.release(entered, settled=True)

        waiting = []
        for place, (shared, name) in enumerate([(two, "c2"), (three, "left"), (one, "c3"), (three, "c4")], 1):
            waiting.append(asyncio.create_task(wait(shared, name)))
            await queue(redis, place)
        waiting[1].cancel()
        one.release(held, settled=True)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == ["c1 c2", "c2 c3", "c3 c4"]


@on_loop
async def test_what_a_client_left_behind_is_looked_at_by_the_next(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, two, _):
        entered = at(0)
        await claim(one, entered)
        one.release(entered, settled=False)
        await one.refresh()
        after = at(0)
        claimed = await claim(two, after)
        assert claimed.free_from is not None
        two.release(after, settled=False)
        await two.refresh()
        await asyncio.sleep(1.2)
        seen = await one.claim(at(0), "c", False, time.monotonic())
        assert seen is not None and seen.free_from is None, "it was seen to be idle"


@on_loop
async def test_a_slot_that_was_seen_busy_before_anybody_claimed_it_is_looked_at(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, _, _):
        entered = at(0)
        busy = await one.claim(entered, "c", True, time.monotonic())
        assert busy is not None and busy.free_from is not None
        seen_at = time.monotonic()
        await asyncio.sleep(0.01)  # Redis counts milliseconds
        one.release(entered, settled=True)
        again = await one.claim(at(0), "c", True, seen_at)
        assert again is not None and again.free_from is None, "that was the request before"


@on_loop
async def test_pinned_and_unpinned_requests_wait_for_each_other(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, two, _):
        stray, pinned = at(None, width=2), at(0)
        flown = await one.fly(stray, "s", "main", [])
        assert flown is not None and flown.goes
        claimed = await claim(two, pinned)
        assert [(each.kind, each.width) for each in claimed.meets] == [("s", 2)]
        held = await two.fly(pinned, "p", "main", [])
        assert held is not None and not held.goes
        (met,) = held.meets
        waits = await one.fly(at(None), "s", "main", [])
        assert waits is not None and not waits.goes and waits.meets[0].slot == 0
        goes = await two.fly(pinned, "p", "main", [met.name])
        assert goes is not None and goes.goes
        one.release(stray, settled=False)
        await one.refresh()  # after what was told
        left = await two.fly(pinned, "p", "main", [])
        assert left is not None and left.meets[0].kind == "g"


@on_loop
async def test_in_an_empty_redis_nothing_is_claimed_until_all_have_said_what_they_hold(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, two, _):
        held = at(0)
        mine = await claim(one, held)
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        await one.refresh()
        assert await two.claim(at(1), "c", None, 0.0) is None, "also where nobody has it"
        await asyncio.sleep(two.opens_in)
        assert one.holds(mine)
        await claim(two, at(1))
        waiting = asyncio.create_task(claim(two, at(0)))
        await queue(redis, 1)
        assert not waiting.done()
        one.release(held, settled=True)
        assert (await waiting).free_from is None


@on_loop
async def test_an_old_copy_is_not_believed(redis: RedisServer) -> None:
    """Redis comes back with what it had saved before the claim."""
    async with slotpins(redis) as (one, two, _):
        async with Redis.from_url(redis.url) as client:
            await client.save()
        held = at(0)
        await claim(one, held)
        redis.kill()
        assert await two.claim(at(0), "c", None, 0.0) is None
        assert two.quiet_for > 10
        await asyncio.to_thread(redis.start)
        await until(lambda: asyncio.sleep(0, one.state == two.state == "on"))
        waiting = asyncio.create_task(claim(two, at(0)))
        await queue(redis, 1)
        one.release(held, settled=True)
        await waiting


@on_loop
async def test_who_stood_still_for_longer_than_the_lease_holds_nothing(redis: RedisServer) -> None:
    async with slotpins(redis) as (one, two, _):
        mine = await claim(one, at(0))
        assert one.holds(mine)
        time.sleep(1.5 * LEASE)  # noqa: ASYNC251, all stand still
        await one.refresh()
        assert not one.holds(mine)
        assert (await claim(two, at(1))) and two.state == "on"


@on_loop
async def test_in_a_cluster_the_keys_are_found(tmp_path: Path) -> None:
    with redis_server(tmp_path / "a", cluster=True) as one, redis_server(tmp_path / "b", cluster=True) as other:
        async with Redis.from_url(one.url) as first, Redis.from_url(other.url) as second:
            await _tell(first, "CLUSTER MEET", "127.0.0.1", other.port)
            for client, start in ((first, 0), (second, 8192)):
                await _tell(client, "CLUSTER ADDSLOTSRANGE", start, start + 8191)
            for client in (first, second):
                await until(partial(_is_up, client))
        for entry in (one, other):
            async with slotpins(entry, 2) as (mine, yours):
                entered = at(0)
                await claim(mine, entered)
                assert mine.state == "on"
                mine.release(entered, settled=True)
                await claim(yours, at(0))


async def _tell(client: Redis, *command: object) -> str:
    return str(await client.execute_command(*command))  # type: ignore[no-untyped-call]


async def _is_up(client: Redis) -> bool:
    return "'cluster_state': 'ok'" in await _tell(client, "CLUSTER INFO")
