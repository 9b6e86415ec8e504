"""0008: the children of `n_cmpl` take empty slots first, then the least recently used, and say so."""

from __future__ import annotations

from pathlib import Path

from tests.patches.client import Client, completion, llama_server, prompt, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import full_attention

LENGTH = 300
ANSWER = 4
HELD = LENGTH + ANSWER - 1
FLAGS = ("--parallel", "4")


async def fan_out(client: Client, slot: int, count: int) -> int:
    """A request for `count` completions; how many came."""
    body = completion(prompt(90, LENGTH), slot, ANSWER) | {"n_cmpl": count}
    answers = await client.post("/completion", body)
    return len(answers)


async def held_after_fan_out(binary: Path) -> list[int]:
    """What the slots hold after conversations on 0 and 1, and two completions on 2."""
    async with llama_server(binary, full_attention(), *FLAGS) as client:
        for slot in (0, 1):
            await client.complete(prompt(slot, LENGTH), slot, ANSWER)
        assert await fan_out(client, 2, 2) == 2
        return await client.slot_tokens()


def test_children_take_empty_slots() -> None:
    async def proof() -> None:
        assert await held_after_fan_out(patched_binary()) == [HELD, HELD, HELD, 0]

    run(proof())


def test_stock_server_clears_a_conversation() -> None:
    async def proof() -> None:
        assert (await held_after_fan_out(stock_binary()))[0] == 0

    run(proof())


def test_without_empty_slots_the_least_recently_used_go_and_the_log_says_so() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention(), *FLAGS) as client:
            for slot in (1, 3, 0, 2):
                await client.complete(prompt(slot, LENGTH), slot, ANSWER)
            assert "no empty slot" not in client.log()
            assert await fan_out(client, 2, 3) == 3
            assert await client.slot_tokens() == [HELD, 0, HELD, 0]
            assert client.log().count(f"overwriting {HELD} tokens of another prompt") == 2
            # They went to the host-memory cache.
            again = await client.complete(prompt(1, LENGTH), -1, ANSWER)
            assert again.cache_n == LENGTH - 1

    run(proof())


def test_all_slots() -> None:
    async def proof() -> None:
        async with llama_server(patched_binary(), full_attention(), *FLAGS, "--ctx-size", "2048") as client:
            for slot in range(4):
                await client.complete(prompt(slot, LENGTH), slot, ANSWER)
            assert await fan_out(client, 0, 4) == 4
            assert await client.slot_tokens() == [HELD, 0, 0, 0]

    run(proof())
