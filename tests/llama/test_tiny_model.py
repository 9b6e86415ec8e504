"""The test models do what the integration tests rest on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.llama import running_server
from tests.support.tiny_model import full_attention, sliding_window

QUESTION = {"role": "user", "content": "What is all this about? " * 100}


async def chat(url: str, messages: list[dict[str, Any]], id_slot: int) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "id_slot": id_slot, "cache_prompt": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.parametrize("model", [full_attention, sliding_window])
def test_answers_are_deterministic_and_a_follow_up_finds_all_of_them_in_the_cache(model: Callable[[], Path]) -> None:
    async def go() -> None:
        async with running_server(model(), "-fa", "off") as server:
            first = await chat(server.base_url, [QUESTION], 0)
            elsewhere = await chat(server.base_url, [QUESTION], 1)
            message = first["choices"][0]["message"]
            assert message == elsewhere["choices"][0]["message"]
            assert first["choices"][0]["finish_reason"] == "length"
            assert message["content"].isascii()
            follow_up = await chat(server.base_url, [QUESTION, message, {"role": "user", "content": "And?"}], 0)
            timings = first["timings"]
            # The last token that was generated was never evaluated.
            assert follow_up["timings"]["cache_n"] == timings["prompt_n"] + timings["predicted_n"] - 1

    asyncio.run(go())


def test_an_answer_depends_on_words_that_were_said_long_before() -> None:
    async def go() -> None:
        async with running_server(sliding_window()) as server:
            messages = [[{"role": "system", "content": word}, QUESTION] for word in ("one", "two")]
            first, second = [await chat(server.base_url, each, 0) for each in messages]
            assert first["choices"][0]["message"] != second["choices"][0]["message"]

    asyncio.run(go())
