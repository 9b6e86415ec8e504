"""Requests are recognised as turns of a conversation, by id or by what they have in common with it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning import conversations
from slotpin.pinning.conversations import Conversation, Conversations, Sources, session_ids
from slotpin.pinning.request import read_body
from slotpin.pinning.turn import Turn

Ids = Sequence[tuple[str, str]]


def turn(*messages: int, opening: int = 0) -> Turn:
    return Turn(messages, opening, 0)


class Table:
    """Conversations of model "m" with a clock that runs."""

    def __init__(self, max_known: int = 256, max_passing: int = 256) -> None:
        self.all = Conversations(max_known, max_passing)
        self.now = 0.0

    def take(self, *messages: int, ids: Ids = (), model: str = "m", opening: int = 0) -> str:
        self.now += 1
        this = turn(*messages, opening=opening)
        found = self.all.find(ids, this, model)
        conversation = self.all.take(found, ids, this, model, self.now)
        assert (found is None) == (conversation.turns == 1) and found in (None, conversation)
        assert conversation.turn.messages == messages and conversation.last_used == self.now
        return conversation.key


def compacted(*messages: int, opening: int = 0) -> Turn:
    """Its first message is the client's summary."""
    return Turn(messages, opening, 0, compacted=True)


def session(value: str) -> Ids:
    return [("x-session-affinity", value)]


LONG = range(100, 140)


