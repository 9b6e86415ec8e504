"""What `bench.proxy` measures of one target in one round. Figures are absolute; what a proxy adds comes later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import Load, Wire, run_load, wire
from bench.proxy_targets import CHAT, SLOW, Target
from slotpin.errors import UserError

MB = 1024 * 1024
BODY_SIZES = {"50 KB": 50_000, "500 KB": 500_000, "5 MB": 5_000_000, "20 MB": 20_000_000}
PACED = {"16 x 100/s": (16, 100), "64 x 50/s": (64, 50)}
BURST_CHUNKS = 5_000
IDLE_STREAMS = 1_000
# An hour, in microseconds.
FOREVER = 3_600_000_000
TRIES, FEW_TRIES = 200, 10
SEEN_SECONDS = 1.0
SEEN_AT_ONCE = 0.020

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """`added`: of what it is directly; `higher`: more is better. `unit` says what the figures are divided by."""

    key: str
    title: str
    unit: str
    added: bool = False
    higher: bool = False


def chat(wish: str, size: int = 600, stream: bool = False) -> bytes:
    """A chat request of about `size` bytes, its text like that of an agent's session; `wish` is for the stub.

    The client puts something of its own in the place of #SESSION: requests that say the same are one conversation.
    """
    messages = [{"role": "system", "content": f"@bench {wish}@ You are a careful assistant for a small repository."}]
    text = 'def total(rows):\n    """Sum of the rows\' amounts."""\n    return sum(row.amount for row in rows)\n\n'
    number, left = 0, size - 400
    while left > 0:
        role = "user" if number % 2 == 0 else "assistant"
        content = (f"{number}. #SESSION asks:\n" + text * 25)[: max(40, min(2500, left))]
        messages.append({"role": role, "content": content})
        left -= len(json.dumps(messages[-1])) + 2
        number += 1
    body = {"model": "local", "messages": messages, "max_tokens": 256, "temperature": 0.2, "stream": stream}
    return json.dumps(body).encode()


