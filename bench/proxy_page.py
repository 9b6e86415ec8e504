"""The figures of `bench.proxy` as tables, and what became of the goals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.proxy_measures import METRICS, Metric

TITLES = {
    "small": "Short requests, short answers",
    "streams": "Streams",
    "bodies": "Large requests, role from the body",
    "path": "Large requests, role from the path",
    "memory": "Memory",
    "abort": "A client leaves during prefill",
}


@dataclass(slots=True)
class Results:
    """By metric and target one figure a round; `missing` says why a target is not there, `failed` why a measure of it
    is not, by target and measure."""

    rounds: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, measure: str, target: str, figures: dict[str, float]) -> None:
        for key, figure in figures.items():
            self.rounds[f"{measure}.{key}"][target].append(figure)

    def series(self, metric: Metric, target: str) -> list[float]:
        """One figure a round; what the target adds where the metric is of that."""
        found = self.rounds.get(metric.key, {}).get(target, [])
        if (target, metric.key.partition(".")[0]) in self.failed:
            return []
        if not metric.added:
            return found
        direct = self.rounds.get(metric.key, {}).get("direct", [])
        return [figure - base for figure, base in zip(found, direct, strict=False)] if target != "direct" else found

    def median(self, key: str, target: str) -> float | None:
        found = self.series(_METRICS[key], target)
        return statistics.median(found) if found else None

    def ratio(self, key: str, target: str, other: str) -> float | None:
        """The median of the rounds' ratios."""
        pairs = zip(self.series(_METRICS[key], target), self.series(_METRICS[key], other), strict=False)
        found = [one / two for one, two in pairs if two > 0]
        return statistics.median(found) if found else None


_METRICS = {metric.key: metric for metrics in METRICS.values() for metric in metrics}


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure` is of a target; `limit` and `further` bound it from above, or from below where more is better."""

    text: str
    figure: Callable[[Results, str], float | None]
    limit: float
    further: float | None = None
    unit: str = "x"
    higher: bool = False

    def verdict(self, results: Results, target: str) -> str:
        figure = self.figure(results, target)
        if figure is None:
            return "-"
        text = f"{shown(figure)} {self.unit}"
        for bound, word in ((self.further, "further"), (self.limit, "yes")):
            if bound is not None and (figure >= bound if self.higher else figure <= bound):
                return f"{text}, {word}"
        return f"{text}, **no**"

    @property
    def bounds(self) -> str:
        sign = "≥" if self.higher else "≤"
        further = f"; further {sign} {self.further:g}" if self.further is not None else ""
        return f"{sign} {self.limit:g} {self.unit}{further}"


def _to(other: str, key: str) -> Callable[[Results, str], float | None]:
    return lambda results, target: results.ratio(key, target, other)


def _of(key: str) -> Callable[[Results, str], float | None]:
    return lambda results, target: results.median(key, target)


def _above_nginx(key: str) -> Callable[[Results, str], float | None]:
    def figure(results: Results, target: str) -> float | None:
        ours, theirs = results.median(key, target), results.median(key, "nginx")
        return ours - theirs if ours is not None and theirs is not None else None

    return figure


GOALS: Sequence[Goal] = (
    Goal("added p50, 1 connection, to nginx", _to("nginx", "small.p50.1"), 3, 2),
    Goal("added p50, 1 connection, to naive", _to("naive", "small.p50.1"), 0.25),
    Goal("added p50, 1 connection, to LiteLLM", _to("litellm", "small.p50.1"), 0.01),
    Goal("requests a second, 64 connections, to nginx", _to("nginx", "small.rate.64"), 0.35, 0.5, higher=True),
    Goal("added time to the first chunk, to nginx", _to("nginx", "streams.first"), 2, 1.5),
    Goal("added p50 a chunk, 16 x 100/s, to nginx", _to("nginx", "streams.p50.16 x 100/s"), 1.7, 1.2),
    Goal("added p50 a chunk, 64 x 50/s, to nginx", _to("nginx", "streams.p50.64 x 50/s"), 1.7, 1.2),
    Goal("CPU a chunk, 16 x 100/s, to nginx", _to("nginx", "streams.cpu.16 x 100/s"), 1.3, 1.1),
    Goal("CPU a chunk, 64 x 50/s, to nginx", _to("nginx", "streams.cpu.64 x 50/s"), 1.3, 1.1),
    Goal("chunks a second at full speed, to nginx", _to("nginx", "streams.burst"), 0.8, 1, higher=True),
    Goal("5 MB, role from the path, to nginx", _to("nginx", "path.p50.5 MB"), 1.5, 1),
    Goal("5 MB, role from the body", _of("bodies.p50.5 MB"), 13, 6, unit="ms"),
    Goal("5 MB, role from the body, to naive", _to("naive", "bodies.p50.5 MB"), 1 / 9),
    Goal("20 MB, role from the body: peak growth", _of("bodies.rss.20 MB"), 60, unit="MB"),
    Goal("20 MB, role from the path: peak growth", _of("path.rss.20 MB"), 6, unit="MB"),
    Goal("others' longest delay, above nginx's", _above_nginx("bodies.others"), 10, unit="ms"),
    Goal("memory with 1,000 idle streams", _of("memory.idle"), 40, 30, unit="MB"),
    Goal("left in prefill, seen within 20 ms", _of("abort.at_once"), 100, unit="%", higher=True),
)


def tables(results: Results, measures: Sequence[str], targets: Sequence[str]) -> str:
    """Markdown."""
    there = [target for target in targets if target not in results.missing]
    lines: list[str] = []
    for measure in measures:
        lines += [f"## {TITLES[measure]}", ""]
        lines += [f"| | {' | '.join(there)} |", f"| --- |{' ---: |' * len(there)}"]
        for metric in METRICS[measure]:
            cells = [_cell(results, metric, target) for target in there]
            lines.append(f"| {metric.title}{f', {metric.unit}' if metric.unit else ''} | {' | '.join(cells)} |")
        lines.append("")
    lines += [f"- {target}: not measured, {reason}" for target, reason in results.missing.items()]
    lines += [f"- {target}, {TITLES[measure]}: {reason}" for (target, measure), reason in results.failed.items()]
    return "\n".join(lines)


def goals(results: Results) -> str:
    """Markdown; empty where none could be measured."""
    lines = ["| goal | bound | slotpin | slotpin, pinning off | bare |", "| --- | --- | --- | --- | --- |"]
    for goal in GOALS:
        verdicts = [goal.verdict(results, target) for target in ("slotpin", "slotpin-off", "bare")]
        if set(verdicts) != {"-"}:
            lines.append(f"| {goal.text} | {goal.bounds} | {' | '.join(verdicts)} |")
    return "\n".join(["## Goals", "", *lines, ""]) if len(lines) > 2 else ""


def _cell(results: Results, metric: Metric, target: str) -> str:
    figure = results.median(metric.key, target)
    if figure is None:
        return "-"
    return f"({shown(figure)})" if metric.added and target == "direct" else shown(figure)


def shown(figure: float) -> str:
    """Three digits that count."""
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"
