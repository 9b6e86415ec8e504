"""Nodes, each a slotpin with its llama-server, and ways to choose among them. Which slot a turn gets on its node is
decided by slotpin's own `pinning/placement.py`."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from xxhash import xxh3_64_intdigest

from bench.scale_sessions import Session, Turn
from slotpin.pinning.placement import Placement
from slotpin.pinning.topology import Slot, Topology

MAIN, COMPACTOR = 0, 1
# Tokens a second of one request: a large model on a good GPU.
EVALUATES, GENERATES = 1500.0, 50.0
SIDE_SECONDS = 5.0
_POINTS = 64  # of a node on the hash ring


class Node:
    """What lies in each slot. No host-memory prompt cache: what was evicted is lost."""

    def __init__(self, slots: int) -> None:
        self._topology = Topology(tuple(Slot(number, None) for number in range(slots)))
        self.up, self.takes_new = True, True
        self.deaths = 0
        self.lose()

    def lose(self) -> None:
        """llama-server ends: its memory is gone, and what counts requests in flight."""
        self.flying: set[int] = set()
        self._placement = Placement()
        self._held: dict[int, tuple[str, int]] = {}
        self._free_at = [0.0] * self._topology.count

    def place(self, key: str, now: float) -> tuple[int, int]:
        """The slot for the next turn of conversation `key`, and how many of its tokens lie there."""
        busy = [slot for slot, free_at in enumerate(self._free_at) if free_at > now]
        slot = self._placement.place(key, self._topology, MAIN, COMPACTOR, "auto", busy, now).slot
        owner, tokens = self._held.get(slot, ("", 0))
        return slot, tokens if owner == key else 0

    def run(self, slot: int, key: str, tokens: int, now: float, seconds: float) -> float:
        """Leave so many tokens in the slot; when that will be, after what runs there now."""
        self._held[slot] = (key, tokens)
        self._free_at[slot] = max(now, self._free_at[slot]) + seconds
        return self._free_at[slot]

    def side(self, now: float) -> None:
        self._placement.compactor_used()
        self.run(COMPACTOR, "", 0, now, SIDE_SECONDS)


class Ring:
    """Consistent hashing: of a node that is out only its own share moves."""

    def __init__(self, nodes: int) -> None:
        points = [
            (xxh3_64_intdigest(b"%d/%d" % (node, point)), node) for node in range(nodes) for point in range(_POINTS)
        ]
        points.sort()
        self._hashes = [point for point, _ in points]
        self._nodes = [node for _, node in points]

    def walk(self, key: str) -> Iterator[int]:
        """Nodes in the order in which they would take over, again and again."""
        start = bisect_right(self._hashes, xxh3_64_intdigest(key.encode()))
        return (self._nodes[at % len(self._nodes)] for at in count(start))


class Policy(ABC):
    """`choose` picks a node that is up for a request of a session; -1 where there is none."""

    def __init__(self, nodes: Sequence[Node], seed: str) -> None:
        self._nodes = nodes
        self._rng = random.Random(f"{seed}/policy")

    @abstractmethod
    def choose(self, session: str) -> int: ...

    def changed(self, index: int) -> None:  # noqa: B027, most don't mind
        """The node has more or fewer requests in flight, or came back."""

    def _usable(self) -> bool:
        return any(node.up and node.takes_new for node in self._nodes)

    def _takes(self, index: int) -> bool:
        return self._nodes[index].up and self._nodes[index].takes_new


class Random(Policy):
    def choose(self, session: str) -> int:
        if not self._usable():
            return -1
        while not self._takes(index := self._rng.randrange(len(self._nodes))):
            pass
        return index


class RoundRobin(Policy):
    _next = -1

    def choose(self, session: str) -> int:
        if not self._usable():
            return -1
        self._next = (self._next + 1) % len(self._nodes)
        while not self._takes(self._next):
            self._next = (self._next + 1) % len(self._nodes)
        return self._next


class LeastConnections(Policy):
    """Of equals any, as a balancer's rotation gives. The heap has at least one right entry of each node that is up."""

    def __init__(self, nodes: Sequence[Node], seed: str) -> None:
        super().__init__(nodes, seed)
        self._heap: list[tuple[int, float, int]] = []
        for index in range(len(nodes)):
            self.changed(index)

    def choose(self, session: str) -> int:
        while self._heap:
            flying, _, index = self._heap[0]
            if self._takes(index) and len(self._nodes[index].flying) == flying:
                return index
            heapq.heappop(self._heap)
        return -1

    def changed(self, index: int) -> None:
        heapq.heappush(self._heap, (len(self._nodes[index].flying), self._rng.random(), index))