class Bench:
    """Runs the measures; `scale` shortens them. `folder` is for what is sent."""

    def __init__(self, folder: Path, scale: float) -> None:
        self._folder = folder
        self._scale = scale

    async def small(self, target: Target) -> Figures:
        """Short answers to short requests."""
        figures: Figures = {}
        body = self._file("small", chat(""))
        for connections in (1, 8, 64):
            load, cpu = await self._load(target, CHAT, body, connections, 1.5)
            figures[f"p50.{connections}"] = load.latency.p50 / 1e3
            figures[f"p99.{connections}"] = load.latency.p99 / 1e3
            figures[f"cpu.{connections}"] = cpu / load.answered / 1e3
        figures["rate.64"] = load.answered / load.seconds
        return figures

    async def streams(self, target: Target) -> Figures:
        short = self._file("short", chat("chunks=3", stream=True))
        load, _ = await self._load(target, CHAT, short, 1, 1.0)
        figures: Figures = {"first": load.first.p50 / 1e3}
        for name, (connections, rate) in PACED.items():
            seconds = 2.0 * self._scale
            wish = f"chunks={max(10, int(rate * seconds))} gap={1_000_000 // rate}"
            # One answer for each connection.
            body = self._file(f"paced-{rate}", chat(wish, stream=True))
            load, cpu = await self._load(target, CHAT, body, connections, 0)
            figures[f"p50.{name}"] = load.delay.p50 / 1e3
            figures[f"p99.{name}"] = load.delay.p99 / 1e3
            figures[f"cpu.{name}"] = cpu / load.delay.count / 1e3
        burst = self._file("burst", chat(f"chunks={BURST_CHUNKS}", stream=True))
        load, _ = await self._load(target, CHAT, burst, 1, 1.0)
        figures["burst"] = load.delay.count / load.seconds
        return figures

    async def bodies(self, target: Target) -> Figures:
        """Large requests, and what others notice of them."""
        figures = await self._large(target, CHAT)
        paced = self._file("others", chat(f"chunks={int(400 * self._scale)} gap=10000", stream=True))
        large = self._file("body-5000000", chat("", BODY_SIZES["5 MB"]))
        streams = asyncio.create_task(self._load(target, CHAT, paced, 8, 0))
        try:
            await self._load(target, CHAT, large, 1, 3.5 * self._scale, session="large")
            load, _ = await streams
        finally:
            streams.cancel()
        figures["others"] = load.delay.max / 1e6
        return figures

    async def path(self, target: Target) -> Figures:
        """Large requests whose role is known without looking into them."""
        return await self._large(target, target.role_path)

    async def _large(self, target: Target, path: str) -> Figures:
        figures: Figures = {}
        first = not target.used
        target.used = True
        for name, size in BODY_SIZES.items():
            body = self._file(f"body-{size}", chat("", size))
            target.forget_peak()
            load, _ = await self._load(target, path, body, 1, 1.0)
            figures[f"p50.{name}"] = load.latency.p50 / 1e6
            if first and target.process is not None:  # later there is memory left of the larger ones
                figures[f"rss.{name}"] = (target.peak_rss() - target.fresh_rss) / MB
        return figures

    async def memory(self, target: Target) -> Figures:
        """Streams that are open and silent."""
        if target.process is None:
            return {}
        async with contextlib.AsyncExitStack() as stack:
            body = chat(f"chunks=2 gap={FOREVER}", stream=True)
            for first in range(0, IDLE_STREAMS, 50):
                some = [await stack.enter_async_context(wire(target.port)) for _ in range(50)]
                for number, each in enumerate(some, first):
                    each.post(CHAT, body, f"idle-{number}")
                async with asyncio.timeout(120):
                    await asyncio.gather(*(each.reader.readuntil(b'T"') for each in some))
            rss = target.rss()
        return {"fresh": target.fresh_rss / MB, "idle": rss / MB, "growth": (rss - target.fresh_rss) / MB}

    async def abort(self, target: Target) -> Figures:
        """Clients that leave before a first byte came."""
        tries = max(FEW_TRIES, int(TRIES * self._scale))
        times: list[float | None] = []
        async with wire(target.upstream) as stub:
            # Who has seen none of so many will see none, and each takes its second.
            while len(times) < tries and (len(times) < FEW_TRIES or any(times)):
                times.append(await self._leave(target, stub, len(times)))
        seen = sorted(time for time in times if time is not None)
        at_once = sum(time <= SEEN_AT_ONCE for time in seen)
        figures: Figures = {"at_once": 100 * at_once / len(times), "seen": 100 * len(seen) / len(times)}
        if seen:
            figures |= {"p50": 1e3 * seen[len(seen) // 2], "max": 1e3 * seen[-1]}
        return figures

    async def _leave(self, target: Target, stub: Wire, number: int) -> float | None:
        """Seconds until the stub has seen it."""
        before = int(await stub.get("/bench/tasks"))
        async with wire(target.port) as client:
            client.post(CHAT, chat(f"chunks=2 delay={FOREVER} id={number}", stream=True), f"leaver-{number}")
            deadline = time.monotonic() + 20
            while int(await stub.get("/bench/tasks")) == before:
                if time.monotonic() > deadline:
                    raise UserError("a request doesn't arrive at the stub", exit_code=1)
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.005)
            left_at = time.monotonic_ns()
        deadline = time.monotonic() + SEEN_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(0.002)
            for line in (await stub.get("/bench/closed")).splitlines():
                closed, at = map(int, line.split())
                if closed == number:
                    return max(0, at - left_at) / 1e9
        return None

    async def _load(
        self, target: Target, path: str, body: Path, connections: int, seconds: float, session: str = "load"
    ) -> tuple[Load, int]:
        """And the CPU time that the target has spent."""
        if target.name in SLOW:
            connections = min(connections, 16)
        before = target.cpu_ns()
        load = await run_load(
            target.port, path, body, connections=connections, seconds=seconds * self._scale, session=session
        )
        return load, target.cpu_ns() - before

    def _file(self, name: str, content: bytes) -> Path:
        path = self._folder / f"{name}.json"
        if not path.exists():
            path.write_bytes(content)
        return path


Measure = Callable[[Bench, Target], Awaitable[Figures]]
MEASURES: dict[str, Measure] = {
    "small": Bench.small,
    "streams": Bench.streams,
    "bodies": Bench.bodies,
    "path": Bench.path,
    "memory": Bench.memory,
    "abort": Bench.abort,
}
# Every stream of these has a slot of its own.
MANY_SLOTS = frozenset({"memory", "abort"})


def _large(measure: str) -> list[Metric]:
    times = [Metric(f"{measure}.p50.{name}", f"{name}: added p50", "ms", added=True) for name in BODY_SIZES]
    peaks = [Metric(f"{measure}.rss.{name}", f"{name}: peak memory above a fresh start", "MB") for name in BODY_SIZES]
    return [*times, *peaks]


def _paced() -> list[Metric]:
    found = []
    for name in PACED:
        found.append(Metric(f"streams.p50.{name}", f"{name}: added p50 a chunk", "µs", added=True))
        found.append(Metric(f"streams.p99.{name}", f"{name}: added p99 a chunk", "µs", added=True))
        found.append(Metric(f"streams.cpu.{name}", f"{name}: CPU a chunk", "µs"))
    return found


METRICS: dict[str, Sequence[Metric]] = {
    "small": [
        *(
            Metric(f"small.{quantile}.{connections}", f"added {quantile}, {connections} connections", "µs", added=True)
            for connections in (1, 8, 64)
            for quantile in ("p50", "p99")
        ),
        *(Metric(f"small.cpu.{count}", f"CPU a request, {count} connections", "µs") for count in (1, 64)),
        Metric("small.rate.64", "requests a second, 64 connections", "", higher=True),
    ],
    "streams": [
        Metric("streams.first", "added time to the first chunk", "µs", added=True),
        *_paced(),
        Metric("streams.burst", "chunks a second, one stream at full speed", "", higher=True),
    ],
    "bodies": [
        *_large("bodies"),
        Metric("bodies.others", "longest delay of a chunk of others while 5 MB bodies arrive", "ms"),
    ],
    "path": _large("path"),
    "memory": [
        Metric("memory.fresh", "memory after a few requests", "MB"),
        Metric("memory.idle", "memory with 1,000 idle streams", "MB"),
        Metric("memory.growth", "the difference", "MB"),
    ],
    "abort": [
        Metric("abort.at_once", "seen upstream within 20 ms", "%", higher=True),
        Metric("abort.seen", "seen upstream within 1 s", "%", higher=True),
        Metric("abort.p50", "median time", "ms"),
        Metric("abort.max", "longest time of those seen", "ms"),
    ],
}
