"""Speed of the patched llama-server with `--slot-initial-ctx` against the stock one.

Both servers run side by side, one request at a time, in turn: a fresh prompt and a short answer on each, so that a
pair shares whatever else the machine does. The times are the servers' own (`timings.prompt_ms`, `predicted_ms`), the
ratio is patched / stock within a pair, and the figure is the median over the pairs; the spread is the quartiles. Time
to ready is from the start of the process to the first 200 of /health. Run from the repository's root:

    python -m bench.lazy_speed [--pairs N] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import psutil

from bench.lazy_kv import HEAVY, INITIAL
from slotpin.llama.build import BuildOptions, build_server
from slotpin.llama.model import default_model
from tests.support.llama import running_server
from tests.support.tiny_model import tiny_model

PROMPT_TOKENS = 1500
DECODED_TOKENS = 96
STARTS = 5
FLAGS = ("--parallel", "2", "--ctx-size", "16384", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
LAZY = ("--slot-initial-ctx", str(INITIAL))


async def timings(session: aiohttp.ClientSession, seed: int) -> tuple[float, float]:
    """Milliseconds of prompt evaluation and of decode, of one request with a prompt that no slot holds."""
    prompt = [1000 + (seed * 7919 + number * 17) % 20000 for number in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "n_predict": DECODED_TOKENS, "ignore_eos": True, "id_slot": 0, "temperature": 0}
    async with session.post("/completion", json=body) as answer:
        answer.raise_for_status()
        figures = (await answer.json())["timings"]
    if figures["prompt_n"] != PROMPT_TOKENS:
        raise SystemExit(f"{figures['prompt_n']} tokens evaluated, not {PROMPT_TOKENS}")
    return figures["prompt_ms"], figures["predicted_ms"]


async def pairs(model: Path, attention: str, binaries: Sequence[Path], count: int) -> list[tuple[float, float]]:
    """Patched / stock of `count` pairs: prompt evaluation, decode."""
    flags = (*FLAGS, "--flash-attn", attention)
    async with (
        running_server(model, *flags, binary=binaries[0]) as stock,
        running_server(model, *flags, *LAZY, binary=binaries[1]) as patched,
        aiohttp.ClientSession(stock.base_url, timeout=aiohttp.ClientTimeout(600)) as to_stock,
        aiohttp.ClientSession(patched.base_url, timeout=aiohttp.ClientTimeout(600)) as to_patched,
    ):
        ratios = []
        for seed in range(-1, count):
            # Who goes first alternates, and the first pair only warms up.
            order = (to_stock, to_patched) if seed % 2 else (to_patched, to_stock)
            figures = {id(session): await timings(session, seed + 1) for session in order}
            mine, theirs = figures[id(to_patched)], figures[id(to_stock)]
            if seed >= 0:
                ratios.append((mine[0] / theirs[0], mine[1] / theirs[1]))
        return ratios


async def seconds_to_ready(model: Path, binary: Path, *flags: str) -> float:
    started = time.perf_counter()
    async with running_server(model, *FLAGS, *flags, binary=binary):
        return time.perf_counter() - started


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21, metavar="N")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into a Markdown file")
    options = parser.parse_args()
    report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    binaries = (build_server(BuildOptions(patches="none"), report).path, build_server(BuildOptions(), report).path)
    models = (default_model(report), tiny_model(HEAVY))
    lines = ["| model | flash attention | prompt evaluation | decode |", "| --- | --- | ---: | ---: |"]
    for model in models:
        for attention in ("on", "off"):
            ratios = asyncio.run(pairs(model, attention, binaries, options.pairs))
            prompt, decode = zip(*ratios, strict=True)
            lines.append(f"| {model.stem} | {attention} | {spread(prompt)} | {spread(decode)} |")
            print(lines[-1], flush=True)
    lines += ["", "| model | ready, stock | ready, patched |", "| --- | ---: | ---: |"]
    for model in models:
        starts = [
            (
                asyncio.run(seconds_to_ready(model, binaries[0])),
                asyncio.run(seconds_to_ready(model, binaries[1], *LAZY)),
            )
            for _ in range(STARTS)
        ]
        stock, patched = (statistics.median(times) for times in zip(*starts, strict=True))
        lines.append(f"| {model.stem} | {stock:.2f} s | {patched:.2f} s |")
        print(lines[-1], flush=True)
    if options.write is not None:
        options.write.write_text(page(lines, options.pairs))


def page(lines: Sequence[str], count: int) -> str:
    head = (
        "# Speed, stock against patched\n\n"
        f"`python -m bench.lazy_speed --pairs {count}` wrote this on a {platform.system()} machine\n"
        f"({platform.machine()}, {psutil.cpu_count()} cores). Ratios are patched with `--slot-initial-ctx {INITIAL}` / "
        "stock, the median over\nthe pairs and its quartiles: below 1 the patched server is faster. Time to ready is "
        f"the median of {STARTS} starts\nwith 16,384 tokens of context. How it is measured stands at the head of "
        "`bench/lazy_speed.py`.\n\n"
    )
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