class Hash(Policy):
    def __init__(self, nodes: Sequence[Node], seed: str) -> None:
        super().__init__(nodes, seed)
        self._ring = Ring(len(nodes))

    def choose(self, session: str) -> int:
        if not self._usable():
            return -1
        return next(index for index in self._ring.walk(session) if self._takes(index))


class HashAndTable(Hash):
    """What deploy/haproxy does: who is in the table stays, also where its node takes nobody new."""

    def __init__(self, nodes: Sequence[Node], seed: str) -> None:
        super().__init__(nodes, seed)
        self._table: dict[str, int] = {}

    def choose(self, session: str) -> int:
        known = self._table.get(session, -1)
        if known < 0 or not self._nodes[known].up:
            known = self._table[session] = super().choose(session)
        return known


POLICIES: dict[str, type[Policy]] = {
    "hash + table": HashAndTable,
    "hash alone": Hash,
    "least connections": LeastConnections,
    "round robin": RoundRobin,
    "random": Random,
}


@dataclass(slots=True)
class Result:
    """Of turns that go on with a prompt that was evaluated once: how many, and how many found all of it again; and the
    same in tokens. `evaluated` has their new tokens too. `broken`: answers that ended with their node; they are asked
    for again."""

    turns: int = 0
    kept: int = 0
    expected: int = 0
    found: int = 0
    evaluated: int = 0
    broken: int = 0

    @property
    def turn_share(self) -> float:
        return self.kept / self.turns

    @property
    def token_share(self) -> float:
        return self.found / self.expected


@dataclass(slots=True)
class _Conversation:
    session: Session
    key: str
    turns: Iterator[Turn]
    parent: _Conversation | None = None
    agents: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Of a node, at a time. `graceful`: answers under way may end."""

    at: float
    node: int
    up: bool
    takes_new: bool
    graceful: bool = True


@dataclass(slots=True)
class Simulation:
    """Events in the order of their time; `run` once."""

    nodes: list[Node]
    policy: Policy
    result: Result = field(default_factory=Result)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self, arrivals: Iterator[Session], changes: Sequence[Change], seconds: float) -> Result:
        for change in changes:
            self._at(change.at, partial(self._change, change))
        self._arrive(arrivals)
        while self._events and self._events[0][0] < seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self.result

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _arrive(self, arrivals: Iterator[Session]) -> None:
        session = next(arrivals, None)
        if session is None:
            return

        def begin(now: float) -> None:
            self._arrive(arrivals)
            self._go_on(_Conversation(session, session.name, session.turns()), now)

        self._at(session.start, begin)

    def _change(self, change: Change, _: float) -> None:
        node = self.nodes[change.node]
        if node.up and not change.up:
            node.lose()
            node.deaths += not change.graceful
        node.up, node.takes_new = change.up, change.takes_new
        self.policy.changed(change.node)

    def _go_on(self, conversation: _Conversation, now: float) -> None:
        """The next turn, or its parent's where there is none."""
        turn = next(conversation.turns, None)
        if turn is not None:
            self._at(now + turn.after, lambda now: self._ask(conversation, turn, now))
        elif conversation.parent is not None:
            self._go_on(conversation.parent, now)

    def _ask(self, conversation: _Conversation, turn: Turn, now: float) -> None:
        index = self.policy.choose(conversation.session.name)
        if index < 0:
            self._at(now + 10, lambda now: self._ask(conversation, turn, now))
            return
        node = self.nodes[index]
        slot, held = node.place(conversation.key, now)
        found = min(held, turn.kept)
        if turn.kept:
            self.result.turns += 1
            self.result.kept += found == turn.kept
            self.result.expected += turn.kept
            self.result.found += found
            self.result.evaluated += turn.prompt - found
        seconds = (turn.prompt - found) / EVALUATES + turn.answer / GENERATES
        number, deaths = next(self._numbers), node.deaths
        node.flying.add(number)
        self.policy.changed(index)
        end = node.run(slot, conversation.key, turn.left, now, seconds)

        def answered(now: float) -> None:
            node.flying.discard(number)
            self.policy.changed(index)
            self._answered(conversation, turn, now, died=node.deaths > deaths)

        self._at(end, answered)

    def _answered(self, conversation: _Conversation, turn: Turn, now: float, died: bool) -> None:
        if died:
            self.result.broken += 1
            self._ask(conversation, turn, now)
            return
        if turn.side:
            self._side(conversation.session.name, now)
        if turn.agent:
            conversation.agents += 1
            number = conversation.agents
            agent_turns = conversation.session.turns(number)
            agent = _Conversation(conversation.session, f"{conversation.key}/{number}", agent_turns, conversation)
            self._go_on(agent, now)
        else:
            self._go_on(conversation, now)

    def _side(self, session: str, now: float) -> None:
        index = self.policy.choose(session)
        if index >= 0:
            self.nodes[index].side(now)
