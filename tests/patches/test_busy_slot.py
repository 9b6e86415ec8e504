"""0003: a request pinned to a running slot leaves that slot alone, and is served when the slot is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patches.client import Answer, Client, ServerError, completion, llama_server, prompt, run, until
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import full_attention, sliding_window

LONG, SHORT = 500, 8
FLAGS = ("--metrics", "--parallel", "1", "--ctx-size", "4096")
ATTEMPTS = 5
SPIN_SECONDS = 30.0

Tokens = tuple[int, ...]


async def prime(client: Client, waiting: list[int]) -> None:
    """Evaluate a prompt that the next one will move to the host-memory cache."""
    await client.complete(waiting, 0)


async def one_after_the_other(client: Client, running: list[int], waiting: list[int]) -> tuple[Tokens, Tokens]:
    await prime(client, waiting)
    first = await client.complete(running, 0, LONG)
    second = await client.complete(waiting, 0, SHORT)
    return first.tokens, second.tokens


async def overlapping(client: Client, running: list[int], waiting: list[int]) -> tuple[Tokens, Tokens] | None:
    """The same answers when the second request arrives while the first generates; None if it came too late.

    Raises ServerError if one fails or is not there in time.
    """
    await prime(client, waiting)
    started = asyncio.Event()
    first = asyncio.create_task(client.stream(completion(running, 0, LONG), started))
    await started.wait()
    second = asyncio.create_task(client.complete(waiting, 0, SHORT))
    was_deferred = False

    async def waits_or_done() -> bool:
        nonlocal was_deferred
        was_deferred = await client.deferred() == 1
        return was_deferred or second.done()

    await until(waits_or_done, "the second request waits")
    answers = await answers_of(first, second)
    return answers if was_deferred else None


async def answers_of(first: asyncio.Task[Answer], second: asyncio.Task[Answer]) -> tuple[Tokens, Tokens]:
    try:
        async with asyncio.timeout(SPIN_SECONDS):
            return (await first).tokens, (await second).tokens
    except TimeoutError as error:
        raise ServerError(0, "no answer: the slot spins") from error
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def both_right(binary: Path, model: Path, seed: int) -> bool:
    """Whether both answers are the same, overlapping or not."""
    running, waiting = prompt(2 * seed, 300), prompt(2 * seed + 1, 300)
    async with llama_server(binary, model, *FLAGS) as client:
        expected = await one_after_the_other(client, running, waiting)
    for _ in range(ATTEMPTS):
        # A server of its own, so that every cell is where it was: sums in another order can change a token.
        async with llama_server(binary, model, *FLAGS) as client:
            answers = await overlapping(client, running, waiting)
            if answers is not None:
                return answers == expected
    raise AssertionError("the requests never overlapped")


@pytest.mark.parametrize("model", [full_attention, sliding_window])
@pytest.mark.parametrize("seed", range(4))
def test_both_answers_are_those_of_runs_alone(model: Callable[[], Path], seed: int) -> None:
    async def proof() -> None:
        assert await both_right(patched_binary(), model(), seed)

    run(proof())


def test_stock_server_spoils_an_answer() -> None:
    async def proof() -> None:
        with suppress(ServerError):  # no answer at all
            assert not await both_right(stock_binary(), full_attention(), 0)

    run(proof())


def test_many_waiting_requests_are_served_in_turn() -> None:
    """Twelve conversations on one slot at once, three rounds: each is answered, and right."""

    async def proof() -> None:
        prompts = [prompt(seed, 100) for seed in range(12)]
        async with llama_server(patched_binary(), full_attention(), *FLAGS) as client:
            expected = [(await client.complete(tokens, 0, SHORT)).tokens for tokens in prompts]
            for _ in range(3):
                answers = await asyncio.gather(*(client.complete(tokens, 0, SHORT) for tokens in prompts))
                assert [answer.tokens for answer in answers] == expected
                assert all(answer.cache_n == 99 for answer in answers)

    run(proof())
