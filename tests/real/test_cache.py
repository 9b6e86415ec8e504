"""What it is all for: the main conversation's cache survives a side request that shares its system prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real.client import Answer, fetch
from tests.real.prompts import prose
from tests.real.servers import llama, slotpin
from tests.support.processes import wait_until

# No host-memory cache to fall back on; the other flags are those that slotpin starts its own server with.
FLAGS = ("--parallel", "2", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
SYSTEM = {"role": "system", "content": prose(1500, seed=1)}
FIRST = {"role": "user", "content": prose(1500, seed=2)}
NEXT = {"role": "user", "content": "and then"}
SIDE = [SYSTEM, {"role": "user", "content": f"Shorten this: {prose(100, seed=3)}"}]

Send = Callable[[str, list[dict[str, str]]], Answer]


def converse(send: Send) -> tuple[dict[str, Any], dict[str, Any]]:
    """A main turn, a side request, the next main turn: `timings` of both main turns."""
    first = send("main", [SYSTEM, FIRST])
    send("compactor", SIDE)
    said = first.json["choices"][0]["message"]
    follow_up = send("main", [SYSTEM, FIRST, {"role": said["role"], "content": said["content"]}, NEXT])
    return first.json["timings"], follow_up.json["timings"]


def ask(url: str, messages: list[dict[str, str]]) -> Answer:
    answer = fetch(url, {"messages": messages, "max_tokens": 8, "temperature": 0})
    assert answer.status == 200, answer
    return answer


def test_the_next_turn_finds_its_prompt_in_the_slot(tmp_path: Path) -> None:
    with llama(*FLAGS) as server, slotpin(tmp_path, server.url) as proxy:
        first, follow_up = converse(lambda role, messages: ask(f"{proxy.url}/{role}/v1/chat/completions", messages))
        print(f"through slotpin: first turn {first['prompt_n']} tokens, follow-up {follow_up}")
        assert first["cache_n"] == 0
        assert first["prompt_n"] > 3000
        assert follow_up["cache_n"] >= first["prompt_n"]
        assert follow_up["prompt_n"] < 50
        wait_until(lambda: len(server.selections) == 3, "llama-server logs its choices")
        assert server.selections == [(0, "id"), (1, "id"), (0, "id")]


def test_without_slotpin_it_does_not() -> None:
    """The control: if this fails, the test above proves nothing any more."""
    with llama(*FLAGS) as server:
        first, follow_up = converse(lambda _, messages: ask(f"{server.url}/v1/chat/completions", messages))
        print(f"directly: first turn {first['prompt_n']} tokens, follow-up {follow_up}")
        assert follow_up["prompt_n"] > 1500
        assert follow_up["cache_n"] < first["prompt_n"]
