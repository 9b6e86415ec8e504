"""Damaged requests over raw sockets, against slotpin in auto mode in front of a server that answers everything.

What must not happen: an answer with a 5xx, since the server behind gives none; a request that has no answer although
it is complete; a connection that stays open after its client has finished; anything out of order towards the server;
more requests there than slotpin has answered; a traceback in slotpin's log; a gate, a binding, a task or a connection
that is left over. A side request that slotpin refuses for the time being (503) is no fault. The cases are the same for
the same `--seed`; `--case N` sends one of them and prints what went in and out. Run from the repository's root:

    python -m bench.fuzz [--requests 100000] [--seed 1] [--case N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.fuzz_cases import Case, make_case
from bench.fuzz_upstream import Upstream, running_upstream
from slotpin.pinning.reasons import EXPLANATIONS, Reason
from tests.support.program import Program

JOBS = 48
# A complete request has to be answered; for another one an answer may well not come.
ANSWER_SECONDS = 10.0
PATIENCE_SECONDS = 0.15
# After the last byte of an answer, more of the same may come.
QUIET_SECONDS = 0.03
# Where there may be several requests: a client that leaves in between may have them run without an answer.
SEVERAL_SECONDS = 3.0
CLOSE_SECONDS = 5.0
SETTLE_SECONDS = 20.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_REFUSED = re.compile(rb"HTTP/1\.1 503 [^\n]*\n(?:[^\n]+\n)*X-Slotpin-Role: compactor\r\nX-Slotpin-Reason: (\w+)\r\n")
_REFUSALS = {reason for reason, explanation in EXPLANATIONS.items() if explanation.passes} - {Reason.SLOT_BUSY}
# More than these say nothing new.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Met:
    """What a client met with. `closed`: the connection ended when it should."""

    answer: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        found = [int(status) for status in _STATUS.findall(self.answer)]
        return [status for status in found if status >= 200]

    @property
    def refused(self) -> int:
        """How often slotpin said that a side request would do damage now."""
        return sum(reason.decode() in _REFUSALS for reason in _REFUSED.findall(self.answer))


@dataclass(slots=True)
class Report:
    """`outcomes`: by kind of damage, what the first answer was, or "none"."""

    seconds: float = 0.0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, case: Case, met: Met) -> None:
        said = "refused" if met.refused else f"{met.statuses[0] // 100}xx" if met.statuses else "none"
        self.outcomes.setdefault(case.kind, Counter())[said] += 1
        if len(worst := [status for status in met.statuses if status >= 500]) > met.refused:
            self.faults.append(f"case {case.number}: answered with {worst[0]}: {met.answer[:400]!r}")
        if case.complete and not met.statuses:
            self.faults.append(f"case {case.number}: complete, but not answered")
        if not met.closed:
            self.faults.append(f"case {case.number}: still open {CLOSE_SECONDS:g} s after its client had finished")

    def table(self) -> str:
        columns = sorted({said for outcomes in self.outcomes.values() for said in outcomes})
        lines = [f"| requests | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        for kind, outcomes in sorted(self.outcomes.items()):
            lines.append(f"| {kind} | {' | '.join(f'{outcomes[said]:,}' for said in columns)} |")
        return "\n".join(lines)


async def send(port: int, case: Case) -> Met:
    """Send it, read what comes, finish, and see that the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    answer = bytearray()
    try:
        with contextlib.suppress(OSError):  # reset, or closed in the very moment
            writer.write(case.raw)
            several = case.raw.count(b" HTTP/1") > 1
            patience = ANSWER_SECONDS if case.complete else SEVERAL_SECONDS if several else PATIENCE_SECONDS
            quiet = SEVERAL_SECONDS if several else QUIET_SECONDS
            while piece := await _read(reader, patience):
                answer += piece
                patience = quiet if _answered(answer) else ANSWER_SECONDS
            writer.write_eof()
        closed = await _ends(reader, answer)
    finally:
        writer.transport.abort()
    return Met(bytes(answer), closed)


def _answered(answer: bytearray) -> bool:
    return any(int(status) >= 200 for status in _STATUS.findall(answer))


