"""What slotpin sees of the cache on real servers, what it says about it, and what it does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slotpin.llama.launch import free_port
from tests.real.client import Answer, fetch
from tests.real.prompts import prose
from tests.real.servers import Llama, Slotpin, llama, slotpin, write_config
from tests.support.llama import HOST
from tests.support.processes import wait_until
from tests.support.program import Program

CHAT = "/v1/chat/completions"
SYSTEM = prose(600, seed=1)
SIDE = [{"role": "user", "content": prose(50, seed=2)}]
COMPACTOR = {"X-Slotpin-Role": "compactor"}
# What is re-used was in the slot: there is nothing else to take it from.
KEEPING = ("--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
CLEARING = ("--kv-unified", "--cache-idle-slots")
FEW = 3
"""Tokens: the last one generated is never evaluated, the last one of a prompt always."""


@dataclass
class Conversation:
    """As an agent keeps it: `said` has all but the system text."""

    url: str
    seed: int
    said: list[dict[str, str]] = field(default_factory=list)

    def turn(self, words: int = 200) -> Answer:
        self.said.append({"role": "user", "content": prose(words, seed=1000 * self.seed + len(self.said))})
        answer = ask(self.url, self.messages)
        message = answer.json["choices"][0]["message"]
        self.said.append({"role": "assistant", "content": message["content"]})
        return answer

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, *self.said]


def ask(url: str, messages: list[dict[str, str]], headers: Mapping[str, str] | None = None, **more: object) -> Answer:
    answer = fetch(url + CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **more}, headers)
    assert answer.status == 200, answer
    return answer


def evaluated(answer: Answer) -> int:
    tokens: int = answer.json["timings"]["prompt_n"]
    return tokens


def cached(answer: Answer) -> int:
    tokens: int = answer.json["timings"]["cache_n"]
    return tokens


def prompt(answer: Answer) -> int:
    return evaluated(answer) + cached(answer)


def exchange(proxy: Slotpin, answer: Answer) -> dict[str, Any]:
    """The event that the log has of an exchange; its figures are those of the answer."""
    proxy.outcome(answer.request)
    (event,) = proxy.program.exchanges(request=answer.request)
    assert event["outcome"] == "completed"
    assert (event["evaluated"], event["cached"]) == (evaluated(answer), cached(answer))
    return {"cause": None, **event}


def warning(proxy: Slotpin, cause: str) -> str:
    """The text of the one warning with this cause."""
    wait_until(lambda: bool(proxy.program.events("warning", cause=cause)), f"{cause} is warned about")
    (event,) = proxy.program.events("warning", cause=cause)
    assert event["level"] == "warning"
    message: str = event["message"]
    return message


def lost(proxy: Slotpin) -> list[dict[str, Any]]:
    """The warnings about a loss."""
    return [event for event in proxy.program.events("warning") if event["cause"].startswith("cache_lost")]


@pytest.fixture(scope="module")
def keeping() -> Iterator[Llama]:
    with llama(*KEEPING) as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path, keeping: Llama) -> Iterator[Slotpin]:
    with slotpin(tmp_path, keeping.url) as running:
        yield running


def test_a_follow_up_that_finds_everything(proxy: Slotpin) -> None:
    conversation = Conversation(proxy.url, 1)
    first = conversation.turn()
    ask(proxy.url, SIDE, COMPACTOR)
    second = conversation.turn()
    third = conversation.turn()
    assert exchange(proxy, first) | {"expected": 0, "lost": 0, "cause": None} == exchange(proxy, first)
    for before, after in ((first, second), (second, third)):
        assert (after.slot, after.reason) == (0, "pinned")
        event = exchange(proxy, after)
        # What the turn before left: its prompt at least, its answer at most.
        assert prompt(before) <= event["expected"] <= prompt(before) + before.json["timings"]["predicted_n"]
        assert event["cached"] >= event["expected"]
        assert (event["lost"], event["cause"]) == (0, None)
    turns = proxy.status["conversations"][0]["reuse"]
    assert [turn["evaluated"] for turn in turns] == [evaluated(answer) for answer in (first, second, third)]
    assert [turn["lost"] for turn in turns] == [0, 0, 0]
    assert lost(proxy) == []


def test_a_server_that_clears_idle_slots_is_not_pinned(tmp_path: Path) -> None:
    with llama(*CLEARING) as server, slotpin(tmp_path, server.url) as proxy:
        conversation = Conversation(proxy.url, 1)
        first = conversation.turn()
        assert (first.slot, first.reason) == (0, "pinned")
        before = first
        ask(proxy.url, SIDE, COMPACTOR)
        assert server.slots[0].get("n_prompt_tokens", 0) == 0  # or there is nothing to stop for
        for _ in range(3):
            answer = conversation.turn()
            assert (answer.slot, answer.reason) == (None, "pinning_stopped")
            assert "--no-cache-idle-slots" in answer.warning
            assert cached(answer) >= prompt(before)  # the server has it from its memory
            assert exchange(proxy, answer)["lost"] == 0
            side = ask(proxy.url, SIDE, COMPACTOR)
            assert (side.slot, side.reason) == (None, "pinning_stopped")
            before = answer
        assert "--no-cache-idle-slots" in warning(proxy, "pinning_stopped")
        assert lost(proxy) == []
        assert proxy.status["server"]["clearsIdleSlots"] is True


def test_pinning_begins_again_when_the_server_was_restarted_with_the_flag(tmp_path: Path) -> None:
    port = free_port(HOST, 0)
    with slotpin(tmp_path, f"http://{HOST}:{port}") as proxy:
        conversation = Conversation(proxy.url, 1)
        with llama(*CLEARING, port=port):
            conversation.turn()
            ask(proxy.url, SIDE, COMPACTOR)
            assert conversation.turn().reason == "pinning_stopped"
        with llama(*KEEPING, port=port):
            conversation.turn()
            answers = [conversation.turn() for _ in range(2)]
            assert [answer.reason for answer in answers] == ["pinned", "pinned"]
            ask(proxy.url, SIDE, COMPACTOR)
            answer = conversation.turn()
            assert (answer.reason, exchange(proxy, answer)["lost"]) == ("pinned", 0)


@pytest.mark.parametrize("session", [{}, {"X-Slotpin-Session": "one"}], ids=["without-id", "with-id"])
@pytest.mark.parametrize(("index", "role"), [(1, "user"), (2, "assistant"), (3, "user")])
def test_a_client_that_changes_an_early_message(proxy: Slotpin, session: dict[str, str], index: int, role: str) -> None:
    """`index` counts the client's messages from 0, the system text being the first."""
    conversation = Conversation(proxy.url, 10 + index)
    for _ in range(6):
        conversation.said.append({"role": "user", "content": prose(100, seed=100 + len(conversation.said))})
        conversation.said.append({"role": "assistant", "content": prose(100, seed=200 + len(conversation.said))})
    messages = [*conversation.messages, {"role": "user", "content": "and then"}]
    first = ask(proxy.url, messages, session)
    changed = [*messages]
    changed[index] = {"role": role, "content": f"zebra {prose(100, seed=300)}"}
    second = ask(proxy.url, [*changed, {"role": "assistant", "content": "so"}, messages[-1]], session)
    assert second.slot == first.slot == 0
    event = exchange(proxy, second)
    assert event["cause"] == "prompt_changed"
    assert event["lost"] == event["expected"] - event["cached"] > 256
    said = warning(proxy, "cache_lost:prompt_changed")
    assert f"message {index} ({role})" in said
    assert str(event["lost"]) in said
    for secret in ("zebra", changed[index]["content"][-30:], messages[index]["content"][:30]):
        assert secret not in proxy.program.err
        assert secret not in json.dumps(proxy.status)


