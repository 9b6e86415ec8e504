"""0003: a request pinned to a running slot leaves that slot alone, and is served when the slot is free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.patches import patched_binary, stock_binary
from tests.patches.client import Answer, Client, ServerError, completion, llama_server, prompt, run, until
from tests.support.tiny_model import full_attention, sliding_window

LONG, SHORT = 1000, 8
FLAGS = ("--metrics", "--ctx-size", "8192")


async def alone(client: Client, seed: int, n_predict: int) -> tuple[int, ...]:
    """The answer when nothing else runs and nothing is cached."""
    return (await client.complete(prompt(seed, 300), 1, n_predict, cache_prompt=False)).tokens


async def overlapping(client: Client, running: int, waiting: int) -> tuple[Answer | BaseException, ...]:
    """The answers to two requests for slot 0, when the second arrives while the first generates."""
    started = asyncio.Event()
    first = asyncio.create_task(client.stream(completion(prompt(running, 300), 0, LONG), started))
    await started.wait()
    second = asyncio.create_task(client.complete(prompt(waiting, 300), 0, SHORT))

    async def deferred() -> bool:
        return second.done() or await client.deferred() == 1

    await until(deferred, "the second request waits")
    assert not second.done() or second.exception(), "it was answered while the slot was running"
    return tuple(await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 30))


async def both_right(binary: Path, model: Path, rounds: int) -> list[bool]:
    """For each round: whether both answers are those of runs alone."""
    async with llama_server(binary, model, *FLAGS) as client:
        results = []
        for seed in range(0, 2 * rounds, 2):
            running, waiting = seed, seed + 1
            expected = await alone(client, running, LONG), await alone(client, waiting, SHORT)
            # The second prompt goes to slot 0 first, so that the first one moves it to the host-memory cache.
            await client.complete(prompt(waiting, 300), 0)
            answers = await overlapping(client, running, waiting)
            results.append(expected == tuple(a.tokens for a in answers if isinstance(a, Answer)))
        return results


@pytest.mark.parametrize("model", [full_attention, sliding_window])
def test_both_answers_are_those_of_runs_alone(model: object) -> None:
    async def proof() -> None:
        assert callable(model)
        assert await both_right(patched_binary(), model(), rounds=5) == [True] * 5

    run(proof())


def test_stock_server_spoils_an_answer() -> None:
    async def proof() -> None:
        try:
            right = await both_right(stock_binary(), full_attention(), rounds=1)
        except (TimeoutError, ServerError):
            return  # the slot spins, or the server is gone
        assert right == [False]

    run(proof())
