"""What a side request costs the next turn: prompt tokens evaluated, without slotpin and through it.

A conversation of about 4,300 tokens and, after each of its turns, a side request that shares its system prompt. The
server is the real one with two slots and no host-memory cache, started anew for each column. The counters are the
server's own (`timings.prompt_n`, `timings.cache_n`). Run from the repository's root:

    python -m bench.side_request [--model FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from slotpin.config import Compactor, CustomRecogniser, Listen, LlamaCppSlots, Main, Recognisers, Settings
from slotpin.observe import log
from slotpin.proxy.app import Proxy
from tests.support.llama import running_server
from tests.support.tiny_model import full_attention

FLAGS = ("--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
CONTEXT = 16384
FOLLOW_UPS = 2
SYSTEM = " ".join(f"Rule {number}: keep the answer short and to the point." for number in range(60))
OPENING = " ".join(f"Line {number} of the file reads as follows: value {number * 7}." for number in range(200))
SIDE = "Summarise in one line what the following note says. " + "It rained and the train was late. " * 20


@dataclass(frozen=True, slots=True)
class Turn:
    name: str
    evaluated: int
    reused: int


@contextlib.asynccontextmanager
async def through_slotpin(server_url: str, *rules: CustomRecogniser) -> AsyncIterator[str]:
    """The URL of a proxy in automatic mode."""
    base_url = f"{server_url}/v1"
    settings = Settings(
        listen=Listen(port=0),
        main=Main(base_url=base_url),
        compactor=Compactor(base_url=base_url),
        llama_cpp_slots=LlamaCppSlots(enabled="auto"),
        recognisers=Recognisers(custom=rules),
    )
    proxy = Proxy(settings, log.get())
    await proxy.start()
    try:
        yield proxy.url
    finally:
        await proxy.stop()


async def conversation(main_url: str, side_url: str) -> list[Turn]:
    """A first turn, then side request and follow-up as often as FOLLOW_UPS says."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": OPENING}]
    turns = []
    async with aiohttp.ClientSession() as session:
        answer, turn = await _chat(session, main_url, messages, "first turn")
        turns.append(turn)
        for number in range(1, FOLLOW_UPS + 1):
            side = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}. {SIDE}"}]
            turns.append((await _chat(session, side_url, side, f"side request {number}"))[1])
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"And what does line {number} say?"},
            ]
            answer, turn = await _chat(session, main_url, messages, f"follow-up {number}")
            turns.append(turn)
    return turns


async def _chat(
    session: aiohttp.ClientSession, base_url: str, messages: list[dict[str, str]], name: str
) -> tuple[str, Turn]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "grammar": 'root ::= "ok " [a-z]{3,9}'}
    async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
    if response.status != 200:
        raise SystemExit(f"{name}: {response.status} {answer}")
    timings = answer["timings"]
    print(f"  {name}: {timings['prompt_n']} evaluated, {timings['cache_n']} re-used", file=sys.stderr, flush=True)
    text: str = answer["choices"][0]["message"]["content"]
    return text, Turn(name, timings["prompt_n"], timings["cache_n"])


async def measure(model: Path) -> tuple[list[Turn], list[Turn]]:
    print("without slotpin", file=sys.stderr)
    async with running_server(model, "--parallel", "2", "--ctx-size", str(CONTEXT), *FLAGS) as server:
        without = await conversation(server.base_url, server.base_url)
    print("through slotpin", file=sys.stderr)
    async with (
        running_server(model, "--parallel", "2", "--ctx-size", str(CONTEXT), *FLAGS) as server,
        through_slotpin(server.base_url) as url,
    ):
        through = await conversation(url, f"{url}/compactor")
    return without, through


def table(without: list[Turn], through: list[Turn]) -> str:
    head = f"{'prompt tokens evaluated':<26}{'without slotpin':>18}{'through slotpin':>18}"
    rows = [f"{a.name:<26}{a.evaluated:>18,}{b.evaluated:>18,}" for a, b in zip(without, through, strict=True)]
    lost, kept = follow_ups(without), follow_ups(through)
    total = f"{f'all {FOLLOW_UPS} follow-ups':<26}{lost:>18,}{kept:>18,}"
    return "\n".join([head, *rows, total, f"{lost / kept:.0f} times fewer tokens on the user's own turns"])


def follow_ups(turns: list[Turn]) -> int:
    return sum(turn.evaluated for turn in turns if turn.name.startswith("follow-up"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a tiny random model made for the tests)")
    model = parser.parse_args().model or full_attention()
    log.configure("auto", "warning")
    without, through = asyncio.run(measure(model))
    print(f"\nllama-server --parallel 2 --ctx-size {CONTEXT} {' '.join(FLAGS)}, {model.name}\n")
    print(table(without, through))


if __name__ == "__main__":
    main()