async def _read(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Empty at the end, and where nothing comes."""
    try:
        async with asyncio.timeout(seconds):
            return await reader.read(65536)
    except TimeoutError:
        return b""


async def _ends(reader: asyncio.StreamReader, answer: bytearray) -> bool:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            while piece := await reader.read(65536):
                answer += piece
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


async def fuzz(requests: int, seed: int, folder: Path, *, progress: bool = False) -> Report:
    report = Report()
    async with running_upstream() as upstream:
        with slotpin(upstream, folder) as program:
            port = int(program.url.rpartition(":")[2])
            before = await status(program.url)
            since = time.monotonic()
            numbers = iter(range(requests))

            async def work() -> None:
                for number in numbers:
                    case = make_case(number, seed)
                    met = await send(port, case)
                    report.note(case, met)
                    _compare(report, upstream, case, met)
                    if progress and number % 5000 == 0:
                        print(f"{number:,} sent, {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)

            async with asyncio.TaskGroup() as group:
                for _ in range(JOBS):
                    group.create_task(work())
            report.seconds = time.monotonic() - since
            report.faults += [f"towards the server: {fault}" for fault in upstream.faults]
            report.faults += await left_over(program.url, before)
            report.faults += complaints(program)
    return report


def _compare(report: Report, upstream: Upstream, case: Case, met: Met) -> None:
    """Each request that the server has seen was one to slotpin too. One may have lost its client before its answer."""
    seen = upstream.seen.pop(case.number, 0)
    if seen > max(1, len(met.statuses)):
        report.faults.append(f"case {case.number}: {seen} requests at the server, answers {met.statuses}")


def slotpin(upstream: Upstream, folder: Path) -> Program:
    """As a user starts it, in auto mode."""
    config = {
        "listen": {"port": 0},
        "main": {"baseUrl": f"http://127.0.0.1:{upstream.port}/v1"},
        "llamaCppSlots": {"enabled": "auto"},
        "log": {"format": "json"},
    }
    (folder / "slotpin.json").write_text(json.dumps(config))
    return Program(folder, "serve", "--config", "slotpin.json")


async def status(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/slotpin/status") as answer:
        found: dict[str, Any] = await answer.json()
    return found


async def left_over(url: str, before: dict[str, Any]) -> list[str]:
    """What is still there of the requests after a while of quiet."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        shown = await status(url)
        left = [f"left over: gate {gate}" for gate in shown["gates"]]
        if shown["bindings"]["open"]:
            left.append(f"left over: {shown['bindings']['open']} open bindings")
        for what, count in shown.get("process", {}).items():
            if what in ("tasks", "connections") and count > before["process"][what]:
                left.append(f"left over: {count} {what}, {before['process'][what]} before")
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.5)


def complaints(program: Program) -> list[str]:
    """Tracebacks, errors, and anything that isn't an event of the log."""
    found = [] if program.process.poll() is None else [f"slotpin has ended with {program.process.returncode}"]
    for line in program.err.splitlines():
        event = json.loads(line) if line.startswith("{") else {"event": line, "level": "error"}
        if event.get("level") in ("error", "critical") or "exception" in event:
            found.append(f"log: {line[:2000]}")
    return found


async def show(number: int, seed: int, folder: Path) -> None:
    """One case, in and out."""
    case = make_case(number, seed)
    print(f"{case.kind}, complete: {case.complete}\n{case.raw[:4000]!r}\n")
    async with running_upstream() as upstream:
        with slotpin(upstream, folder) as program:
            met = await send(int(program.url.rpartition(":")[2]), case)
            print(f"closed: {met.closed}, at the server: {dict(upstream.seen)} {upstream.faults}\n{met.answer!r}\n")
            print(program.err)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--case", type=int, metavar="N", help="send this one alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotpin-fuzz-") as folder:
        if options.case is not None:
            asyncio.run(show(options.case, options.seed, Path(folder)))
            return
        report = asyncio.run(fuzz(options.requests, options.seed, Path(folder), progress=True))
    print(f"{options.requests:,} requests, seed {options.seed}, {report.seconds:.0f} s\n\n{report.table()}\n")
    for fault in report.faults[:_SHOWN]:
        print(fault)
    print(f"{len(report.faults)} faults")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
