"""The real Pi, in front of a real slotpin and a real llama-server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slotpin.llama.model import default_model
from slotpin.llama.source import ensure_tree, find_source
from tests.real.prompts import prose
from tests.real.servers import Llama, Slotpin, llama, slotpin, write_config
from tests.support.pi.rpc import SHORT, Event, Pi, answers, text
from tests.support.program import Program

WORDS = 100
"""In each prompt. Pi takes four characters for a token, so it thinks that they are 115."""
LAST_ANSWER, LAST_ONE, LAST_TWO = 1, 100, 200
"""`keepRecentTokens`, so that a compaction keeps the last answer alone, with its prompt, or both of the last two."""
FEW = 20
"""Tokens of a short prompt and what the template puts around it, or the opening that all requests share."""
SYSTEM = 450
"""Tokens: Pi's system text without tools has some more. They come before all else."""
WORDY = 'root ::= [a-z]{3,9} (" " [a-z]{3,9}){99}'
SUMMARY = "You are a context summarization assistant."
REAL: dict[str, Any] = {"maxTokens": 8, "samplingParams": {"temperature": 0}}


def pi(home: Path, base_url: str, keep: int = LAST_TWO, grammar: str = SHORT) -> Pi:
    """Without tools, in front of a model of random weights."""
    sampling = {"grammar": grammar, "temperature": 0}
    return Pi(home, base_url, "--no-tools", model={"samplingParams": sampling}, compaction={"keepRecentTokens": keep})


def ask(session: Pi, number: int) -> Event:
    """The answer to prompt `number`, each of other words."""
    (answer,) = answers(session.prompt(prose(WORDS, seed=number)))
    assert answer["stopReason"] == "stop", answer
    assert re.fullmatch("ok [a-z]{3,9}", text(answer))
    return answer


def prompt_tokens(answer: Event) -> int:
    tokens: int = answer["usage"]["input"] + answer["usage"]["cacheRead"]
    return tokens


def reused(answer: Event) -> int:
    """Prompt tokens, as llama-server counts them and Pi shows them."""
    tokens: int = answer["usage"]["cacheRead"]
    return tokens


def check_appended(said: Sequence[Event]) -> None:
    """Each turn has re-used the whole prompt of the one before. Its answer may be other tokens when it comes back."""
    for before, after in pairwise(said):
        assert reused(after) >= prompt_tokens(before) - 1


def decisions(proxy: Slotpin, **fields: object) -> list[tuple[str, str | None, int | None, str]]:
    events = proxy.program.exchanges(**fields)
    return [(event["role"], event.get("conversation"), event.get("slot"), event["reason"]) for event in events]


@pytest.fixture
def two_slots() -> Iterator[Llama]:
    # What is re-used was in the slot: there is nothing else to take it from.
    with llama("--cache-ram", "0") as server:
        yield server


@pytest.fixture
def four_slots() -> Iterator[Llama]:
    with llama("--cache-ram", "0", "--parallel", "4", "--ctx-size", "32768") as server:
        yield server


@pytest.fixture
def one_slot() -> Iterator[Llama]:
    with llama("--cache-ram", "0", "--parallel", "1") as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path, two_slots: Llama) -> Iterator[Slotpin]:
    with slotpin(tmp_path, two_slots.url) as running:
        yield running


@contextmanager
def with_recogniser(home: Path, upstream: str, rule: dict[str, str]) -> Iterator[Slotpin]:
    """slotpin with a rule of the user's own."""
    write_config(home, upstream)
    with Program(home, "serve", "--config", "slotpin.json", SLOTPIN_RECOGNISERS_CUSTOM=json.dumps([rule])) as program:
        yield Slotpin(program)


def compact(session: Pi) -> Event:
    compacted = session.call("compact")
    assert compacted["success"], compacted
    data: Event = compacted["data"]
    return data


MAIN_0 = ("main", "c1", 0, "pinned")
SIDE_1 = ("compactor", None, 1, "pinned")


