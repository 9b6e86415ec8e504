"""deploy/haproxy/haproxy.cfg in front of real nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Event

import pytest

from tests.real.client import OpenRequest, fetch
from tests.scale.cluster import CHAT, HEADERS, Balancer, Node, Session, haproxy, nodes
from tests.support.processes import wait_until

SESSIONS = 60
CLIENTS = 6
STREAMED = 1500


@dataclass(frozen=True, slots=True)
class Asked:
    session: Session
    started: float
    node: str
    """Empty where the request failed."""
    problem: str


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Node]]:
    with nodes(tmp_path) as started:
        yield started


@pytest.fixture
def balancer(tmp_path: Path, cluster: list[Node]) -> Iterator[Balancer]:
    with haproxy(tmp_path, cluster) as (started,):
        yield started


def everyone(sessions: Sequence[Session], url: str) -> None:
    """A turn of each, some at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda session: session.turn(url), sessions))


def ask(session: Session, url: str) -> Asked:
    started = time.monotonic()
    try:
        return Asked(session, started, session.turn(url).headers["x-slotpin-node"], "")
    except (AssertionError, OSError, HTTPException, ValueError) as problem:  # an error status, broken off, half of it
        session.messages.pop()
        return Asked(session, started, "", repr(problem))


def turns_on(node: Node) -> int:
    return len(node.slotpin.exchanges())


def test_sixty_sessions_are_not_split(cluster: list[Node], balancer: Balancer) -> None:
    sessions = [Session(number) for number in range(SESSIONS)]
    for _ in range(3):
        everyone(sessions, balancer.url)
    assert [session.name for session in sessions if len(set(session.nodes)) != 1] == []
    share = Counter(node for session in sessions for node in session.nodes)
    assert {node.name: turns_on(node) for node in cluster} == share
    print(f"sessions on the nodes: {sorted(count // 3 for count in share.values())}")
    assert len(share) == len(cluster)