class TestByMessages:
    def test_appends_belong_to_their_conversation(self) -> None:
        table = Table()
        assert table.take(1) == table.take(1, 2, 3) == table.take(1, 2, 3, 4) == "c1"
        assert table.take(9) == table.take(9, 2, 3) == "c2"
        assert table.take(1, 2, 3, 4, 5) == "c1"
        found = table.all.get("c1")
        assert found is not None and found.turns == 4 and len(table.all) == 2

    def test_little_is_enough_behind_a_summary(self) -> None:
        table = Table()
        assert [table.take(*old, opening=opening) for old, opening in (((1, 2, 3), 7), ((4, 5, 6), 7), ((8,), 9))] == [
            *("c1", "c2", "c3")
        ]

        def found(*messages: int, model: str = "m", opening: int = 7) -> str | None:
            conversation = table.all.find((), compacted(*messages, opening=opening), model)
            return conversation.key if conversation is not None else None

        assert found(10, 3, 11, 12) == "c1"  # the last message, and the answer to it
        assert found(10, 6, 11, 12) == "c2"
        assert found(10, 11, 12) == "c2"  # an answer: the conversation used last under this system text
        assert found(10, 11, 12, opening=9) == "c3"
        assert found(10, 11, 12, opening=8) is None
        assert found(10, 11, 12, model="n") is None
        assert table.all.find((), turn(10, 3, 11, 12, opening=7), "m") is None  # no summary

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ((1,), (1,)),  # a retry
            ((1, 2, 3), (1, 2, 3)),
            ((1, 2, 3), (1,)),  # back to the first message
            ((1, 2, 3), (1, 2, 4)),  # a message edited
            (LONG, (*LONG[:7], 1)),
            (LONG, (*LONG[:-1], 1, 2, 3)),  # the latest message was written anew
            (LONG, (*LONG[:-5], 1, 2, 3)),
            (LONG, (1, *LONG[-20:], 2, 3)),  # a compaction: summary, kept messages, new ones
            (LONG, (1, *LONG[-2:], 2, 3, 4, 5, 6)),
            (LONG, (LONG[0], 1, 2, *LONG[-8:], 3)),
            (LONG, LONG[10:]),  # the front cut off
            (LONG, (*LONG[:3], 1, *LONG[4:], 2)),  # a message in the middle rewritten
        ],
    )
    def test_enough_in_common(self, old: Sequence[int], new: Sequence[int]) -> None:
        table = Table()
        assert table.take(*old) == table.take(*new)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ((1,), (2,)),
            ((1, 2, 3), (1, 4, 5)),  # conversations open alike
            ((1, 2, 3), (1, 2, 4, 5, 6)),
            ((1, *LONG), (1, 2, 3)),
            (LONG, (1, LONG[-1], 2, 3)),  # a "continue" that stands in both
            ((1, 2), (3, 2, 1)),
            (LONG, (1, 2, 3)),
            (LONG, ()),
            ((), ()),
            ((), (1,)),
        ],
    )
    def test_not_enough_in_common(self, old: Sequence[int], new: Sequence[int]) -> None:
        table = Table()
        assert table.take(*old) != table.take(*new)

    def test_the_longest_run_wins_and_then_the_most_recently_used(self) -> None:
        table = Table()
        assert table.take(*LONG[:20], *range(20)) == "c1"
        assert table.take(50, *LONG[10:30], *range(30, 70)) == "c2"
        assert table.take(7, *LONG[5:20], *range(14, 20), 8, 9) == "c1"
        for value in ("a", "b"):
            table.take(*LONG[:4], ids=session(value), model="other")
            table.take(*LONG[:6], ids=session(value), model="other")
        assert table.take(*LONG[:7], model="other") == "c4"

    def test_an_append_goes_before_a_longer_run(self) -> None:
        table = Table()
        assert table.take(1, ids=session("a")) == table.take(1, 2, 3, ids=session("a")) == "c1"
        assert table.take(1, ids=session("b")) == "c2"
        assert table.take(1, 2, 4) == "c2"

    def test_models_do_not_meet(self) -> None:
        table = Table()
        assert table.take(1, 2, 3, model="a") != table.take(1, 2, 3, 4, model="b")

    def test_the_opening_does_not_count(self) -> None:
        table = Table()
        assert table.take(1, opening=5) == table.take(1, 2, 3, opening=6) == "c1"

    def test_a_find_changes_nothing(self) -> None:
        table = Table(max_known=2, max_passing=2)
        table.take(1)
        for first in (2, 3):
            table.take(first)
        for _ in range(3):
            assert table.all.find((), turn(2), "m") is not None
            assert table.all.find(session("x"), turn(9), "m") is None
        table.take(4)
        assert table.all.find((), turn(2), "m") is None  # it was the one used longest ago all the same
        assert table.all.find((), turn(3), "m") is not None

    @given(st.lists(st.integers(0, 4), max_size=40), st.randoms(use_true_random=False))
    def test_however_conversations_interleave(self, order: list[int], chance: random.Random) -> None:
        """Each with its own first message and much in common; a turn adds the answer and one or two messages."""
        table = Table()
        histories = [[1000 + which] for which in range(5)]
        keys: dict[int, str] = {}
        fresh = itertools.count(2000)
        for which in order:
            history = histories[which]
            assert keys.setdefault(which, key := table.take(*history)) == key
            history += [chance.choice([1, 2, next(fresh)]) for _ in range(chance.randint(1, 3))]
        assert len(set(keys.values())) == len(keys) == len(table.all)

    @given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=30))
    def test_any_requests_keep_the_table_sound(self, requests: list[list[int]]) -> None:
        table = Table(max_known=3, max_passing=2)
        for messages in requests:
            table.take(*messages)
            assert table.all.find((), turn(*messages), "m") is not None or not messages
            assert len(table.all) <= 5
        for conversation in table.all:
            table.all.forget(conversation.key)
        assert len(table.all) == 0
        assert all(table.all.find((), turn(*messages), "m") is None for messages in requests)


