"""0004: a request pinned to an empty slot finds its conversation in the host-memory cache."""

from __future__ import annotations

from pathlib import Path

from tests.patches.client import Answer, llama_server, prompt, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import full_attention

LENGTH = 600


async def moved(binary: Path) -> Answer:
    """A on slot 0, B on slot 0, A on slot 1: the last answer."""
    async with llama_server(binary, full_attention()) as client:
        first = await client.complete(prompt(1, LENGTH), 0)
        await client.complete(prompt(2, LENGTH), 0)
        assert (await client.slot_tokens())[1] == 0
        last = await client.complete(prompt(1, LENGTH), 1)
        assert last.tokens == first.tokens
        return last


def test_everything_is_reused() -> None:
    async def proof() -> None:
        # The last token is always evaluated: its logits are needed.
        assert (await moved(patched_binary())).cache_n == LENGTH - 1

    run(proof())


def test_an_unknown_prompt_is_evaluated() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention()) as client:
            await client.complete(prompt(1, LENGTH), 0)
            await client.complete(prompt(2, LENGTH), 0)
            answer = await client.complete(prompt(3, LENGTH), 1)
            assert (answer.cache_n, answer.prompt_n) == (0, LENGTH)

    run(proof())


def test_stock_server_reuses_nothing() -> None:
    async def proof() -> None:
        assert (await moved(stock_binary())).cache_n == 0

    run(proof())