def test_a_nodes_death_under_load_moves_only_its_sessions(cluster: list[Node], balancer: Balancer) -> None:
    sessions = [Session(number) for number in range(SESSIONS)]
    everyone(sessions, balancer.url)
    home = {session.name: session.nodes[0] for session in sessions}
    streaming = {node.name: next(s for s in sessions if home[s.name] == node.name) for node in cluster}
    victim = cluster[1]
    streams = {}
    for name, session in streaming.items():
        session.say()
        body = session.body(STREAMED, stream=True, ignore_eos=True)
        streams[name] = OpenRequest(balancer.url + CHAT, body, {**session.headers, "Connection": "close"})
        streams[name].read_until(b"data: ")
        assert streams[name].header("x-slotpin-node") == name

    talking = [session for session in sessions if session not in streaming.values()]
    killed = Event()
    asked: list[Asked] = []

    def talk(own: Sequence[Session]) -> None:
        rounds = 0
        while rounds < 2:
            after = killed.is_set()
            asked.extend(ask(session, balancer.url) for session in own)
            rounds += after  # two whole rounds of new requests

    with ThreadPoolExecutor(CLIENTS) as pool:
        talks = [pool.submit(talk, talking[number::CLIENTS]) for number in range(CLIENTS)]
        wait_until(lambda: len(asked) >= len(talking) // 2, "the load runs")
        victim.kill()
        dead = time.monotonic()
        killed.set()
        for done in talks:
            done.result()

    new = [each for each in asked if each.started > dead]
    failed = [each for each in asked if each.problem]
    print(f"{len(asked)} requests, {len(new)} after the death, {len(failed)} broken off by it")
    assert len(new) >= 2 * len(talking)
    assert [each for each in new if each.problem] == []
    assert [each for each in failed if home[each.session.name] != victim.name] == []
    for session in talking:
        later = {each.node for each in new if each.session is session}
        assert len(later) == 1
        assert (later == {home[session.name]}) is (home[session.name] != victim.name)
    moved = sum(home[session.name] == victim.name for session in talking)
    print(f"{moved} of {len(talking)} sessions moved")
    assert moved

    for name, stream in streams.items():
        received = stream.read_to_end()
        assert (b"data: [DONE]" in received) is (name != victim.name), name
        # The end of chunked transfer coding: what was broken off must not look as if it were whole.
        assert received.endswith(b"\r\n0\r\n\r\n") is (name != victim.name), name


def test_balancers_share_where_sessions_went(tmp_path: Path, cluster: list[Node]) -> None:
    """Sessions that moved stay where they went when their node is back, also through a balancer that saw none of it."""
    sessions = [Session(number) for number in range(24)]
    victim = cluster[0]
    with haproxy(tmp_path, cluster, count=2) as (one, other):
        everyone(sessions, one.url)
        victim.kill()
        everyone(sessions, one.url)
        victim.start()
        wait_until(victim.ready, "slotpin is ready")
        wait_until(lambda: {one.status(victim), other.status(victim)} == {"UP"}, "the node is back")
        wait_until(lambda: other.known == len(sessions), "the table has come over")
        everyone(sessions, other.url)
    moved = [session for session in sessions if session.nodes[0] == victim.name]
    assert moved
    assert [session.name for session in sessions if session.nodes[1] != session.nodes[2]] == []
    assert [session.name for session in moved if victim.name in session.nodes[1:]] == []
    assert all(len(set(session.nodes)) == 1 for session in sessions if session not in moved)


def test_side_requests_reach_their_conversations_node(cluster: list[Node], balancer: Balancer) -> None:
    """By the session where they carry it; without one, to the node that their machine used last."""
    by_node: dict[str, Session] = {}
    for number in range(SESSIONS):
        session = Session(number, header=HEADERS[0])
        session.turn(balancer.url)
        by_node.setdefault(session.nodes[0], session)
    one, other, _ = by_node.values()
    side = {"messages": [{"role": "user", "content": "Summarise."}], "max_tokens": 4}
    for now, before in ((one, other), (other, one), (one, other)):
        before.turn(balancer.url)
        now.turn(balancer.url)
        bare = fetch(balancer.url + CHAT, side)
        assert bare.headers["x-slotpin-node"] == now.nodes[0]
        named = fetch(f"{balancer.url}/compactor{CHAT}", side, before.headers)
        assert named.headers["x-slotpin-node"] == before.nodes[0]
        assert (named.status, named.reason) == (200, "pinned")


def test_a_drained_node_keeps_its_sessions_and_takes_no_new_ones(cluster: list[Node], balancer: Balancer) -> None:
    old = [Session(number) for number in range(12)]
    everyone(old, balancer.url)
    drained = next(node for node in cluster if node.name == old[0].nodes[0])
    balancer.command(f"set server slotpin/{drained.name} state drain")
    new = [Session(100 + number) for number in range(12)]
    everyone([*old, *new], balancer.url)
    assert [session.name for session in old if len(set(session.nodes)) != 1] == []
    assert [session.name for session in new if session.nodes == [drained.name]] == []


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_is_seen_by_its_node(cluster: list[Node], balancer: Balancer, stream: bool) -> None:
    session = Session(1)
    session.turn(balancer.url)
    node = next(node for node in cluster if node.name == session.nodes[0])
    session.say()
    request = OpenRequest(balancer.url + CHAT, session.body(8000, stream=stream, ignore_eos=True), session.headers)
    wait_until(lambda: not node.server.idle, "it runs")
    request.close()
    wait_until(lambda: bool(node.slotpin.events("exchange", outcome="client_left")), "slotpin sees it")


def test_a_node_without_its_llama_server_is_taken_out(cluster: list[Node], balancer: Balancer) -> None:
    sessions = [Session(number) for number in range(9)]
    everyone(sessions, balancer.url)
    node = next(node for node in cluster if node.name == sessions[0].nodes[0])
    node.server.kill()
    wait_until(lambda: balancer.status(node) == "DOWN", "the check fails")
    everyone(sessions, balancer.url)
    assert [session.name for session in sessions if session.nodes[1] == node.name] == []
