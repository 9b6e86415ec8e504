"""How many turns find their cache again, by how a balancer chooses the node: a simulation, the same for the same seed.

    python -m bench.scale [--quick] [--write]

`--write` renews docs/benchmarks/scale.md; it takes some minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import scale_cluster, scale_sessions
from bench.scale_cluster import POLICIES, Change, Node, Result, Simulation
from bench.scale_sessions import sessions

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "scale.md"
SEED = "slotpin"
SLOTS = 16
PER_HOUR = 60.0  # sessions that start, for each node
HOUR = 3600.0
LOST_EVERY, LOST_FOR = 24 * HOUR, 600.0  # of each node; until it is back
LOADS = 120.0  # seconds from a node's restart to its loaded model

# Nodes, and hours that are simulated: about as many turns for the large ones, which need less time for a steady figure.
SIZES = ((1, 48.0), (3, 24.0), (10, 12.0), (100, 2.0), (1000, 0.5), (3000, 0.25))
EVENT_NODES, EVENT_HOURS = 20, 8.0
SLOT_COUNTS = (4, 6, 8, 12, 16, 24, 32)
DEATHS = "each node dies once a day"


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    changes: Callable[[], Sequence[Change]]
    nodes: int = EVENT_NODES
    hours: float = EVENT_HOURS
    slots: int = SLOTS


def run(scenario: Scenario, policy: str, per_node_hour: float = PER_HOUR) -> Result:
    """The load is that of EVENT_NODES where nodes are added."""
    nodes = [Node(scenario.slots) for _ in range(scenario.nodes)]
    changes = scenario.changes()
    for change in changes:
        if change.at == 0:
            nodes[change.node].up, nodes[change.node].takes_new = change.up, change.takes_new
    seconds = scenario.hours * HOUR
    arrivals = sessions(SEED, per_node_hour * sum(node.up for node in nodes), seconds)
    return Simulation(nodes, POLICIES[policy](nodes, SEED)).run(arrivals, changes, seconds)


def losses(nodes: int, hours: float) -> list[Change]:
    """Each node dies now and then, with what it does just then."""
    rng = random.Random(f"{SEED}/losses")
    return [change for node in range(nodes) for change in _lives(rng, node, hours * HOUR)]


def _lives(rng: random.Random, node: int, seconds: float) -> Iterator[Change]:
    now = rng.expovariate(1 / LOST_EVERY)
    while now < seconds:
        yield Change(now, node, up=False, takes_new=False, graceful=False)
        yield Change(now + LOST_FOR, node, up=True, takes_new=True)
        now += LOST_FOR + rng.expovariate(1 / LOST_EVERY)


def rolling(nodes: int, hours: float, drain: float) -> list[Change]:
    """Every node restarts once, one after the other, evenly over the time; for `drain` seconds before it takes nobody
    new."""
    changes = []
    for node in range(nodes):
        at = hours * HOUR * (node + 1) / (nodes + 1)
        if drain:
            changes.append(Change(at - drain, node, up=True, takes_new=False))
        changes.append(Change(at, node, up=False, takes_new=False))
        changes.append(Change(at + LOADS, node, up=True, takes_new=True))
    return changes


def growing(nodes: int, hours: float) -> list[Change]:
    """The last third of the nodes comes one by one, over the time."""
    new = range(nodes * 2 // 3, nodes)
    absent = [Change(0, node, up=False, takes_new=False) for node in new]
    steps = [hours * HOUR * (number + 1) / (len(new) + 1) for number in range(len(new))]
    return absent + [Change(at, node, up=True, takes_new=True) for at, node in zip(steps, new, strict=True)]


def sizes(quick: bool) -> list[Scenario]:
    chosen = [(nodes, hours / 4) for nodes, hours in SIZES if nodes <= 100] if quick else list(SIZES)
    return [
        Scenario(f"{nodes:,}", lambda nodes=nodes, hours=hours: losses(nodes, hours), nodes, hours)  # type: ignore[misc]
        for nodes, hours in chosen
    ]


def events(quick: bool) -> list[Scenario]:
    nodes, hours = (6, 2.0) if quick else (EVENT_NODES, EVENT_HOURS)
    rollings = {"none": 0.0, "10 minutes": 600.0, "1 hour": 3600.0}
    return [
        Scenario("nothing happens", list, nodes, hours),
        Scenario(DEATHS, lambda: losses(nodes, hours), nodes, hours),
        *(
            Scenario(
                f"each node restarts once, drained for {name}" if drain else "each node restarts once, not drained",
                lambda drain=drain: rolling(nodes, hours, drain),  # type: ignore[misc]
                nodes,
                hours,
            )
            for name, drain in rollings.items()
        ),
        Scenario("half as many nodes again are added", lambda: growing(nodes * 3 // 2, hours), nodes * 3 // 2, hours),
    ]


def slots(quick: bool) -> list[Scenario]:
    nodes, hours = (3, 1.0) if quick else (EVENT_NODES, EVENT_HOURS / 2)
    return [Scenario(str(each), list, nodes, hours, each) for each in SLOT_COUNTS]


def measure(scenarios: Sequence[Scenario], policies: Collection[str] = POLICIES) -> dict[str, dict[str, Result]]:
    results: dict[str, dict[str, Result]] = {}
    for scenario in scenarios:
        for policy in policies:
            result = results.setdefault(scenario.name, {})[policy] = run(scenario, policy)
            print(f"{scenario.name}, {policy}: {result.turns:,} turns, {_cell(result)}", file=sys.stderr, flush=True)
    return results


def table(first: str, results: dict[str, dict[str, Result]], cell: Callable[[Result], str]) -> str:
    columns = list(next(iter(results.values())))
    lines = [f"| {first} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    lines += [
        f"| {name} | {' | '.join(cell(result) for result in by_policy.values())} |"
        for name, by_policy in results.items()
    ]
    return "\n".join(lines)


def _cell(result: Result) -> str:
    return f"{_percent(result.turn_share)} / {_percent(result.token_share)}"


def _counted(result: Result) -> str:
    return f"{_percent(result.turn_share)}, {result.turns - result.kept:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _evaluated(result: Result) -> str:
    return f"{result.evaluated / result.turns:,.0f}"


Results = dict[str, dict[str, Result]]


def page(by_size: Results, by_event: Results, by_slots: Results) -> str:
    s, c = scale_sessions, scale_cluster
    every = [
        result for results in (by_size, by_event, by_slots) for each in results.values() for result in each.values()
    ]
    broken = max(result.broken for result in by_event[DEATHS].values())
    hours = ", ".join(f"{nodes:,} for {hours:g} h" for nodes, hours in SIZES)
    return f"""# Many nodes: who keeps the cache

