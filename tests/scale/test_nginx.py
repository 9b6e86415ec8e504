"""deploy/nginx/nginx.conf in front of real nodes."""

from __future__ import annotations

from pathlib import Path

from tests.real.client import OpenRequest
from tests.scale.cluster import CHAT, Session, nginx, nodes
from tests.support.processes import wait_until


def test_sessions_stay_and_a_nodes_death_moves_only_its_own(tmp_path: Path) -> None:
    with nodes(tmp_path) as cluster, nginx(tmp_path, cluster) as balancer:
        sessions = [Session(number) for number in range(24)]
        for session in sessions * 2:
            session.turn(balancer.url)
        assert {session.nodes[0] for session in sessions} == {node.address for node in cluster}
        assert [session.name for session in sessions if len(set(session.nodes)) != 1] == []

        # A token is there while the answer goes on.
        streaming = next(session for session in sessions if session.nodes[0] == cluster[0].address)
        streaming.say()
        body = streaming.body(3000, stream=True, ignore_eos=True)
        stream = OpenRequest(balancer.url + CHAT, body, streaming.headers)
        stream.read_until(b"data: ")
        assert not cluster[0].server.idle

        victim = cluster[1]
        victim.kill()
        others = [session for session in sessions if session is not streaming]
        for session in others:
            session.turn(balancer.url)
            # A server that was tried before stands before the one that answered.
            session.nodes[-1] = session.nodes[-1].split(", ")[-1]
        moved = [session for session in others if session.nodes[0] == victim.address]
        assert moved
        assert [session.name for session in moved if session.nodes[2] == victim.address] == []
        assert all(len(set(session.nodes)) == 1 for session in others if session not in moved)

        assert not cluster[0].server.idle
        stream.close()
        wait_until(lambda: bool(cluster[0].slotpin.events("exchange", outcome="client_left")), "slotpin sees it")
