"""`/slotpin/metrics`: the totals in the form that Prometheus reads, made when it asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from slotpin import __version__
from slotpin.observe.records import OUTCOMES, UNDER_WAY, WAITING
from slotpin.observe.totals import Histogram
from slotpin.pinning.reuse import Cause
from slotpin.pinning.roles import Role

if TYPE_CHECKING:
    from slotpin.proxy.state import State


def exposition(state: State, accept: str) -> tuple[bytes, str]:
    """The metrics and their content type, in the format that the Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(_Totals(state))
    ProcessCollector(registry=registry)
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # an Accept header with a version that is none
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


class _Totals(Collector):
    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, totals = self._state, self._state.observer.totals
        yield InfoMetricFamily("slotpin_build", "The version that runs.", {"version": __version__})
        yield _counter(
            "slotpin_exchanges",
            "Generating requests that have ended.",
            ("role", "reason", "outcome"),
            totals.exchanges.items(),
        )
        # From 0 on: in a series that begins at 1 no increase is seen, so nothing could be told from its first.
        outcomes = {(role.value, outcome): 0 for role in Role for outcome in OUTCOMES}
        for (role, _, outcome), count in totals.exchanges.items():
            outcomes[role, outcome] = outcomes.get((role, outcome), 0) + count
        yield _counter("slotpin_outcomes", "The same by how they ended.", ("role", "outcome"), outcomes.items())
        tokens = [((role, "evaluated"), count) for role, count in totals.evaluated.items()]
        tokens += [((role, "reused"), count) for role, count in totals.cached.items()]
        yield _counter("slotpin_prompt_tokens", "Prompt tokens by what became of them.", ("role", "source"), tokens)
        yield _counter("slotpin_generated_tokens", "Tokens generated.", ("role",), _by_one(totals.generated))
        yield _counter(
            "slotpin_prompt_tokens_lost",
            "Prompt tokens that a conversation's last turn had left and that were evaluated again.",
            ("cause",),
            _by_one({cause.value: totals.lost[cause] for cause in Cause}),
        )
        yield _counter(
            "slotpin_prompt_evaluation_seconds",
            "What llama-server says that evaluating prompts took.",
            ("role",),
            _by_one({role: ms / 1000 for role, ms in totals.evaluation_ms.items()}),
        )
        yield _counter(
            "slotpin_spared_evaluation_seconds",
            "What evaluating the re-used tokens would have taken, by the server's own time a token (an estimate).",
            (),
            [((), totals.spared_ms / 1000)],
        )
        yield _histogram("slotpin_gate_wait_seconds", "Time that requests waited for their slot.", totals.waits)
        yield _histogram(
            "slotpin_added_latency_seconds",
            "Time in slotpin from a request's last byte until it went out, without the wait at the gate.",
            totals.added,
        )
        yield _histogram("slotpin_probe_seconds", "Time that looks at /slots took.", state.probe.times)
        yield _counter("slotpin_probe_failures", "Looks at /slots that showed none.", (), [((), state.probe.failed)])
        yield _counter("slotpin_warnings", "Warnings, also those not logged.", ("cause",), _by_one(state.warner.totals))
        yield _counter("slotpin_relayed_requests", "Requests that do not generate.", (), [((), state.relayed)])
        shared = [server.shared for server in state.servers.values() if server.shared is not None]
        sharing = GaugeMetricFamily("slotpin_sharing", "Servers by how their slots are shared.", labels=("state",))
        for name in ("on", "settling", "lost"):
            sharing.add_metric((name,), sum(each.state == name for each in shared))
        yield sharing
        losses = sum(each.losses for each in shared)
        yield _counter("slotpin_sharing_losses", "Times that Redis was lost.", (), [((), losses)])
        now = [record.outcome for record in state.observer.under_way]
        under_way = GaugeMetricFamily(
            "slotpin_exchanges_under_way", "Generating requests that have not ended.", labels=("state",)
        )
        for name in (WAITING, UNDER_WAY):
            under_way.add_metric((name,), now.count(name))
        yield under_way


def _by_one(counts: Mapping[str, float]) -> list[tuple[tuple[str], float]]:
    return [((label,), count) for label, count in counts.items()]


def _counter(
    name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    """Its samples get `_total` at the end."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric([str(value) for value in values], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    below, buckets = 0, []
    for edge, count in zip((*map(floatToGoString, histogram.edges), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((edge, below))
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets, histogram.sum)
    return family
