"""slotpin under mixed traffic with faults for half an hour: afterwards, is anything left over?

A real llama-server, patched and with a tiny model, slotpin as a user starts it, and clients of every kind:
conversations, side requests, all generating routes, streamed and not, clients that leave at every stage, and nonsense.
Now and then the bench ends or kills the server, its own child, and starts it again. Every few seconds it looks at
slotpin's memory, descriptors, tasks, gates and bindings. When all clients have ended and it has been quiet, tasks,
descriptors, gates and open bindings must be what they were before, and memory within 5 % of what it was after the first
minute. What slotpin keeps of conversations has bounds, and is filled up before. Ends with 1 if not. Run from the
repository's root:

    python -m bench.soak [--minutes 30] [--seed 1] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.soak_traffic import CLIENTS, Traffic, fill, run_clients
from slotpin.errors import UserError
from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer, free_port, server_args
from tests.support.llama import HOST, patched_binary
from tests.support.program import Program
from tests.support.tiny_model import full_attention

PAGE = Path(__file__).parents[1] / "docs/benchmarks/soak.md"
MB = 1024 * 1024
SLOTS = 4
# The server is killed this often, and stays away so long. Of a short run, shorter.
FAULT_SECONDS, AWAY_SECONDS = 180.0, 3.0
SAMPLE_SECONDS = 5.0
WARM_SECONDS = 60.0
QUIET_SECONDS = 40.0
LONG_MINUTES = 5
MEMORY_TOLERANCE = 1.05


# Of a sample, and what people call it.
_COUNTS = {"tasks": "tasks", "descriptors": "descriptors", "gates": "gates held", "bindings": "open bindings"}


@dataclass(frozen=True, slots=True)
class Sample:
    """`at`: seconds since the traffic began; `rss` in bytes."""

    at: float
    rss: int
    descriptors: int
    tasks: int
    gates: int
    bindings: int


@dataclass(slots=True)
class Soak:
    """`before` and `after` are without traffic."""

    minutes: float
    before: Sample
    after: Sample
    samples: list[Sample]
    counts: dict[tuple[str, str], int]
    restarts: int
    complaints: list[str] = field(default_factory=list)

    @property
    def warm(self) -> float:
        """Memory after the first minute, or after a third of a shorter run: the median of what was sampled then."""
        since = min(WARM_SECONDS, 20 * self.minutes)
        return statistics.median([sample.rss for sample in self.samples if sample.at >= since][:5])

    @property
    def faults(self) -> list[str]:
        """In words; empty where all is as it was."""
        left = {word: getattr(self.after, name) - getattr(self.before, name) for name, word in _COUNTS.items()}
        found = [f"{word}: {count} left over" for word, count in left.items() if count > 0]
        if self.after.rss > self.warm * MEMORY_TOLERANCE:
            found.append(f"memory: {self.growth:+.1%} since the first minute")
        return found + self.complaints

    @property
    def growth(self) -> float:
        return self.after.rss / self.warm - 1


async def look(program: Program, began: float) -> Sample:
    process = psutil.Process(program.process.pid)
    async with aiohttp.ClientSession() as session, session.get(f"{program.url}/slotpin/status") as answer:
        shown: dict[str, Any] = await answer.json()
    return Sample(
        at=time.monotonic() - began,
        rss=process.memory_info().rss,
        descriptors=process.num_fds(),
        tasks=shown["process"]["tasks"],
        gates=len(shown["gates"]),
        bindings=shown["bindings"]["open"],
    )


class Upstream:
    """llama-server on one port, killed and started again."""

    def __init__(self) -> None:
        self.port = free_port(HOST, 0)
        self.restarts = 0
        self._server: LlamaServer | None = None

    async def start(self) -> None:
        args = server_args(full_attention(), HOST, self.port, parallel=SLOTS, extra=["--threads", "1"])
        self._server = LlamaServer(patched_binary(), args, HOST, self.port, server_log(self.port))
        await self._server.start()
        await self._server.wait_ready()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def fail(self, away_seconds: float) -> None:
        """Gone in the midst of its answers, killed every other time, and back after a while."""
        assert self._server is not None
        await (self._server.stop() if self.restarts % 2 else self._server.kill())
        await asyncio.sleep(away_seconds)
        await self.start()
        self.restarts += 1


@contextlib.asynccontextmanager
async def running_upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    try:
        await upstream.start()
        yield upstream
    finally:
        await upstream.stop()


async def soak(minutes: float, seed: int, folder: Path, *, progress: bool = False) -> Soak:
    async with running_upstream() as upstream:
        config = {
            "listen": {"port": 0},
            "main": {"baseUrl": f"http://{HOST}:{upstream.port}/v1"},
            "llamaCppSlots": {"enabled": "auto"},
            "log": {"format": "json"},
        }
        _write(folder / "slotpin.json", json.dumps(config))
        with Program(folder, "serve", "--config", "slotpin.json") as program:
            traffic = Traffic(program.url, random.Random(seed))
            await _warm_up(traffic)
            if minutes >= LONG_MINUTES:
                await fill(traffic)
            began = time.monotonic()
            before = await _quiet(program, began, None)
            samples: list[Sample] = []
            async with asyncio.TaskGroup() as group:
                group.create_task(run_clients(traffic))
                faults = group.create_task(_faults(upstream, minutes))
                sampling = group.create_task(_sample(program, began, samples, progress))
                await asyncio.sleep(minutes * 60)
                await faults
                traffic.stopped.set()
                sampling.cancel()
            after = await _quiet(program, began, before)
            complaints = _complaints(program)
    return Soak(minutes, before, after, samples, dict(traffic.counts), upstream.restarts, complaints)


async def _warm_up(traffic: Traffic) -> None:
    """One client of each kind, so that what is loaded late is there."""
    traffic.stopped.set()  # each sends one request and doesn't pause
    for client in CLIENTS:
        await client(traffic)
    traffic.stopped.clear()
    traffic.counts.clear()


async def _faults(upstream: Upstream, minutes: float) -> None:
    every = min(FAULT_SECONDS, minutes * 60 / 3)
    for _ in range(int(minutes * 60 / every) - 1):
        await asyncio.sleep(every)
        await upstream.fail(min(AWAY_SECONDS, every / 5))


async def _sample(program: Program, began: float, samples: list[Sample], progress: bool) -> None:
    while True:
        samples.append(await look(program, began))
        if progress and len(samples) % 12 == 0:
            print(samples[-1], file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE_SECONDS)


async def _quiet(program: Program, began: float, before: Sample | None) -> Sample:
    """How it is without traffic: once all is as it was before, or after a while."""
    deadline = time.monotonic() + (QUIET_SECONDS if before else 6)
    while True:
        sample = await look(program, began)
        done = before is not None and (
            (sample.tasks, sample.gates, sample.bindings) <= (before.tasks, 0, 0)
            and sample.descriptors <= before.descriptors
        )
        if done or time.monotonic() > deadline:
            return sample
        await asyncio.sleep(0.5)


def _complaints(program: Program) -> list[str]:
    """Errors in slotpin's log; a server that can't be reached is none."""
    found = [] if program.process.poll() is None else [f"slotpin has ended with {program.process.returncode}"]
    for line in program.err.splitlines():
        event = json.loads(line) if line.startswith("{") else {"level": "error"}
        if event.get("level") in ("error", "critical"):
            found.append(f"log: {line[:500]}")
    return found


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def table(result: Soak) -> str:
    """Markdown."""
    before, after = result.before, result.after
    most = {name: max(getattr(sample, name) for sample in result.samples) for name in Sample.__slots__}
    lines = ["| | before | at most | afterwards |", "| --- | ---: | ---: | ---: |"]
    for name, word in _COUNTS.items():
        lines.append(f"| {word} | {getattr(before, name)} | {most[name]} | {getattr(after, name)} |")
    lines.append(f"| memory, MB | {before.rss / MB:.1f} | {most['rss'] / MB:.1f} | {after.rss / MB:.1f} |")
    lines += [
        "",
        f"Memory after the first minute: {result.warm / MB:.1f} MB, afterwards {after.rss / result.warm - 1:+.1%}.",
    ]
    lines += [f"The server was killed and started again {result.restarts} times.", ""]
    kinds = sorted({kind for kind, _ in result.counts})
    lines += ["| requests | count | what became of them |", "| --- | ---: | --- |"]
    for kind in kinds:
        became = {said: count for (each, said), count in result.counts.items() if each == kind}
        shown = ", ".join(f"{said} {count:,}" for said, count in sorted(became.items(), key=lambda item: -item[1]))
        lines.append(f"| {kind} | {sum(became.values()):,} | {shown} |")
    return "\n".join(lines)


def verdict(faults: Sequence[str]) -> str:
    return "\n".join(["Faults:", *(f"- {fault}" for fault in faults[:20])]) if faults else "Nothing is left over."


METHOD = """# Everything at once, for {minutes:g} minutes