class TestById:
    def test_a_known_id_decides(self) -> None:
        table = Table()
        assert table.take(1, ids=session("a")) == "c1"
        assert table.take(2, ids=session("b")) == "c2"
        assert table.take(*LONG, ids=session("a")) == "c1"
        assert table.take(*LONG, 1, ids=session("b")) == "c2"

    def test_the_most_trusted_known_id_decides(self) -> None:
        table = Table()
        table.take(1, ids=[("first", "a")])
        table.take(2, ids=[("second", "a")])
        assert table.take(3, ids=[("first", "new"), ("second", "a")]) == "c2"
        assert table.take(4, ids=[("first", "a"), ("second", "a")]) == "c1"
        # The same value from another source is another id.
        assert table.take(5, ids=[("third", "a")]) == "c3"

    def test_a_new_id_from_a_stable_source_is_a_fork(self) -> None:
        table = Table()
        table.take(1, 2, 3, ids=session("a"))
        table.take(1, 2, 3, 4, 5, ids=session("a"))
        assert table.take(1, 2, 3, 4, 5, 6, ids=session("b")) == "c2"
        assert table.take(1, 2, 3, 4, 5, 7, ids=session("a")) == "c1"
        assert table.take(1, 2, 3, 4, 5, 6, 8, ids=session("b")) == "c2"

    def test_an_id_that_changes_with_every_request_is_none(self) -> None:
        table = Table()
        for count in range(1, 40):
            assert table.take(*LONG[:count], ids=[("x-request", str(count))]) == "c1"
        assert table.take(1, ids=[("x-request", "other")]) == "c2"

    def test_slotpins_own_header_is_believed_at_once(self) -> None:
        table = Table()
        assert table.take(1, ids=[("x-slotpin-session", "one")]) == "c1"
        assert table.take(1, ids=[("x-slotpin-session", "two")]) == "c2"
        assert table.take(1, 2, 3, ids=[("x-slotpin-session", "one")]) == "c1"

    def test_retries_do_not_make_it_stable(self) -> None:
        table = Table()
        for count in range(1, 10):
            for _ in range(3):
                assert table.take(*LONG[:count], ids=session(str(count))) == "c1"

    def test_a_stable_id_beside_one_that_changes(self) -> None:
        table = Table()
        for count in range(1, 5):
            assert table.take(*LONG[:count], ids=[("a", str(count)), ("b", "stable")]) == "c1"
        assert table.take(*LONG[:5], ids=[("a", "5"), ("b", "fork")]) == "c2"

    def test_an_id_may_come_late_or_be_missing(self) -> None:
        table = Table()
        assert table.take(1) == table.take(1, 2, ids=session("a")) == "c1"
        assert table.take(1, 2, 3) == table.take(1, 2, 3, 4, ids=session("a")) == "c1"

    @pytest.mark.parametrize("order", set(itertools.permutations("aaabbb")))
    def test_two_that_open_alike_part_when_their_ids_come_back(self, order: tuple[str, ...]) -> None:
        """After the third turn of both, at the latest, each has its own conversation for good."""
        table = Table()
        histories = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}
        fresh = itertools.count(10)
        for name in (*order, "a", "b"):
            keys = {name: table.take(*histories[name], ids=session(name)) for name in (name,)}
            histories[name].append(next(fresh))
        for name in "abba":
            keys.setdefault(name, key := table.take(*histories[name], ids=session(name)))
            assert keys[name] == key
            histories[name].append(next(fresh))
        assert keys["a"] != keys["b"]

    def test_by_id_alone(self) -> None:
        table = Table()
        table.take(1, ids=session("a"))
        found = table.all.named([("x", "a"), *session("a")])
        assert found is not None and found.key == "c1"
        assert table.all.named([]) is None
        assert table.all.named(session("b")) is None
        table.all.forget("c1")
        assert table.all.named(session("a")) is None
        assert table.take(1, ids=session("a")) == "c2"  # a name is never used again

    def test_long_ids_are_kept_as_digests(self) -> None:
        table = Table()
        assert table.take(1, ids=session("x" * 1000)) == table.take(2, ids=session("x" * 1000)) == "c1"
        assert table.take(3, ids=session("x" * 1001)) == "c2"
        assert table.all.named(session("x" * 1000)) is not None
        assert all(len(seen.value) <= 200 for found in table.all for seen in found.ids.values())


