"""What a proxy costs: slotpin, nginx, HAProxy and others in front of one stub, under one load.

The stub upstream and the load client are C on epoll, and neither is the bottleneck: they have one core, the targets
another. All targets run at the same time and are measured in turn within each round; a figure is the median of the
rounds. What a proxy adds is its figure less the one of the same round without a proxy. slotpin runs as a user starts
it, once with `llamaCppSlots.enabled` "auto", each connection a session with a slot of its own, and once with pinning
off. Run from the repository's root:

    python -m bench.proxy [--quick] [--only small,streams] [--targets direct,slotpin,nginx] [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.load import program, run_load, running_stub, wire
from bench.proxy_measures import MANY_SLOTS, MEASURES, Bench, chat
from bench.proxy_page import Results, goals, tables
from bench.proxy_targets import CHAT, ONE_SLOT, SLOW, TARGETS, Target, running_target, version
from slotpin.errors import UserError
from tests.support.debian import UnavailableError

PAGE = Path(__file__).parents[1] / "docs/benchmarks/proxy.md"
# Enough for every session of a run, so that nobody waits at a gate.
SLOTS, SLOTS_FOR_MANY = 72, 1300
ROUNDS, QUICK_ROUNDS, SLOW_ROUNDS = 5, 2, 2
QUICK_SCALE = 0.3
METHOD = """# What a proxy costs

`python -m bench.proxy{options}` wrote this page.

- machine: {machine}
- measured: {versions}
- rounds: {rounds}; the load average before they began: {load}

Everything runs on this one machine over loopback: a stub in llama-server's place and a load client, both in C on epoll
(`bench/load/`) and on one core; the targets are on another. The targets are measured in turn within each round; figures
are medians of the rounds. What a target adds is its figure less that of the same round without a proxy, which stands
in brackets; a good part of it is the time that it takes to wake another core, twice each way. CPU is of the target's
processes alone, from the scheduler's count. Differences under 20 % are noise, and absolute figures belong to the
machine: look at the ratios.

slotpin runs as `slotpin serve` with the default log. "slotpin" is in auto mode: each connection is a session with a
slot of its own, no request waits at a gate, and every answer is one that was pinned. In "slotpin-off" pinning is off.
nginx (one process, `proxy_buffering off`, `proxy_request_buffering off`, kept connections, no log) and HAProxy (one
thread, `option abortonclose`, `option http-no-delay`, `http-reuse always`, no log) read and change nothing of the
body. naive is `bench/naive.py`: aiohttp on both sides, the body decoded, changed, and encoded. bare is `bench/bare.py`:
uvloop passes bytes on and understands none of them; no proxy on a Python event loop can take less. LiteLLM and
hearth-llm are measured in {slow} rounds and with 16 connections at most.

