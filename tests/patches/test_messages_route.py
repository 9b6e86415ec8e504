"""0006: `/v1/messages` honours `id_slot` and `cache_prompt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.client import Client, JsonObject, ServerError, llama_server, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import full_attention

TEXT = "the quick brown fox jumps over the lazy dog " * 20


async def ask(client: Client, **params: object) -> JsonObject:
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]}
    return await client.post("/v1/messages", body | params)


async def used_slots(binary: Path) -> list[bool]:
    """Which of four slots hold tokens after a request pinned to slot 2."""
    async with llama_server(binary, full_attention(), "--parallel", "4") as client:
        await ask(client, id_slot=2)
        return [held > 0 for held in await client.slot_tokens()]


async def cached_without_cache_prompt(binary: Path) -> int:
    """How many tokens a repeated request with `cache_prompt: false` re-used."""
    async with llama_server(binary, full_attention(), "--parallel", "1") as client:
        await ask(client)
        answer = await ask(client, cache_prompt=False)
        cached: int = answer["usage"]["cache_read_input_tokens"]
        return cached


def test_a_pinned_request_runs_on_its_slot() -> None:
    async def proof() -> None:
        assert await used_slots(patched_binary()) == [False, False, True, False]

    run(proof())


def test_cache_prompt_is_honoured() -> None:
    async def proof() -> None:
        assert await cached_without_cache_prompt(patched_binary()) == 0

    run(proof())


def test_a_pinned_conversation_is_reused() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention()) as client:
            first = await ask(client, id_slot=1)
            evaluated = first["usage"]["input_tokens"]
            again = await ask(client, id_slot=1, cache_prompt=True)
            assert again["usage"]["cache_read_input_tokens"] == evaluated - 1

    run(proof())


def test_a_cache_prompt_that_is_no_boolean_is_an_error() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention()) as client:
            with pytest.raises(ServerError) as refused:
                await ask(client, cache_prompt="yes")
            assert refused.value.status == 400

    run(proof())


def test_stock_server_ignores_both() -> None:
    async def proof() -> None:
        assert not (await used_slots(stock_binary()))[2]
        assert await cached_without_cache_prompt(stock_binary()) > 0

    run(proof())
