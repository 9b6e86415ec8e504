"""Sessions as coding agents hold them, seeded: the same ones whatever becomes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

# Turns of a conversation: Pareto, so that most are short and a few go on all day. The mean is about 12.
TURNS_SHAPE, LEAST_TURNS, MOST_TURNS = 1.2, 3, 400
LEAST_AGENT_TURNS, MOST_AGENT_TURNS = 2, 40
# Seconds from an answer to the next request: a tool's run, or a person who reads and writes. Log-normal.
TOOL_SECONDS, PERSON_SECONDS, PERSON_SHARE = 3.0, 60.0, 0.2
# Tokens; medians of log-normals where they vary.
FIRST_PROMPT, ADDED, ANSWER = 8000, 800.0, 200.0
COMPACTS_AT, COMPACTED_TO = 100_000, 20_000
SPREAD = 1.0  # sigma of the log-normals
SIDE_SHARE = 0.1  # a title, a summary: after so many of the turns
AGENT_SHARE = 0.03  # a sub-agent: likewise


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. `after`: seconds since the last answer. `kept`: prompt tokens that it has in
    common with the turn before, prompt and answer; 0 for a first turn and for the one after a compaction."""

    after: float
    prompt: int
    kept: int
    answer: int
    side: bool
    agent: bool

    @property
    def left(self) -> int:
        """Tokens in the slot when the answer is there."""
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Session:
    """`name` is what its requests carry in their header, those of its sub-agents too."""

    name: str
    start: float
    seed: str

    def turns(self, agent: int = 0) -> Iterator[Turn]:
        """Of the conversation itself, or of its sub-agent of that number, from 1."""
        rng = random.Random(f"{self.seed}/{self.name}/{agent}")
        least, most = (LEAST_AGENT_TURNS, MOST_AGENT_TURNS) if agent else (LEAST_TURNS, MOST_TURNS)
        prompt, kept = FIRST_PROMPT, 0
        for _ in range(min(most, int(least * rng.paretovariate(TURNS_SHAPE)))):
            person = not agent and rng.random() < PERSON_SHARE
            after = _around(rng, PERSON_SECONDS if person else TOOL_SECONDS)
            answer = int(_around(rng, ANSWER)) + 1
            compacts = prompt + answer > COMPACTS_AT
            side = compacts or rng.random() < SIDE_SHARE
            yield Turn(after, prompt, kept, answer, side, agent=not agent and rng.random() < AGENT_SHARE)
            added = int(_around(rng, ADDED))
            kept = 0 if compacts else prompt + answer
            prompt = COMPACTED_TO if compacts else kept + added


def sessions(seed: str, per_hour: float, seconds: float) -> Iterator[Session]:
    """Arrivals of a Poisson process."""
    rng = random.Random(f"{seed}/arrivals")
    now = 0.0
    for number in count():
        now += rng.expovariate(per_hour / 3600)
        if now >= seconds:
            return
        yield Session(f"s{number}", now, seed)


def _around(rng: random.Random, median: float) -> float:
    return median * rng.lognormvariate(0, SPREAD)