class TestExtended:
    def extended(self, table: Table, *messages: int, opening: int = 7, model: str = "m") -> str | None:
        found = table.all.extended_by(turn(*messages, opening=opening), model)
        return None if found is None else found.key

    def test_all_messages_and_more(self) -> None:
        table = Table()
        table.take(1, 2, 3, opening=7)
        table.take(50, opening=7)
        assert self.extended(table, 1, 2, 3, 4) == self.extended(table, 1, 2, 3, 4, 5, 6) == "c1"
        for messages in [(1, 2, 3), (1, 2), (1, 2, 9, 4), (9, 1, 2, 3, 4), ()]:
            assert self.extended(table, *messages) is None
        assert self.extended(table, 1, 2, 3, 4, opening=6) is None
        assert self.extended(table, 1, 2, 3, 4, model="other") is None

    def test_the_longest(self) -> None:
        table = Table()
        for messages in [(1, 2), (1, 2, 3, 4), (1, 2, 3)]:
            table.take(*messages, opening=7, ids=session("a"))
            table.take(*messages, opening=7, ids=session("a"))
            table.take(*messages, 8, ids=session(str(messages)))
        assert self.extended(table, 1, 2, 3, 4) == "c1"


class TestBounds:
    def test_single_requests_push_out_no_conversation(self) -> None:
        table = Table(max_known=8, max_passing=8)
        assert table.take(1, ids=session("first")) == "c1"
        second = table.take(2, ids=session("second"))
        assert table.take(2, 3, 4, ids=session("second")) == second
        for number in range(10_000):
            table.take(1000 + number, ids=session(f"once {number}"))
            assert len(table.all) <= 16
        assert table.take(1, 5, 6, ids=session("first")) == "c1"
        assert table.take(2, 3, 4, 5) == second
        assert sum(1 for _ in table.all) == len(table.all) == 10

    def test_nothing_is_left_of_what_was_pushed_out(self) -> None:
        table = Table(max_known=4, max_passing=4)
        for number in range(1000):
            table.take(*range(number, number + 30), ids=[("a", str(number)), ("b", str(number))])
            table.take(*range(number, number + 30), number, ids=[("a", str(-number))])
        sizes = {name: len(value) for name, value in vars(table.all).items() if hasattr(value, "__len__")}
        assert sizes and all(size <= 150 for size in sizes.values()), sizes

    def test_the_conversation_used_longest_ago_goes_first(self) -> None:
        table = Table(max_known=2, max_passing=2)
        for first in (1, 2, 1, 3):
            table.take(first)
            table.take(first, 9)
        kept = [found.key for found in table.all]
        assert "c1" in kept and "c3" in kept and "c2" not in kept


def ids_of(headers: dict[bytes, bytes], **members: Any) -> list[tuple[str, str]]:
    body = read_body(json.dumps(members).encode())
    return session_ids(headers.get, body)


