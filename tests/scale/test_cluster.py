"""The simulation itself: what must hold of it whatever its figures are."""

from __future__ import annotations

from collections import Counter

from bench.scale import Scenario, losses, rolling, run
from bench.scale_cluster import POLICIES, Change, Node, Ring, Simulation
from bench.scale_sessions import Session, sessions

NODES, HOURS = 4, 1.0


def test_the_same_seed_gives_the_same_figures() -> None:
    scenario = Scenario("losses", lambda: losses(NODES, 24), NODES, HOURS)
    assert run(scenario, "least connections") == run(scenario, "least connections")


def test_one_node_is_all_the_same_to_every_policy() -> None:
    found = [run(Scenario("one", list, 1, HOURS), policy) for policy in POLICIES]
    assert all(result == found[0] for result in found)
    assert 0 < found[0].kept <= found[0].turns


def test_sessions_are_the_same_whatever_becomes_of_them() -> None:
    one, other = (list(sessions("a", 60, 3600)) for _ in range(2))
    assert one == other != list(sessions("b", 60, 3600))
    first = one[0]
    assert list(first.turns()) == list(first.turns()) != list(first.turns(agent=1))
    for before, after in zip(turns := list(first.turns()), turns[1:], strict=False):
        assert after.kept in (0, before.left)


def test_of_a_node_that_is_out_only_its_own_sessions_move() -> None:
    ring = Ring(10)
    names = [f"s{number}" for number in range(2000)]
    whole = {name: next(ring.walk(name)) for name in names}
    without = {name: next(node for node in ring.walk(name) if node != 3) for name in names}
    assert {name for name in names if whole[name] != without[name]} == {name for name in names if whole[name] == 3}
    assert max(Counter(whole.values()).values()) < 1.5 * len(names) / 10


def test_a_table_keeps_sessions_where_they_went() -> None:
    nodes = [Node(4) for _ in range(NODES)]
    table, alone = POLICIES["hash + table"](nodes, "a"), POLICIES["hash alone"](nodes, "a")
    home = table.choose("s")
    assert alone.choose("s") == home
    nodes[home].up = False
    moved = table.choose("s")
    assert moved == alone.choose("s") != home
    nodes[home].up = True
    assert (table.choose("s"), alone.choose("s")) == (moved, home)
    nodes[moved].takes_new = False
    assert table.choose("s") == moved


def test_a_death_breaks_answers_off_and_a_restart_in_order_does_not() -> None:
    for graceful in (False, True):
        nodes = [Node(4)]
        changes = [
            Change(9.0, 0, up=False, takes_new=False, graceful=graceful),
            Change(9.5, 0, up=True, takes_new=True),
        ]
        policy = POLICIES["random"](nodes, "a")
        # The first prompt alone takes longer than until the change.
        turns = Simulation(nodes, policy).run(iter([Session("s", 5.0, "a")]), changes, 3600)
        assert (turns.broken > 0) is not graceful


def test_a_drained_node_gets_nobody_new_and_is_back_after_it() -> None:
    changes = rolling(NODES, HOURS, 600)
    of_first = [change for change in changes if change.node == 0]
    assert [(change.up, change.takes_new) for change in of_first] == [(True, False), (False, False), (True, True)]
    assert of_first[1].at - of_first[0].at == 600
