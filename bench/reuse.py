"""Prompt tokens that a llama-server evaluates: used directly, pinned naively, and through slotpin.

A matrix of server flags and kinds of traffic, on tiny models. Every figure is of a server that was started for it, the
stock one, and is the sum of that server's own counters (`timings.prompt_n`) over three turns and what goes on between
them. Direct: no proxy, no `id_slot`. Naive: no proxy, `id_slot` 0 for the conversations, 1 for every side request and
for the sub-agent, and `cache_prompt`. slotpin: the proxy in auto mode. A row is ok when slotpin's main tokens are at
most those of the better of the other two plus 2 %, and its main and side tokens together at most 1.1 times those of
the better of the other two. Ends with 1 if a row falls short. Run from the repository's root:

    python -m bench.reuse [--quick] [--only 'full/default/*' …] [--verbose] [--write FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from pydantic import SecretStr

from bench.reuse_traffic import COMPACTOR_KEY, TRAFFICS, Kind, Message
from bench.side_request import through_slotpin
from slotpin.config import CustomRecogniser
from slotpin.errors import UserError
from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer, free_port
from slotpin.observe import log
from tests.support.llama import HOST, stock_binary
from tests.support.tiny_model import full_attention, sliding_window

# Large enough that a slot of `-np 4` holds a conversation.
CONTEXT = 32768
ANSWER = 8
SECONDS = 120
KEEP = ("-np", "2", "-kvu", "--no-cache-idle-slots")
FLAGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "np2": ("-np", "2"),
    "np2-kvu": ("-np", "2", "-kvu"),
    "keep": KEEP,
    "keep-ram0": (*KEEP, "--cache-ram", "0"),
    "keep-ram1": (*KEEP, "--cache-ram", "1"),
    "np1": ("-np", "1"),
    "np4": ("-np", "4"),
}
MODELS: dict[str, tuple[str, Callable[[], Path]]] = {
    "full": ("Full attention", full_attention),
    "window": ("Sliding window", sliding_window),
}
COMPACTOR = CustomRecogniser(name="compactor-key", api_key=SecretStr(COMPACTOR_KEY), on_unsafe="pass")
WAYS = ("direct", "naive", "slotpin")
QUICK = tuple(f"full/{flags}/*" for flags in ("default", "np2", "keep", "keep-ram0"))
METHOD = """# Prompt tokens evaluated: direct, pinned naively, through slotpin

`python -m bench.reuse` wrote this page, verdicts included. Each figure is the number of prompt tokens that a stock
llama-server, started for it, evaluated by its own count (`timings.prompt_n`) in a whole run: a conversation of about
4,000 tokens with two follow-ups of about 50 (main tokens), and what goes on between them (side tokens). Two
conversations in turn are all main tokens. The models are tiny and random, the requests are built like those of real
clients and sent one after the other. Nothing here is a time. A run repeats its counts on the same machine; on another
one the random models may answer with other words, which can move a count by a few tokens.

Direct: without `id_slot`. Naive: `id_slot` 0 for conversations, 1 for side requests and the sub-agent, whose tokens
count as side tokens. slotpin: the proxy in auto mode. A row is ok when slotpin's main tokens are at most the lower of
the two others plus 2 %, and its main and side tokens together at most 1.1 times the lower of the two others' sums;
otherwise it says by how many tokens slotpin lies above that lower one. Side requests that slotpin refused evaluate
nothing; they are named.