A stream's chunk carries the time when it was made; its delay is how old it is when it arrives. The stub sends each with
a call of its own. A large body is one chat request with many messages; "role from the path" means `/main/v1/…` for
slotpin and nothing else for the others. Peak memory is the most that was resident in the first round, less what the
fresh process had after twenty short requests.
"""


async def measure_all(
    measures: Sequence[str], targets: Sequence[str], rounds: int, scale: float, results: Results
) -> None:
    for many in (False, True):
        chosen = [measure for measure in measures if (measure in MANY_SLOTS) is many]
        if not chosen:
            continue
        slots = SLOTS_FOR_MANY if many else SLOTS
        with tempfile.TemporaryDirectory(prefix="slotpin-bench-") as name:
            folder = Path(name)
            with running_stub(slots, folder) as stub, running_stub(1, folder) as small_stub:
                stubs = {target: small_stub if target in ONE_SLOT else stub for target in targets}
                for measure in chosen:
                    await measure_one(Bench(folder, scale), measure, stubs, rounds, folder, results)


async def measure_one(
    bench: Bench, measure: str, stubs: Mapping[str, int], rounds: int, folder: Path, results: Results
) -> None:
    """All rounds of one measure, with targets that are started for it. `stubs`: the port behind each of them."""
    async with contextlib.AsyncExitStack() as stack:
        running: list[Target] = []
        cores = share_cores()
        for name, stub in stubs.items():
            if name in results.missing:
                continue
            try:
                own = folder / f"{name}-{measure}"
                target = await stack.enter_async_context(running_target(name, stub, own, cores))
                await warm_up(target, folder)
                running.append(target)
            except (UnavailableError, UserError) as problem:
                results.missing[name] = str(problem)
        for number in range(rounds):
            for target in running:
                failed = (target.name, measure) in results.failed
                if not failed and (number < SLOW_ROUNDS or target.name not in SLOW):
                    await measure_round(bench, measure, target, results)
                    print(f"round {number + 1} of {rounds}: {measure}, {target.name}", file=sys.stderr, flush=True)
        for target in running:
            if target.name == "slotpin" and (reason := await what_was_not_pinned(target)):
                results.failed[target.name, measure] = reason


async def measure_round(bench: Bench, measure: str, target: Target, results: Results) -> None:
    try:
        results.add(measure, target.name, await MEASURES[measure](bench, target))
    except UserError as problem:
        results.failed[target.name, measure] = str(problem)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as problem:
        results.failed[target.name, measure] = f"no answer ({type(problem).__name__})"


async def what_was_not_pinned(target: Target) -> str:
    """Figures of requests that were not pinned are none of pinning."""
    async with wire(target.port) as client:
        decisions = json.loads(await client.get("/slotpin/status"))["decisions"]
    others = {each["reason"]: each["count"] for each in decisions if each["reason"] != "pinned"}
    return f"not everything was pinned: {others}" if others else ""


async def warm_up(target: Target, folder: Path) -> None:
    """A few requests, so that everything is loaded; raises UserError where they are not answered."""
    body = folder / "warm-up.json"
    body.write_bytes(chat(""))
    if target.name == "slotpin":
        await see_it_pins(target)
    await run_load(target.port, CHAT, body, connections=1, seconds=20, requests=20, session="warm-up")
    target.fresh_rss = target.rss()


async def see_it_pins(target: Target) -> None:
    async with wire(target.port) as client:
        client.post(CHAT, chat(""), "warm-up")
        head = await client.reader.readuntil(b"\r\n\r\n")
    if b"X-Slotpin-Reason: pinned\r\n" not in head:
        raise UserError(f"slotpin doesn't pin: {head.decode()}", exit_code=1)


def share_cores() -> set[int]:
    """Keep the first core for this process and the stub and load clients to come; the others are for the targets.

    Without that they share a core in one run and not in the next, as the scheduler likes, and waking another core takes
    longer than all that is measured.
    """
    first, *others = sorted(_CORES)
    os.sched_setaffinity(0, {first})
    return set(others[:1]) or {first}


_CORES = os.sched_getaffinity(0)


def machine() -> str:
    model = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{platform.system()} {platform.release().split('-')[0]} ({platform.machine()}, {os.cpu_count()} cores"
        f"{f', {model}' if model else ''}, {memory:.0f} GiB), Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} short rounds")
    parser.add_argument("--only", default=",".join(MEASURES), metavar="MEASURES", help="default: %(default)s")
    parser.add_argument("--targets", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--write", action="store_true", help=f"write docs/benchmarks/{PAGE.name}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the rounds' figures into a file")
    options = parser.parse_args()
    measures, targets = options.only.split(","), ["direct", *options.targets.split(",")]
    targets = list(dict.fromkeys(targets))
    if unknown := [*(set(measures) - set(MEASURES)), *(set(targets) - set(TARGETS))]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join([*MEASURES, *TARGETS])}")
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    raise_limit()
    load = f"{os.getloadavg()[0]:.1f}"
    results = Results()
    try:
        for each in ("stub", "load"):
            program(each)
        asyncio.run(measure_all(measures, targets, rounds, QUICK_SCALE if options.quick else 1.0, results))
    except UserError as problem:
        sys.exit(f"bench: {problem}")
    shown = "\n".join([goals(results), tables(results, measures, targets)])
    print(shown)
    if options.json:
        options.json.write_text(json.dumps({"rounds": results.rounds, "missing": results.missing}, indent=1) + "\n")
    if options.write:
        versions = ", ".join(
            version(name) for name in targets if name not in ("direct", "slotpin-off", *results.missing)
        )
        chosen = {name: getattr(options, name) for name in ("only", "targets", "rounds")}
        words = " --quick" * options.quick
        words += "".join(f" --{name} {value}" for name, value in chosen.items() if value != parser.get_default(name))
        method = METHOD.format(
            options=words, machine=machine(), rounds=rounds, load=load, versions=versions, slow=min(rounds, SLOW_ROUNDS)
        )
        PAGE.write_text(f"{method}\n{shown}")


def raise_limit() -> None:
    """A thousand streams need two thousand descriptors in each proxy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