def test_a_small_loss_is_no_warning(proxy: Slotpin) -> None:
    conversation = Conversation(proxy.url, 20)
    conversation.turn()
    conversation.turn(100)
    conversation.said[-2:] = []  # its last message is written anew
    conversation.seed = 21
    second = conversation.turn(100)
    event = exchange(proxy, second)
    assert 50 < event["lost"] < 256
    assert event["cause"] == "prompt_changed"
    assert lost(proxy) == []


@pytest.mark.parametrize("has_side", [False, True], ids=["main-only", "with-side-request"])
def test_a_server_that_was_restarted(tmp_path: Path, has_side: bool) -> None:
    port = free_port(HOST, 0)
    with slotpin(tmp_path, f"http://{HOST}:{port}") as proxy:
        conversation = Conversation(proxy.url, 1)
        with llama(*KEEPING, port=port):
            conversation.turn()
            before = conversation.turn()
            if has_side:
                ask(proxy.url, SIDE, COMPACTOR)
        with llama(*KEEPING, port=port):
            answer = conversation.turn()
            assert cached(answer) == 0
            event = exchange(proxy, answer)
            assert event["expected"] >= prompt(before)
            assert (event["lost"], event["cause"]) == (event["expected"], "server_restarted")
            assert "restarted" in warning(proxy, "cache_lost:server_restarted")
            for _ in range(2):  # and from then on all is as before
                conversation.turn()
                ask(proxy.url, SIDE, COMPACTOR)
                again = conversation.turn()
                assert (again.slot, again.reason) == (0, "pinned")
                assert (exchange(proxy, again)["lost"], exchange(proxy, again)["cause"]) == (0, None)


def test_a_second_conversation_shares_main_s_slot_once_there_are_side_requests(proxy: Slotpin) -> None:
    first, second = Conversation(proxy.url, 30), Conversation(proxy.url, 31)
    assert first.turn().slot == 0
    assert ask(proxy.url, SIDE, COMPACTOR).slot == 1
    for _ in range(2):
        answer = second.turn()
        assert (answer.status, answer.slot) == (200, 0)
        assert "slot_shared" in answer.warning
        assert "--parallel 3" in answer.warning
    assert "--parallel 3" in warning(proxy, "slot_shared")
    answer = first.turn()
    assert answer.slot == 0
    assert exchange(proxy, answer)["cause"] == "other_request"