Two conversations in turn have a slot each through slotpin, and the opening that they share is evaluated for each of
them, once. Naive pinning puts both into one slot, where the second finds that opening: cheaper as long as host memory
brings either back at every change, and three times as dear where it can't (`--cache-ram 0`). slotpin can't know
which, so it keeps them apart, as llama-server by itself does.
"""
MAIN_TOLERANCE = 1.02
SUM_TOLERANCE = 1.1


@dataclass(slots=True)
class Evaluated:
    """Prompt tokens of one run; `refused` counts the side requests that slotpin has refused."""

    main: int = 0
    side: int = 0
    refused: int = 0

    @property
    def both(self) -> int:
        return self.main + self.side


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    flags: str
    traffic: str
    direct: Evaluated
    naive: Evaluated
    slotpin: Evaluated

    @property
    def shortfalls(self) -> list[str]:
        main = min(self.direct.main, self.naive.main)
        both = min(self.direct.both, self.naive.both)
        found = [
            _over("main", self.slotpin.main, main, MAIN_TOLERANCE),
            _over("main and side", self.slotpin.both, both, SUM_TOLERANCE),
        ]
        return [shortfall for shortfall in found if shortfall]

    @property
    def verdict(self) -> str:
        refused = [f"{self.slotpin.refused} refused"] if self.slotpin.refused else []
        return ", ".join([*(self.shortfalls or ["ok"]), *refused])


def _over(what: str, tokens: int, best: int, tolerance: float) -> str:
    return f"{what} {tokens - best:+,} ({tokens / best:.2f} times)" if tokens > best * tolerance else ""


class Sender:
    """Sends requests one way and counts what they cost."""

    def __init__(self, session: aiohttp.ClientSession, url: str, cell: str, pins: bool, verbose: bool) -> None:
        self.evaluated = Evaluated()
        self._session, self._url, self._cell, self._pins, self._verbose = session, url, cell, pins, verbose

    async def send(self, messages: list[Message], kind: Kind, api_key: str = "sk-local") -> str:
        body = {"model": "local", "messages": messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        # The user watches the main answers come.
        body["stream"] = kind is Kind.MAIN
        if self._pins:
            body |= {"id_slot": 0 if kind is Kind.MAIN else 1, "cache_prompt": True}
        headers = {"Authorization": f"Bearer {api_key}"}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            reason = response.headers.get("X-Slotpin-Reason", "")
        if response.status != 200:
            return self._refused(kind, response.status, text)
        answer, evaluated, reused = read_answer(text)
        if kind is Kind.MAIN:
            self.evaluated.main += evaluated
        else:
            self.evaluated.side += evaluated
        self._say(f"{kind.value}: {evaluated} evaluated, {reused} re-used {reason}")
        return answer

    def _refused(self, kind: Kind, status: int, text: str) -> str:
        if kind is Kind.MAIN or '"slotpin:' not in text:
            raise SystemExit(f"{self._cell}: a {kind.value} request was answered with {status}: {text}")
        self.evaluated.refused += 1
        self._say(f"{kind.value}: refused, {text}")
        return ""

    def _say(self, line: str) -> None:
        if self._verbose:
            print(f"{self._cell}: {line}", file=sys.stderr, flush=True)


def read_answer(body: str) -> tuple[str, int, int]:
    """Text, prompt tokens evaluated and prompt tokens re-used, of a chat answer, streamed or not."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")] or [body]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    text = "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)
    timings = next(event["timings"] for event in reversed(events) if "timings" in event)
    return text, timings["prompt_n"], timings["cache_n"]


@contextlib.asynccontextmanager
async def llama_server(model: Path, flags: Sequence[str]) -> AsyncIterator[str]:
    """Its URL. No flags but what is asked for, the context's size, and one thread: that changes no counter."""
    port = free_port(HOST, 0)
    args = ["--model", str(model), "--host", HOST, "--port", str(port), "--ctx-size", str(CONTEXT), "--threads", "1"]
    server = LlamaServer(stock_binary(), [*args, *flags], HOST, port, server_log(port))
    try:
        await server.start()
        await server.wait_ready()
        yield server.base_url
    finally:
        await server.stop()


async def measure(model: str, flags: str, traffic: str, way: str, verbose: bool) -> Evaluated:
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(llama_server(MODELS[model][1](), FLAGS[flags]))
        if way == "slotpin":
            url = await stack.enter_async_context(through_slotpin(url, COMPACTOR))
        # The server closes a connection after a streamed answer.
        connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        sender = Sender(session, url, f"{model}/{flags}/{traffic} {way}", way == "naive", verbose)
        await TRAFFICS[traffic][1](sender.send)
    return sender.evaluated


