"""Counts since the start, kept as plain numbers: an exchange costs a few additions, whoever looks pays for the rest."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from slotpin.observe.records import Record

# A shorter evaluation says little about the time of a token: the batch costs most of it.
TIMED_TOKENS = 64


class Histogram:
    """`edges` are upper bounds, in seconds, each one included; what is longer goes to a last bucket of its own."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges, seconds)] += 1
        self.sum += seconds


class Totals:
    """`spared_ms`: what evaluating the re-used tokens would have taken, by the server's own time a token until then."""

    def __init__(self) -> None:
        self.exchanges: Counter[tuple[str, str, str]] = Counter()  # role, reason, outcome
        self.evaluated: Counter[str] = Counter()  # by role, as are all but the last
        self.cached: Counter[str] = Counter()
        self.generated: Counter[str] = Counter()
        self.evaluation_ms: dict[str, float] = {}
        self.lost: Counter[str] = Counter()  # by cause
        self.spared_ms = 0.0
        self.waits = Histogram((0.001, 0.01, 0.1, 1, 5, 15, 60, 300, 600))
        self.added = Histogram((0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5))
        self._timed: dict[str, tuple[int, float]] = {}  # by server: tokens and ms

    def add(self, record: Record) -> None:
        role = record.role
        self.exchanges[role, record.reason, record.outcome] += 1
        self.added.observe(record.planned)
        if record.waited is not None:
            self.waits.observe(record.waited)
        if (evaluated := record.evaluated) is not None:
            self.evaluated[role] += evaluated
            self._add_cached(record, evaluated, record.cached or 0)
            self.generated[role] += record.generated or 0
        if record.lost and record.cause is not None:
            self.lost[record.cause] += record.lost

    def _add_cached(self, record: Record, evaluated: int, cached: int) -> None:
        self.cached[record.role] += cached
        tokens, ms = self._timed.get(record.server, (0, 0.0))
        if record.prompt_ms is not None:
            self.evaluation_ms[record.role] = self.evaluation_ms.get(record.role, 0.0) + record.prompt_ms
            if evaluated >= TIMED_TOKENS:
                tokens, ms = self._timed[record.server] = tokens + evaluated, ms + record.prompt_ms
        if tokens:
            self.spared_ms += cached * ms / tokens