A simulation of {sum(result.turns for result in every):,} turns, written by `python -m bench.scale --write`; the same
seed gives the same figures. What it says of a node and its slots was compared with three real ones behind HAProxy, turn
by turn (`tests/scale/test_simulation.py`).

Each cell: the share of turns that found again all that their conversation's last turn left, and the share of those
prompt tokens. First turns and those after a compaction don't count: there is nothing to find.

- **hash + table** is what [deploy/haproxy](../../deploy/haproxy/haproxy.cfg) does: consistent hashing on the session,
  and a table of where each session was.
- **hash alone** is [deploy/nginx](../../deploy/nginx/nginx.conf) and the gateway in
  [deploy/kubernetes](../../deploy/kubernetes/gateway.yaml).
- The others don't look at the session.

## By the number of nodes

Each node dies once a day on average, with its memory and its answers, and is back after {LOST_FOR / 60:.0f} minutes.

{table("nodes", by_size, _cell)}

Prompt tokens that a follow-up turn evaluates on average; {c.EVALUATES:,.0f} take a second here:

{table("nodes", by_size, _evaluated)}

## By what happens

{EVENT_NODES} nodes, {EVENT_HOURS:.0f} hours.
A restarted node has lost its memory and is back after {LOADS / 60:.0f} minutes.
A node that is drained takes no new sessions; with the table those that it has stay until it goes.
Each cell: the share of turns as above, and how many turns lost something.

{table("", by_event, _counted)}

A node's death breaks off answers, {broken} here at most; their turns are asked for again and counted as lost. A restart
in order breaks off none.

## By the slots of a node

{EVENT_NODES} nodes on which nothing happens, with the same {PER_HOUR:.0f} sessions an hour each. What is
lost here is lost to other conversations on the same node.

{table("slots", by_slots, _cell)}

## What was simulated

- Sessions: {PER_HOUR:.0f} start on each node in an hour, as a Poisson process. Their number of turns is Pareto
  distributed (shape {s.TURNS_SHAPE}, from {s.LEAST_TURNS} to {s.MOST_TURNS}): most are short, a few go on for hours.
  From an answer to the next request it is {s.TOOL_SECONDS:.0f} s in the median, a tool's run, and for one turn in five
  {s.PERSON_SECONDS:.0f} s, a person.
- Prompts: {s.FIRST_PROMPT:,} tokens at first, {s.ADDED:.0f} more with each turn in the median, {s.ANSWER:.0f} of an
  answer; at {s.COMPACTS_AT:,} the client compacts to {s.COMPACTED_TO:,}.
- {s.SIDE_SHARE:.0%} of the turns are followed by a side request in the compactor's slot, {s.AGENT_SHARE:.0%} by a
  sub-agent with a conversation of its own under the session's header, which the session waits for.
- Nodes: {SLOTS} slots. Which slot a turn gets, and whose it takes, is decided by slotpin's own code
  (`slotpin/pinning/placement.py`). A request waits for its slot. Every slot has room for its whole context. There is no
  host-memory prompt cache, which would bring back some of what was evicted on the same node.
- Speed: {c.EVALUATES:,.0f} prompt tokens and {c.GENERATES:.0f} generated ones a second. It matters for how long slots
  and connections are busy.
- The fewer nodes, the longer: {hours}.
  Each run begins without sessions, so the shortest ones lose a little less.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: seconds")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("the page has the whole run: leave out --quick")
    by_size, by_event = measure(sizes(options.quick)), measure(events(options.quick))
    by_slots = measure(slots(options.quick), ["hash + table"])
    if options.write:
        PAGE.write_text(page(by_size, by_event, by_slots))
    else:
        tables = table("nodes", by_size, _cell), table("", by_event, _counted), table("slots", by_slots, _cell)
        print("\n\n".join(tables))


if __name__ == "__main__":
    main()