async def measure_row(name: str, turns: asyncio.Semaphore, verbose: bool) -> Row:
    model, flags, traffic = name.split("/")
    async with turns:
        direct, naive, slotpin = [await measure(model, flags, traffic, way, verbose) for way in WAYS]
    return Row(model, flags, traffic, direct, naive, slotpin)


async def measure_all(names: Sequence[str], jobs: int, verbose: bool) -> list[Row]:
    """The rows in the order of `names`; each is printed as soon as it and those before it are there."""
    turns = asyncio.Semaphore(jobs)
    rows: list[Row] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(measure_row(name, turns, verbose)) for name in names]
        for task in tasks:
            row = await task
            if not rows or rows[-1].model != row.model:
                print("\n".join(["", *head(row.model)]))
            print(line(row), flush=True)
            rows.append(row)
    return rows


def head(model: str) -> list[str]:
    columns = ["server flags", "traffic", *(f"{way}, main + side" for way in WAYS), "verdict"]
    return [f"## {MODELS[model][0]}", "", f"| {' | '.join(columns)} |", "| --- | --- | ---: | ---: | ---: | --- |"]


def line(row: Row) -> str:
    flags = f"`{' '.join(FLAGS[row.flags])}`" if FLAGS[row.flags] else "default flags"
    figures = [f"{way.main:,} + {way.side:,}" for way in (row.direct, row.naive, row.slotpin)]
    return f"| {' | '.join([flags, TRAFFICS[row.traffic][0], *figures, row.verdict])} |"


def summary(rows: Sequence[Row]) -> str:
    fine = sum(not row.shortfalls for row in rows)
    refused = sum(row.slotpin.refused for row in rows)
    direct, naive, slotpin = (sum(getattr(row, way).main for row in rows) for way in WAYS)
    best = sum(min(row.direct.main, row.naive.main) for row in rows)
    return (
        f"{fine} of {len(rows)} rows ok, {refused} side requests refused. Main tokens of all rows: {direct:,} direct, "
        f"{naive:,} naive, {slotpin:,} slotpin; {best:,} if each row had the better of the first two."
    )


def page(rows: Sequence[Row]) -> str:
    sections = []
    for model in dict.fromkeys(row.model for row in rows):
        sections += [*head(model), *(line(row) for row in rows if row.model == model), ""]
    return "\n".join([METHOD, *sections, summary(rows), ""])


def chosen(patterns: Sequence[str]) -> list[str]:
    names = [f"{model}/{flags}/{traffic}" for model in MODELS for flags in FLAGS for traffic in TRAFFICS]
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, four sets of flags")
    parser.add_argument(
        *("--only", "-o"),
        nargs="+",
        metavar="PATTERN",
        help=f"rows by name, MODEL/FLAGS/TRAFFIC: {', '.join(MODELS)} / {', '.join(FLAGS)} / {', '.join(TRAFFICS)}",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="servers that run at a time (default: 2)")
    parser.add_argument("--verbose", action="store_true", help="one at a time, with every request and slotpin's log")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into a Markdown file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into a JSON file")
    options = parser.parse_args()
    names = chosen(options.only or (QUICK if options.quick else ("*",)))
    if not names:
        parser.error(f"no row is named like {' or '.join(options.only)}")
    log.configure("auto", "info" if options.verbose else "error")
    stock_binary()  # now, since it may have to be built
    try:
        rows = asyncio.run(measure_all(names, 1 if options.verbose else options.jobs, options.verbose))
    except* UserError as errors:
        sys.exit(f"slotpin: {errors.exceptions[0]}")
    print(f"\n{summary(rows)}")
    if options.write:
        options.write.write_text(page(rows))
    if options.json:
        cells = [asdict(row) | {"verdict": row.verdict, "ok": not row.shortfalls} for row in rows]
        options.json.write_text(json.dumps(cells, indent=1) + "\n")
    sys.exit(any(row.shortfalls for row in rows))


if __name__ == "__main__":
    main()