class TestSessionIds:
    def test_headers_come_before_fields_in_their_order(self) -> None:
        headers = {b"session_id": b"s", b"x-session-affinity": b"a", b"x-client-request-id": b"r"}
        assert ids_of(headers, prompt_cache_key="k") == [
            ("x-session-affinity", "a"),
            ("session_id", "s"),
            ("prompt_cache_key", "k"),
        ]
        assert ids_of({}) == []

    def test_a_name_that_is_both_counts_once(self) -> None:
        assert ids_of({b"session_id": b"header"}, session_id="field") == [("session_id", "header")]
        assert ids_of({}, session_id="field") == [("session_id", "field")]

    @pytest.mark.parametrize("odd", [None, "", [], {}, ["x"], True, 1.5])
    def test_odd_values_are_no_ids(self, odd: object) -> None:
        assert ids_of({b"session_id": b""}, prompt_cache_key=odd, session_id=odd, metadata={"user_id": odd}) == []
        assert ids_of({}, metadata=odd) == []

    def test_numbers_are(self) -> None:
        assert ids_of({}, session_id=0) == [("session_id", "0")]

    def test_a_users_id_is_no_session(self) -> None:
        uuid = "0f1e2d3c-0000-4000-8000-123456789abc"
        for value in (f"user_12ab_account__session_{uuid}", json.dumps({"device_id": "d", "session_id": uuid})):
            assert ids_of({}, metadata={"user_id": value}) == [("metadata.user_id", uuid)]
        for value in ("alice", "user_12ab", "session", json.dumps({"device_id": "0123456789"})):
            assert ids_of({}, metadata={"user_id": value}) == []

    def test_other_names_may_be_given(self) -> None:
        text = b'{"messages":[{"chat":{"id":"no"}}],"chat":{"id":"yes"},"value":"v","\xc3\xa9 x":1}'
        body = read_body(b"\xef\xbb\xbf" + text)
        names = ["chat.id", "value", "é x", "chat.id.more", "chat", "none"]
        found = session_ids({b"x-mine": b"m"}.get, body, Sources(["X-Mine"], names))
        assert found == [("X-Mine", "m"), ("chat.id", "yes"), ("value", "v"), ("é x", "1")]
        assert session_ids({b"x-mine": b"m"}.get, None, Sources(["x-mine"], names)) == [("x-mine", "m")]

    def test_long_ones_are_digested(self) -> None:
        ((_, value),) = ids_of({}, session_id="x" * 10_000)
        assert len(value) <= 200
        assert ids_of({}, session_id="x" * 9_999) != [("session_id", value)]


def test_what_is_kept_of_a_conversation() -> None:
    conversation = Conversations().take(None, session("a"), turn(1, 2), None, 5.0)
    assert isinstance(conversation, Conversation)
    assert (conversation.key, conversation.model, conversation.turns) == ("c1", None, 1)
    assert (conversation.last_used, conversation.left) == (5.0, None)


class TestSubAgents:
    def test_with_their_parents_id_have_conversations_of_their_own(self) -> None:
        table = Table()
        ids = session("parent")
        assert table.take(1, ids=ids, opening=10) == "c1"
        assert table.take(1, 2, 3, ids=ids, opening=10) == "c1"
        assert table.take(7, ids=ids, opening=20) == "c2"
        assert table.take(7, 8, 9, ids=ids, opening=20) == "c2"
        assert table.take(1, 2, 3, 4, 5, ids=ids, opening=10) == "c1"
        assert table.take(8, 9, ids=ids, opening=30) == "c3"
        side = table.all.named(ids)
        assert side is not None and side.key == "c1"

    def test_under_a_long_id_it_is_found_again(self) -> None:
        """The id with its opening is longer than what is kept as it is."""
        table, ids = Table(), session("x" * 195)
        assert table.take(1, ids=ids) == "c1"
        for message in (20, 30):
            assert table.take(message, ids=ids, opening=2**63) == "c2"

    def test_another_system_text_alone_makes_no_sub_agent(self) -> None:
        """Agents put the date into it."""
        table = Table()
        assert table.take(1, ids=session("a"), opening=10) == table.take(1, 2, 3, ids=session("a"), opening=11)

    def test_a_compaction_alone_makes_no_sub_agent(self) -> None:
        table = Table()
        assert table.take(1, 2, 3, ids=session("a"), opening=10) == table.take(4, ids=session("a"), opening=10)


def test_equal_messages_by_the_thousand_are_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of them would be compared with all the others."""
    table = Table()
    table.take(*[1] * 5000)
    looked_at = 0
    compare = conversations._Run.around

    def counting(*arguments: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return compare(*arguments)

    monkeypatch.setattr(conversations._Run, "around", counting)
    table.take(2, *[1] * 5000)
    assert 0 < looked_at < 1000
