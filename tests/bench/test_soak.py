"""A short `bench.soak` on the real server, and its verdict."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from bench.soak import MB, Sample, Soak, soak, table

QUIET = Sample(at=0, rss=50 * MB, descriptors=9, tasks=3, gates=0, bindings=0)
BUSY = Sample(at=70, rss=52 * MB, descriptors=30, tasks=20, gates=4, bindings=4)


def result(after: Sample, *complaints: str) -> Soak:
    counts = {("conversation", "200"): 3, ("conversation", "502"): 1}
    return Soak(2, QUIET, after, [replace(QUIET, rss=1), BUSY, BUSY], counts, 1, list(complaints))


def test_nothing_is_left_over_after_traffic_with_faults(tmp_path: Path) -> None:
    short = asyncio.run(soak(0.2, 5, tmp_path))
    # In so short a time memory says nothing.
    assert [fault for fault in short.faults if not fault.startswith("memory")] == []
    assert short.restarts == 2
    assert short.counts["conversation", "200"] > 0
    assert {kind for kind, _ in short.counts} >= {"conversation", "side request", "leaves", "nonsense", "look"}


def test_what_is_left_over_is_a_fault() -> None:
    assert result(QUIET).faults == []
    assert result(replace(QUIET, tasks=4, bindings=2)).faults == ["tasks: 1 left over", "open bindings: 2 left over"]
    assert result(replace(QUIET, rss=54 * MB)).faults == []
    assert result(replace(QUIET, rss=55 * MB)).faults == ["memory: +5.8% since the first minute"]
    assert result(QUIET, "log: a traceback").faults == ["log: a traceback"]


def test_the_table_shows_before_most_and_after() -> None:
    shown = table(result(replace(QUIET, descriptors=10)))
    assert "| descriptors | 9 | 30 | 10 |" in shown
    assert "| conversation | 4 | 200 3, 502 1 |" in shown