def test_before_any_side_request_it_is_lent_the_compactor_s_slot(proxy: Slotpin) -> None:
    first, second = Conversation(proxy.url, 40), Conversation(proxy.url, 41)
    for turn in range(3):
        for conversation, slot in ((first, 0), (second, 1)):
            answer = conversation.turn()
            assert answer.slot == slot
            assert turn == 0 or exchange(proxy, answer)["lost"] == 0
    assert "--parallel 3" in warning(proxy, "slot_shared")
    # A side request takes it back.
    assert ask(proxy.url, SIDE, COMPACTOR).slot == 1
    assert (second.turn().slot, first.turn().slot) == (0, 0)


COMPACT = {"role": "user", "content": "Now sum up what was said so far."}


@contextmanager
def recognising(home: Path, server: Llama) -> Iterator[Slotpin]:
    """A proxy that knows a compaction by its model's name."""
    write_config(home, server.url)
    rules = json.dumps([{"name": "compaction", "apiKey": "sk-compaction"}])
    with Program(home, "serve", "--config", "slotpin.json", SLOTPIN_RECOGNISERS_CUSTOM=rules) as program:
        yield Slotpin(program)
        assert program.process.poll() is None
        assert program.events("bug") == []


def test_a_compaction_that_extends_the_conversation_runs_on_its_slot(tmp_path: Path, keeping: Llama) -> None:
    recognised = {"Authorization": "Bearer sk-compaction"}
    with recognising(tmp_path, keeping) as proxy:
        conversation = Conversation(proxy.url, 50)
        for _ in range(2):
            last = conversation.turn()
        compaction = ask(proxy.url, [*conversation.messages, COMPACT], recognised)
        assert proxy.decision(compaction.request)["found_by"] == "compaction"
        assert (compaction.role, compaction.slot) == ("compactor", 0)
        assert compaction.reason == "extends_conversation"
        held = prompt(last) + last.json["timings"]["predicted_n"]
        assert evaluated(compaction) <= prompt(compaction) - held + FEW < 60
        answer = conversation.turn()
        assert (answer.slot, answer.reason) == (0, "pinned")
        assert cached(answer) >= held - FEW
        assert exchange(proxy, answer)["lost"] == 0
        # Another prompt than the conversation's is no extension, nor is one that has only some of its messages.
        for messages in (SIDE, [*conversation.messages[:3], COMPACT]):
            side = ask(proxy.url, messages, recognised)
            assert (side.role, side.slot, side.reason) == ("compactor", 1, "pinned")


@pytest.mark.parametrize("way", ["header", "path"])
def test_a_role_that_the_client_gives_is_not_changed_by_that(tmp_path: Path, keeping: Llama, way: str) -> None:
    with recognising(tmp_path, keeping) as proxy:
        conversation = Conversation(proxy.url, 60)
        conversation.turn()
        url, headers = (proxy.url, COMPACTOR) if way == "header" else (f"{proxy.url}/compactor", {})
        compaction = ask(url, [*conversation.messages, COMPACT], headers)
        assert (compaction.role, compaction.slot, compaction.reason) == ("compactor", 1, "pinned")
        answer = conversation.turn()
        assert (answer.slot, exchange(proxy, answer)["lost"]) == (0, 0)
        main = ask(
            proxy.url,
            [*conversation.messages, COMPACT],
            {"X-Slotpin-Role": "main", "Authorization": "Bearer sk-compaction"},
        )
        assert (main.role, main.slot, main.reason) == ("main", 0, "pinned")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": SIDE, "n": 2, "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 4}),
        ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 4}),
        ("/completion", {"prompt": "hello", "n_cmpl": 2, "n_predict": 4}),
        ("/completion", {"prompt": ["hello", "you"], "n_predict": 4}),
    ],
    ids=["chat-n", "completions-n", "completions-prompts", "native-n_cmpl", "native-prompts"],
)
def test_several_completions_are_not_pinned(proxy: Slotpin, keeping: Llama, path: str, body: dict[str, Any]) -> None:
    one = {**body, "prompt": "hello"} if "prompt" in body else {**body}
    single = proxy.post(path, {name: value for name, value in one.items() if name not in ("n", "n_cmpl")})
    assert (single.slot, single.reason) == (0, "pinned")
    for _ in range(2):
        before = len(keeping.selections)
        answer = proxy.post(path, body)
        assert answer.status == 200
        assert len(answer.json if path == "/completion" else answer.json["choices"]) == 2
        assert (answer.role, answer.slot, answer.reason) == ("main", None, "several_completions")
        assert "one at a time" in answer.warning
        assert "id" not in [by for _, by in keeping.chosen_since(before)]
    assert len(proxy.program.events("warning", cause="several_completions")) == 1