`python -m bench.soak --minutes {minutes:g}` wrote this page on a {system} machine ({machine}, {cores} cores).

A real llama-server with slotpin's patches and a tiny model, slotpin as `slotpin serve` in auto mode, and clients of
every kind at once: growing conversations, side requests, every generating route, streamed and not, clients that leave
at every stage, and damaged requests as `bench.fuzz` sends them. Now and then the server is killed in the midst of its
answers and started again; what was under way then is broken off or answered with 502.

Before all that come more conversations than slotpin remembers, so that memory shows what is never given back, and not
what fills up once. Before and afterwards there is no traffic. Afterwards tasks, descriptors, gates and open bindings
have to be no more than before, and memory within 5 % of what it was after the first minute.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help=f"write docs/benchmarks/{PAGE.name}")
    options = parser.parse_args()
    patched_binary()  # now, since it may have to be built
    try:
        with tempfile.TemporaryDirectory(prefix="slotpin-soak-") as folder:
            result = asyncio.run(soak(options.minutes, options.seed, Path(folder), progress=True))
    except* UserError as errors:
        sys.exit(f"slotpin: {errors.exceptions[0]}")
    shown = f"{table(result)}\n\n{verdict(result.faults)}\n"
    print(shown)
    if options.write:
        facts = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
        PAGE.write_text(f"{METHOD.format(minutes=options.minutes, **facts)}\n{shown}")
    sys.exit(bool(result.faults))


if __name__ == "__main__":
    main()