def test_a_compaction_leaves_the_main_slot_alone(tmp_path: Path, two_slots: Llama, proxy: Slotpin) -> None:
    before = len(two_slots.selections)
    with pi(tmp_path, proxy.url) as session:
        said = [ask(session, number) for number in range(3)]
        check_appended(said)
        summary = compact(session)
        assert re.fullmatch("ok [a-z]{3,9}", summary["summary"])
        assert summary["usage"]["cacheRead"] == 0  # it begins with other words, and slot 1 is empty
        follow_up = ask(session, 3)
    assert two_slots.chosen_since(before, 5) == [(0, "id"), (0, "id"), (0, "id"), (1, "id"), (0, "id")]
    assert decisions(proxy) == [MAIN_0, MAIN_0, MAIN_0, SIDE_1, MAIN_0]
    assert [event["found_by"] for event in proxy.program.exchanges(role="compactor")] == ["pi-summary"]
    assert prompt_tokens(follow_up) > reused(follow_up) >= SYSTEM
    # What Pi shows is what slotpin has read beside the answers.
    figures = [(event["evaluated"], event["cached"]) for event in proxy.program.exchanges()]
    usages = [each["usage"] for each in (*said, summary, follow_up)]
    assert figures == [(usage["input"], usage["cacheRead"]) for usage in usages]


def test_without_slotpin_the_compaction_costs_the_prefix(tmp_path: Path, one_slot: Llama) -> None:
    """What the test above is worth: the same session, all on one slot."""
    with pi(tmp_path, one_slot.url) as session:
        said = [ask(session, number) for number in range(3)]
        check_appended(said)
        compact(session)
        assert reused(ask(session, 3)) < FEW


@pytest.mark.parametrize("keep", [LAST_TWO, LAST_ONE, LAST_ANSWER], ids=["two", "one", "answer"])
def test_a_compacted_session_stays_the_same_conversation(tmp_path: Path, four_slots: Llama, keep: int) -> None:
    """However little it keeps. There are slots to stray to."""
    with slotpin(tmp_path, four_slots.url) as proxy, pi(tmp_path, proxy.url, keep) as session:
        for number in range(3):
            ask(session, number)
        for round_ in range(2):
            compact(session)
            follow_ups = [ask(session, 3 + 2 * round_), ask(session, 4 + 2 * round_)]
            assert reused(follow_ups[0]) >= SYSTEM
            check_appended(follow_ups)
        assert set(decisions(proxy, role="main")) == {MAIN_0}
        assert set(decisions(proxy, role="compactor")) == {SIDE_1}


def test_a_compaction_is_no_loss_to_warn_of(tmp_path: Path, proxy: Slotpin) -> None:
    with pi(tmp_path, proxy.url) as session:
        for number in range(6):
            ask(session, number)
        compact(session)
        ask(session, 6)
    assert len(proxy.program.exchanges(outcome="completed")) == 8
    assert proxy.program.events("warning") == []


def test_an_aborted_turn_and_a_new_one_at_once(tmp_path: Path, two_slots: Llama, proxy: Slotpin) -> None:
    before = len(two_slots.selections)
    with pi(tmp_path, proxy.url, grammar=WORDY) as session:
        begun = session.begin(prose(WORDS, seed=0))
        session.wait(lambda event: "delta" in event.get("assistantMessageEvent", {}), "Pi shows a word", begun)
        assert session.call("abort")["success"]
        assert session.settled(begun)["aborted"]
        (aborted,) = answers(session.events[begun:])
        assert aborted["stopReason"] == "aborted"
        (answer,) = answers(session.prompt("go on"))
    assert (answer["stopReason"], len(text(answer).split())) == ("stop", 100)
    outcomes = [event["outcome"] for event in proxy.program.exchanges()]
    assert outcomes == ["client_left", "completed"]
    assert two_slots.chosen_since(before, 2) == [(0, "id"), (0, "id")]
    assert decisions(proxy) == [MAIN_0, MAIN_0]
    assert answer["usage"]["input"] < FEW  # "go on": all else was in the slot
    assert reused(answer) > SYSTEM


