"""A request as digests: what makes two of them the same, an append, or different, and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning.message_end import Shape
from slotpin.pinning.request import Body, read_body
from slotpin.pinning.turn import Difference, Turn, difference, read_turn, role_at

from .json_text import BODIES, REQUESTS

CHAT, NATIVE, ANTHROPIC, RESPONSES = Shape.CHAT, Shape.NATIVE, Shape.ANTHROPIC, Shape.RESPONSES

SYSTEM = {"role": "system", "content": "Be brief."}
MARK = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=%s;You are"


def body_of(value: dict[str, Any]) -> Body:
    body = read_body(json.dumps(value).encode())
    assert body is not None
    return body


def turn(shape: Shape, **members: Any) -> Turn:
    return read_turn(body_of(members), shape)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"does {name}", **more}


def appends(old: Turn, new: Turn) -> bool:
    return new.messages[: len(old.messages)] == old.messages and len(new.messages) > len(old.messages)


HISTORY = [user("one"), assistant("two"), user("three")]


@pytest.mark.parametrize(("shape", "name"), [(CHAT, "messages"), (ANTHROPIC, "messages"), (RESPONSES, "input")])
def test_a_longer_history_is_an_append(shape: Shape, name: str) -> None:
    turns = [turn(shape, **{name: HISTORY[:count]}) for count in (1, 2, 3)]
    assert [len(each.messages) for each in turns] == [1, 2, 3]
    assert appends(turns[0], turns[1]) and appends(turns[1], turns[2])
    assert len(set(turns[2].messages)) == 3


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(("shape", "name"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_system_messages_at_the_front_are_the_opening(shape: Shape, name: str, role: str) -> None:
    plain = turn(shape, **{name: HISTORY})
    first = turn(shape, **{name: [{"role": role, "content": "Be brief."}, *HISTORY]})
    other = turn(shape, **{name: [{"role": role, "content": "Be long."}, *HISTORY]})
    assert plain.messages == first.messages == other.messages
    assert (plain.opening, plain.offset, first.offset, other.offset) == (0, 0, 1, 1)
    assert len({plain.opening, first.opening, other.opening}) == 3


def test_system_messages_further_back_are_messages() -> None:
    late = turn(CHAT, messages=[SYSTEM, SYSTEM, user("one"), SYSTEM])
    assert (len(late.messages), late.offset) == (2, 2)


def test_nothing_but_system_messages_are_messages() -> None:
    assert (len(turn(CHAT, messages=[SYSTEM]).messages), turn(CHAT, messages=[SYSTEM]).offset) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "name"), [(CHAT, "tools"), (ANTHROPIC, "tools"), (ANTHROPIC, "system"), (RESPONSES, "instructions")]
)
def test_what_else_stands_before_the_messages(shape: Shape, name: str) -> None:
    messages = {"input" if shape is RESPONSES else "messages": HISTORY}
    openings = {turn(shape, **messages, **{name: value}).opening for value in ("a", "b", [tool("a")], [tool("b")])}
    assert len(openings) == 4 and 0 not in openings
    assert turn(shape, **messages, **{name: None}).opening == turn(shape, **messages, **{name: []}).opening == 0


def test_tools_in_another_order_make_another_prompt_but_the_same_messages() -> None:
    one, other = (turn(CHAT, messages=HISTORY, tools=[tool(name) for name in names]) for names in ("ab", "ba"))
    assert one.messages == other.messages
    assert one.opening != other.opening


def test_system_text_and_tools_are_not_mistaken_for_each_other() -> None:
    assert turn(ANTHROPIC, system="x").opening != turn(ANTHROPIC, tools="x").opening


class TestAnthropicMarks:
    """Marks for a cache that llama-server doesn't have: they wander, and with them the spelling of messages."""

    @pytest.mark.parametrize("write", [json.dumps, lambda value: json.dumps(value, separators=(",", ":"))])
    @pytest.mark.parametrize("message", [user, assistant])
    def test_all_spellings_of_one_text_are_one_message(self, message: Any, write: Any) -> None:
        spellings = [
            'Hello {["}]} é',
            [part('Hello {["}]} é')],
            [part('Hello {["}]} é', cache_control=MARK)],
            [part('Hello {["}]} é', cache_control={"type": "ephemeral", "ttl": "1h"})],
            [part('Hello {["}]} é', cache_control=None)],
        ]
        bodies = [read_body(write({"messages": [message(content)]}).encode()) for content in spellings]
        turns = {read_turn(body, ANTHROPIC) for body in bodies if body is not None}
        assert len(turns) == 1

    @pytest.mark.parametrize(
        "content",
        [
            [part("a" * 3000), part("b")],
            [{"type": "tool_result", "tool_use_id": "t1", "content": "x" * 3000}],
            [{"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}],
        ],
    )
    def test_the_last_part_of_any_message_may_be_marked(self, content: list[dict[str, Any]]) -> None:
        marked = [*content[:-1], {**content[-1], "cache_control": MARK}]
        marked_first = [*content[:-1], {"cache_control": MARK, **content[-1]}]
        one = turn(ANTHROPIC, messages=[user(content)])
        assert one == turn(ANTHROPIC, messages=[user(marked)])
        if len(json.dumps(content[-1])) < 150:
            assert one == turn(ANTHROPIC, messages=[user(marked_first)])

    def test_system_and_tools_may_be_marked(self) -> None:
        plain = turn(ANTHROPIC, system=[part("s"), part("t")], tools=[tool("a"), tool("b")])
        marked = turn(
            ANTHROPIC,
            system=[part("s"), part("t", cache_control=MARK)],
            tools=[tool("a"), tool("b", cache_control=MARK)],
        )
        assert plain == marked and plain.opening

    def test_text_about_marks_is_text(self) -> None:
        texts = ['"cache_control":{"type":"x"},', '"cache_control":{"type":"y"},', ',"cache_control":null', ""]
        assert len({turn(ANTHROPIC, messages=[user(text)]) for text in texts}) == 4
        assert len({turn(ANTHROPIC, messages=[user([part(text)])]) for text in texts}) == 4

    def test_different_messages_stay_different(self) -> None:
        contents = ["a", [part("a"), part("b")], [part("a"), part("c")], [part("b"), part("a")], [part("ab")], [], ""]
        messages = [make(content) for content in contents for make in (user, assistant)]
        assert len({turn(ANTHROPIC, messages=[message]) for message in messages}) == 14

    def test_the_stamp_that_the_server_blanks_is_no_difference(self) -> None:
        def stamped(stamp: str) -> Turn:
            return turn(ANTHROPIC, system=[part(BILLING % stamp), part("Be brief.")])

        assert stamped("a5145") == stamped("00fff")
        assert stamped("a5145") != turn(ANTHROPIC, system=[part(BILLING.replace("cli", "sdk") % "a5145"), part("Be")])

    def test_other_routes_keep_them(self) -> None:
        """Only this route's conversion drops them for certain."""
        assert turn(CHAT, messages=[user([part("a", cache_control=MARK)])]) != turn(CHAT, messages=[user([part("a")])])


class TestPrompts:
    @pytest.mark.parametrize("shape", [CHAT, NATIVE])
    def test_blocks_of_a_growing_prompt_append(self, shape: Shape) -> None:
        text = "".join(f"{number} " for number in range(2_000))
        turns = [turn(shape, prompt=text[:size]) for size in (3_000, 5_000, 9_000)]
        assert appends(turns[0], turns[1]) and appends(turns[1], turns[2])
        assert len(set(turns[2].messages)) == len(turns[2].messages) == 8
        changed = turn(shape, prompt="x" + text[1:])
        assert changed.messages[0] != turns[2].messages[0]

    def test_tokens_likewise(self) -> None:
        turns = [turn(NATIVE, prompt=list(range(count))) for count in (1_000, 2_000)]
        assert appends(*turns)

    def test_a_short_prompt_is_one_message(self) -> None:
        assert len(turn(NATIVE, prompt="Hello").messages) == 1
        assert turn(NATIVE, prompt="Hello") == turn(NATIVE, prompt="Hello") != turn(NATIVE, prompt="Hullo")
        assert turn(NATIVE, prompt="") == turn(NATIVE)

    def test_input_may_be_a_string(self) -> None:
        assert len(turn(RESPONSES, input="Hello", instructions="Be").messages) == 1
        assert turn(RESPONSES, input="Hello", instructions="Be").opening

    def test_all_infill_requests_are_alike(self) -> None:
        one = turn(NATIVE, input_prefix="def f(", input_suffix=")", prompt="x")
        assert one == turn(NATIVE, input_prefix="class A", input_suffix="\n")
        assert one.messages != turn(NATIVE, prompt="x").messages

    def test_the_native_route_reads_no_messages(self) -> None:
        assert turn(NATIVE, messages=HISTORY, prompt="x") == turn(NATIVE, prompt="x")


def change(shape: Shape, old: dict[str, Any], new: dict[str, Any]) -> Difference | None:
    return difference(turn(shape, **old), turn(shape, **new), body_of(new))


class TestDifference:
    def test_an_append_and_a_retry_are_none(self) -> None:
        old = {"messages": [SYSTEM, *HISTORY], "tools": [tool("a")]}
        assert change(CHAT, old, old) is None
        assert change(CHAT, old, {**old, "messages": [SYSTEM, *HISTORY, assistant("four")]}) is None

    @pytest.mark.parametrize("system", [[], [SYSTEM], [SYSTEM, SYSTEM]])
    @pytest.mark.parametrize(("index", "role"), [(0, "user"), (1, "assistant"), (2, "user")])
    def test_the_index_is_the_clients_own(self, system: list[Any], index: int, role: str) -> None:
        changed = [*HISTORY]
        changed[index] = {**changed[index], "content": "changed"}
        found = change(CHAT, {"messages": system + HISTORY}, {"messages": [*system, *changed, user("four")]})
        assert found == Difference(len(system) + index, role)

    def test_messages_that_are_gone(self) -> None:
        """The new turn stops being an append where it ends: there is no message to name."""
        assert change(CHAT, {"messages": HISTORY}, {"messages": HISTORY[:2]}) == Difference(2, "")

    @pytest.mark.parametrize(
        "new", [{"messages": [user("x")]}, {"messages": [SYSTEM]}, {"messages": HISTORY, "tools": [tool("a")]}]
    )
    def test_the_opening_comes_first(self, new: dict[str, Any]) -> None:
        assert change(CHAT, {"messages": [SYSTEM, *HISTORY]}, new) == Difference(None, "system text or tools")

    def test_prompts_have_no_messages_to_count(self) -> None:
        assert change(NATIVE, {"prompt": "a" * 5000}, {"prompt": "b" * 5000}) == Difference(None, "prompt text")
        assert change(NATIVE, {"prompt": "a" * 5000}, {"prompt": "a" * 9000}) is None

    def test_no_infill_is_an_append(self) -> None:
        infill = {"input_prefix": "def f(", "input_suffix": ")"}
        assert change(NATIVE, infill, infill) == Difference(None, "code around the cursor")

    def test_responses_without_a_role_are_named_by_their_type(self) -> None:
        call = {"type": "function_call_output", "call_id": "c", "output": "x"}
        found = change(RESPONSES, {"input": HISTORY}, {"input": [HISTORY[0], call, *HISTORY[1:]]})
        assert found == Difference(1, "function_call_output")


@pytest.mark.parametrize("typed", [True, False])
def test_a_summary_of_the_client_s_is_seen(typed: bool) -> None:
    """As Pi 1.6.0 sends it, after its system text."""
    summary = "The conversation history before this point was compacted into the following summary:\n\n<summary>\nx"
    first = user([part(summary)] if typed else summary)
    said: dict[str, Any] = {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]}
    rest: dict[str, Any] = {"messages": [said["messages"][0], first, *said["messages"][2:]]}
    old, new = turn(Shape.CHAT, **said), turn(Shape.CHAT, **rest)
    assert (old.compacted, new.compacted) == (False, True)
    assert change(Shape.CHAT, said, rest) == Difference(1, "user", compacted=True)
    later = {"messages": [*rest["messages"][:-1], user("d")]}
    assert change(Shape.CHAT, rest, later) == Difference(3, "user")
    assert not turn(Shape.CHAT, messages=[user("It said: " + 200 * "." + summary)]).compacted
    assert not turn(Shape.CHAT, messages=[user("a"), first]).compacted


def test_a_role_is_never_the_clients_own_text() -> None:
    body = body_of({"messages": [{"role": "my secret"}, {"type": "secret_call"}, {"role": 1}, "x", user("y")]})
    assert [role_at(body, index) for index in range(-1, 6)] == ["", "", "", "", "", "user", ""]


@pytest.mark.parametrize("messages", [None, "x", {}, 1, [], [None], [1, "x"], [[]]])
def test_odd_messages_do_not_raise(messages: Any) -> None:
    for shape in Shape:
        body = body_of({"messages": messages, "input": messages, "prompt": messages, "system": messages})
        assert isinstance(read_turn(body, shape), Turn)


def test_a_list_of_messages_is_read_beside_odd_members() -> None:
    assert turn(CHAT, messages=HISTORY, input="x").messages == turn(CHAT, messages=HISTORY).messages
    assert turn(RESPONSES, messages="x", input=HISTORY).messages == turn(RESPONSES, input=HISTORY).messages


@given(BODIES | REQUESTS, st.sampled_from(Shape))
def test_every_body_has_a_turn(text: bytes, shape: Shape) -> None:
    body = read_body(text)
    assert body is not None
    read = read_turn(body, shape)
    assert read == read_turn(body, shape)
    found = difference(read, read, body)
    assert found is None or found.what == "code around the cursor"


contents = st.text(max_size=3) | st.lists(st.text(max_size=3).map(part), max_size=3)
histories = st.lists(st.builds(user, contents) | st.builds(assistant, contents), min_size=1, max_size=6)


@given(histories, histories, st.sampled_from([CHAT, ANTHROPIC]))
def test_turns_have_in_common_what_the_messages_have(one: list[Any], other: list[Any], shape: Shape) -> None:
    def plain(message: dict[str, Any]) -> tuple[str, str]:
        content = message["content"]
        if shape is ANTHROPIC and isinstance(content, list) and len(content) == 1:
            content = content[0]["text"]
        return message["role"], json.dumps(content)

    left, right = turn(shape, messages=one).messages, turn(shape, messages=other).messages
    assert [a == b for a in left for b in right] == [plain(a) == plain(b) for a in one for b in other]
