"""0005: under unified KV idle slots keep their tokens as long as the pool has room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.client import llama_server, prompt, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import full_attention, sliding_window

LENGTH = 1000
ANSWER = 4
HELD = LENGTH + ANSWER - 1  # the last generated token is not evaluated
CLEARING = ("--cache-idle-slots",)


def pool(tokens: int, slots: int = 4) -> tuple[str, ...]:
    return ("--ctx-size", str(tokens), "--parallel", str(slots))


async def held_after_side_request(binary: Path) -> int:
    """How many tokens slot 0 still holds after a request on slot 1, with room for both."""
    async with llama_server(binary, full_attention(), *CLEARING, *pool(8192)) as client:
        await client.complete(prompt(1, LENGTH), 0)
        await client.complete(prompt(2, 100), 1)
        return (await client.slot_tokens())[0]


def test_an_idle_conversation_keeps_its_tokens() -> None:
    async def proof() -> None:
        assert await held_after_side_request(patched_binary()) == HELD

    run(proof())


def test_stock_server_clears_it() -> None:
    async def proof() -> None:
        assert await held_after_side_request(stock_binary()) == 0

    run(proof())


def test_the_next_turn_reuses_the_conversation_without_the_host_memory_cache() -> None:
    async def proof() -> None:
        # One MiB holds the side requests' state at most: what is re-used was never out of its slot.
        async with llama_server(
            patched_binary(), full_attention(), *CLEARING, *pool(8192), "--cache-ram", "1"
        ) as client:
            conversation = prompt(1, 3 * LENGTH)
            for turn in range(3):
                answer = await client.complete(conversation, 0)
                assert turn == 0 or answer.prompt_n <= 11
                for slot in (1, 2, 3):
                    await client.complete(prompt(10 * turn + slot + 2, 100), slot)
                conversation += [*answer.tokens, *prompt(100 + turn, 10)]

    run(proof())


def test_without_room_the_least_recently_used_slot_is_cleared_first() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention(), *CLEARING, *pool(3584)) as client:
            for slot in (1, 0, 2):
                await client.complete(prompt(slot, LENGTH), slot)
            assert await client.slot_tokens() == [HELD, HELD, HELD, 0]
            await client.complete(prompt(3, LENGTH), 3)
            assert await client.slot_tokens() == [HELD, 0, HELD, HELD]
            # What was cleared went to the host-memory cache, and pushes out the next one when it comes back.
            again = await client.complete(prompt(1, LENGTH), 1)
            assert again.cache_n == LENGTH - 1
            assert await client.slot_tokens() == [0, HELD, HELD, HELD]

    run(proof())


@pytest.mark.parametrize("flags", [CLEARING, ("--no-cache-idle-slots",), (*CLEARING, "--cache-ram", "0")])
@pytest.mark.parametrize("model", [full_attention, sliding_window])
def test_without_room_requests_succeed_and_are_right(model: object, flags: tuple[str, ...]) -> None:
    async def proof() -> None:
        assert callable(model)
        async with llama_server(patched_binary(), model(), *flags, *pool(2560)) as client:
            expected = {}
            for seed in range(5):
                answer = await client.complete(prompt(seed, LENGTH), 0, 16, cache_prompt=False)
                expected[seed] = answer.tokens
            for step in range(20):
                seed, slot = step % 5, (3 * step) % 4
                assert (await client.complete(prompt(seed, LENGTH), slot, 16)).tokens == expected[seed]

    run(proof())


def test_a_restored_slot_finds_room(tmp_path: Path) -> None:
    async def proof() -> None:
        flags = (*CLEARING, *pool(2560), "--slot-save-path", f"{tmp_path}/")
        async with llama_server(patched_binary(), full_attention(), *flags) as client:
            await client.complete(prompt(0, LENGTH), 0)
            await client.slot_action(0, "save", "conversation")
            for slot in (1, 2):
                await client.complete(prompt(slot, LENGTH), slot)
            assert (await client.slot_action(0, "restore", "conversation"))["n_restored"] == HELD
            assert (await client.complete(prompt(0, LENGTH), 0)).cache_n == LENGTH - 1

    run(proof())