def test_a_compaction_that_is_refused_leaves_the_session_working(tmp_path: Path, one_slot: Llama) -> None:
    rule = {"name": "summaries", "system": SUMMARY, "onUnsafe": "refuse"}
    with with_recogniser(tmp_path, one_slot.url, rule) as proxy, pi(tmp_path, proxy.url, LAST_ONE) as session:
        said = [ask(session, number) for number in range(3)]
        before = len(one_slot.selections)
        refused = session.call("compact")
        assert not refused["success"]
        assert "slotpin: llama-server has fewer than two slots" in refused["error"]
        said.append(ask(session, 3))
        check_appended(said)
        assert one_slot.chosen_since(before) == [(0, "LCP similarity")]  # the follow-up only
    assert decisions(proxy, role="compactor") == [("compactor", None, None, "too_few_slots")]  # not tried again


def test_a_compaction_that_may_pass_succeeds_on_one_slot(tmp_path: Path, one_slot: Llama) -> None:
    with slotpin(tmp_path, one_slot.url) as proxy, pi(tmp_path, proxy.url, LAST_ONE) as session:
        for number in range(3):
            ask(session, number)
        assert re.fullmatch("ok [a-z]{3,9}", compact(session)["summary"])
        follow_up = ask(session, 3)
        assert reused(follow_up) < FEW  # the price, which the warning is about
        (passed,) = proxy.program.exchanges(role="compactor")
        assert (passed["action"], passed["reason"]) == ("leave", "too_few_slots")
        (warning,) = proxy.program.events("warning", cause="too_few_slots")  # once, for all
        assert "start it with --parallel 2 or more" in warning["message"]


def three_turns_a_compaction_and_one_more(home: Path, base_url: str, number: int, keep: int) -> list[Event]:
    home.mkdir()
    with pi(home, base_url, keep) as session:
        said = [ask(session, 10 * number + turn) for turn in range(3)]
        check_appended(said)
        compact(session)
        follow_up = ask(session, 10 * number + 3)
        assert reused(follow_up) >= SYSTEM
        return [*said, follow_up]


def test_three_sessions_at_once_keep_their_slots(tmp_path: Path, four_slots: Llama) -> None:
    """Without session ids, and each keeps what tells its conversation from the others."""
    before = len(four_slots.selections)
    with slotpin(tmp_path, four_slots.url) as proxy, ThreadPoolExecutor(3) as pool:
        started = [
            pool.submit(three_turns_a_compaction_and_one_more, tmp_path / str(number), proxy.url, number, LAST_TWO)
            for number in range(3)
        ]
        assert [len(each.result()) for each in started] == [4] * 3
        main = decisions(proxy, role="main")
        assert sorted(main) == sorted(
            [*[("main", f"c{n + 1}", slot, "pinned") for n, slot in enumerate((0, 2, 3))]] * 4
        )
        assert decisions(proxy, role="compactor") == [SIDE_1] * 3
    ran = four_slots.chosen_since(before, 15)
    assert {by for _, by in ran} == {"id"}
    assert [[slot for slot, _ in ran].count(slot) for slot in range(4)] == [4, 3, 4, 4]


def test_a_real_model_with_tools(tmp_path: Path) -> None:
    """Gemma's own file has no chat template. It says what it likes, of eight tokens; none of its tools can write."""
    templates = ensure_tree(find_source(None), print) / "models" / "templates"
    with (
        llama(
            *("--model", str(default_model(print)), "--cache-ram", "0", "--threads", "2"),
            *("--chat-template-file", str(templates / "Qwen-Qwen2.5-7B-Instruct.jinja")),
        ) as server,
        slotpin(tmp_path, server.url) as proxy,
        Pi(tmp_path, proxy.url, "--tools", "read,grep,find,ls", model=REAL) as session,
    ):
        said = [answers(session.prompt(each))[-1] for each in ("Which files are here?", "What is in them?")]
        assert {each["stopReason"] for each in said} <= {"stop", "length"}
        check_appended(said)
        assert prompt_tokens(said[0]) > 800  # the tools are in it
        assert set(decisions(proxy)) == {MAIN_0}
        assert {slot for slot, _ in server.selections} == {0}
