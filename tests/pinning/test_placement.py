"""Which slot each conversation gets, keeps and loses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning.placement import IDLE_LIMIT, Placed, Placement
from slotpin.pinning.topology import Slot, Topology

Slots = Literal["auto", "main-only"] | tuple[int, ...]


class Server:
    """Main on slot 0, compactor on 1, and a clock that runs one second a turn."""

    def __init__(self, *sizes: int | None, main: int = 0, compactor: int = 1, slots: Slots = "auto") -> None:
        self.placement = Placement()
        self.topology = Topology(tuple(Slot(slot, size) for slot, size in enumerate(sizes)))
        self.main, self.compactor, self.slots = main, compactor, slots
        self.now = 0.0

    def place(self, key: str, busy: Collection[int] = ()) -> Placed:
        self.now += 1
        args = (self.topology, self.main, self.compactor, self.slots, busy, self.now)
        placed = self.placement.place(key, *args)
        assert self.placement.slot_of(key) == placed.slot and self.placement.owner(placed.slot) == key
        assert (placed.enough is not None) == placed.shared
        return placed

    def slot(self, key: str, busy: Collection[int] = ()) -> int:
        placed = self.place(key, busy)
        assert not placed.shared
        return placed.slot


def servers(count: int, slots: Slots = "auto") -> Server:
    return Server(*[4096] * count, slots=slots)


class TestHomes:
    def test_the_first_has_the_main_slot_and_the_others_the_free_ones(self) -> None:
        server = servers(5)
        for _ in range(3):
            assert [server.slot(key) for key in "abcd"] == [0, 2, 3, 4]

    def test_the_roles_slots_may_be_any(self) -> None:
        server = Server(*[4096] * 4, main=3, compactor=0)
        assert [server.slot(key) for key in "abcab"] == [3, 1, 2, 3, 1]

    def test_the_one_used_longest_ago_is_taken(self) -> None:
        server = servers(4)
        assert [server.slot(key) for key in "abcb"] == [0, 2, 3, 2]
        assert server.slot("d") == 3
        assert server.placement.slot_of("c") is None  # until its next turn
        assert server.slot("c") == 2

    def test_a_busy_one_only_if_all_are(self) -> None:
        server = servers(4)
        assert [server.slot(key) for key in "abc"] == [0, 2, 3]
        assert server.slot("d", busy=[2]) == 3
        assert server.slot("e", busy=[2, 3]) == 2
        assert server.slot("d", busy=[3]) == 3  # its own turn before

    def test_an_unused_one_is_not_taken_while_a_stranger_runs_there(self) -> None:
        server = servers(4)
        assert server.slot("a") == 0
        assert server.slot("b", busy=[2]) == 3

    def test_larger_ones_first_and_those_smaller_than_main_last(self) -> None:
        server = Server(4096, 4096, 1024, 4096, 8192, 2048)
        assert [server.slot(key) for key in "abcde"] == [0, 4, 3, 5, 2]
        server = Server(4096, 4096, 1024, 4096)
        assert [server.slot(key) for key in "abcbd"] == [0, 3, 2, 3, 3]  # "c" is idle longer, but in a smaller one

    def test_a_server_that_tells_no_sizes(self) -> None:
        server = Server(None, None, None, None)
        assert [server.slot(key) for key in "abc"] == [0, 2, 3]

    def test_main_is_taken_only_after_an_hour_of_silence(self) -> None:
        server = servers(3)
        assert [server.slot(key) for key in "ab"] == [0, 2]
        server.now += IDLE_LIMIT - 10
        assert [server.slot(key) for key in "bcd"] == [2, 2, 2]
        server.now += 20
        assert server.slot("e", busy=[0]) == 2  # a very long answer is no silence
        assert server.slot("f") == 0
        assert server.slot("a") == 2

    def test_what_is_forgotten_leaves_its_slot(self) -> None:
        server = servers(4)
        assert [server.slot(key) for key in "abc"] == [0, 2, 3]
        for key, slot in (("b", 2), ("a", 0)):
            server.placement.forget(key)
            assert server.placement.slot_of(key) is None and server.placement.owner(slot) is None
        assert [server.slot(key) for key in "dec"] == [0, 2, 3]

    def test_any_number_of_single_requests_leaves_the_first_where_it_is(self) -> None:
        for count in (2, 4):
            server = servers(count)
            assert server.slot("first") == 0
            for number in range(5_000):
                server.now -= 0.9
                assert server.place(f"once {number}").slot != 0
            assert server.slot("first") == 0
            sizes = [len(value) for value in vars(server.placement).values() if hasattr(value, "__len__")]
            assert sizes and max(sizes) <= 1024


class TestSettings:
    def test_a_list_restricts_the_further_ones(self) -> None:
        server = servers(5, slots=(3, 7))  # 7 is 2 on five slots
        assert [server.slot(key) for key in "abcb"] == [0, 2, 3, 2]
        assert server.slot("d") == 3

    @pytest.mark.parametrize("slots", [(), (0,), (1,), (0, 1, 5)])
    def test_a_list_without_another_slot_shares_main_and_lends_nothing(self, slots: tuple[int, ...]) -> None:
        server = servers(4 if 5 not in slots else 5, slots=slots)
        assert server.slot("a") == 0
        assert server.place("b") == Placed(0, shared=True, enough=3)

    def test_main_only_is_the_users_choice(self) -> None:
        server = servers(4, slots="main-only")
        assert [server.slot(key) for key in "abab"] == [0, 0, 0, 0]

    def test_another_list_moves_who_may_not_stay(self) -> None:
        server = servers(5)
        assert [server.slot(key) for key in "abc"] == [0, 2, 3]
        server.slots = (3, 4)
        assert [server.slot(key) for key in "abc"] == [0, 4, 3]


class TestSharing:
    def test_the_compactors_slot_is_lent_until_a_side_request_has_used_it(self) -> None:
        server = servers(2)
        assert server.slot("a") == 0
        assert server.place("b") == server.place("b") == Placed(1, shared=True, enough=3)
        server.placement.compactor_used()
        assert server.placement.slot_of("b") == 1
        assert server.place("b") == Placed(0, shared=True, enough=3)
        assert server.slot("a") == 0
        assert server.place("c").slot == 0

    def test_a_third_borrows_from_the_second(self) -> None:
        server = servers(2)
        assert [server.place(key).slot for key in "abcb"] == [0, 1, 1, 1]
        assert server.slot("a") == 0

    def test_not_while_it_is_busy_and_main_is_not(self) -> None:
        server = servers(2)
        assert [server.place(key).slot for key in "ab"] == [0, 1]
        assert server.place("c", busy=[1]).slot == 0
        assert server.place("c").slot == 0  # its tokens are there
        assert server.slot("a") == 0
        assert server.place("c").slot == 1
        assert server.place("d", busy=[0, 1]).slot == 1

    def test_how_many_slots_would_be_enough(self) -> None:
        server = servers(2)
        for _ in range(2):
            for key in "abcd":
                last = server.place(key)
        assert last == Placed(1, shared=True, enough=5)
        for number in range(20):
            assert server.place(f"once {number}").enough == 6  # single requests don't add up
        server.now += IDLE_LIMIT + 1
        server.place("a")
        assert server.place("b").enough == 3

    def test_who_shares_gets_the_main_slot_once_that_is_free(self) -> None:
        server = servers(2)
        server.placement.compactor_used()
        assert server.slot("a") == 0
        for _ in range(4):
            server.now += IDLE_LIMIT / 3
            last = server.place("b")
        assert last == Placed(0, shared=False, enough=None)
        assert server.place("a").shared


class TestNotes:
    def test_where_a_client_put_itself_it_stays(self) -> None:
        server = servers(5)
        server.placement.note("a", 3, 0)
        assert (server.placement.slot_of("a"), server.placement.owner(3)) == (3, "a")
        assert [server.slot(key) for key in "abc"] == [3, 0, 2]

    def test_a_guest_takes_nobodys_home(self) -> None:
        server = servers(4)
        assert [server.slot(key) for key in "ab"] == [0, 2]
        server.placement.note("guest", 0, server.now)
        assert server.placement.owner(0) == "guest"
        assert [server.slot(key) for key in "ab"] == [0, 2]

    def test_nobody_stays_on_the_compactors_slot(self) -> None:
        server = servers(3)
        server.placement.note("a", 1, 0)
        assert server.slot("a") == 0


class TestChanges:
    def test_other_slots_are_another_server(self) -> None:
        server = servers(4)
        assert [server.slot(key) for key in "abc"] == [0, 2, 3]
        server.topology = Topology(server.topology.slots[:3])
        assert [server.slot(key) for key in "ca"] == [0, 2]

    def test_a_restart(self) -> None:
        server = servers(2)
        server.slot("a")
        server.placement.compactor_used()
        server.placement.reset()
        assert server.placement.slot_of("a") is None and server.placement.owner(0) is None
        assert [server.place(key).slot for key in "ba"] == [0, 1]

    def test_other_sizes_alone_are_no_change(self) -> None:
        server = servers(3)
        assert [server.slot(key) for key in "ab"] == [0, 2]
        server.topology = Topology(tuple(Slot(slot, 99) for slot in range(3)))
        assert [server.slot(key) for key in "ba"] == [2, 0]


turns = st.lists(st.tuples(st.sampled_from("abcdefg"), st.sets(st.integers(0, 5)), st.integers(0, 3000)), max_size=40)


@given(st.integers(3, 6), turns)
def test_never_a_busy_slot_while_another_is_free(count: int, order: list[tuple[str, set[int], int]]) -> None:
    server = servers(count)
    for key, busy, pause in order:
        server.now += pause
        had = server.placement.slot_of(key)
        main_taken = any(server.placement.slot_of(other) == 0 for other in "abcdefg")
        slot = server.slot(key, busy)
        assert slot != 1
        if had is not None:
            assert slot == had
        elif slot in busy:
            assert busy >= set(range(2, count))
            assert main_taken or 0 in busy


@given(st.integers(2, 6), turns)
def test_no_two_conversations_have_one_home(count: int, order: list[tuple[str, set[int], int]]) -> None:
    server = servers(count)
    for key, busy, pause in order:
        server.now += pause
        placed = server.place(key, busy)
        if not placed.shared:
            others = [other for other in "abcdefg" if other != key and server.placement.slot_of(other) == placed.slot]
            assert all(server.place(other, busy).shared for other in others)
