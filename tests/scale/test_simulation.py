"""What the simulation says of a turn's cache is what real nodes show."""

from __future__ import annotations

from pathlib import Path

from bench.scale_cluster import Node
from slotpin.pinning.reuse import ENDING
from tests.scale.cluster import SLOTS, Session, haproxy, mixed, nodes

SESSIONS, TURNS = 60, 4


def test_simulated_nodes_keep_what_real_ones_keep(tmp_path: Path) -> None:
    """One request at a time, by a balancer that chose the node; more conversations than slots."""
    simulated = {f"node{number}": Node(SLOTS) for number in (1, 2, 3)}
    sessions = [Session(number) for number in range(SESSIONS)]
    kept = {True: 0, False: 0}
    with nodes(tmp_path) as cluster, haproxy(tmp_path, cluster) as (balancer,):
        for now, session in enumerate(mixed(sessions, TURNS, seed=1)):
            before = session.left
            answer = session.turn(balancer.url)
            slot, held = simulated[session.nodes[-1]].place(session.name, float(now))
            simulated[session.nodes[-1]].run(slot, session.name, session.left, float(now), 0.5)
            assert answer.slot == slot
            if before:
                found = answer.json["timings"]["cache_n"] >= before - ENDING
                assert found is (held == before), (session, answer.json["timings"])
                kept[found] += 1
    print(f"{kept[True]} of {sum(kept.values())} turns kept their cache")
    # Both happen often enough to mean something.
    assert min(kept.values()) > 20
