"""What is kept of each exchange: ids, times, counts and reasons; no text of a prompt and no secret."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

# As many as a person may ask about later; about 1 MiB.
KEPT = 1000

WAITING, UNDER_WAY = "waiting", "under_way"
# How an exchange can end, as proxy/exchange.py says it.
OUTCOMES = (
    "completed",
    "client_left",
    "cut_off",
    "upstream_broke",
    "upstream_refused",
    "unreachable",
    "refused",
    "failed",
)


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One generating request. Times are seconds; `arrived` is Unix time, when the whole request was there.

    `outcome` is `waiting` or `under_way` until the end; `status` is llama-server's. `planned`: until slotpin had
    decided, without `waited`, the time at the gate (None: it passed none). `server`: which of a router's models;
    `gate`: the slot whose gate it passes, also where the server chooses the slot. `expected` of what its
    conversation's last turn left, and what was `lost` of that.
    """

    id: str
    arrived: float
    client: str
    model: str | None
    server: str
    role: str
    found_by: str
    conversation: str | None
    action: str
    reason: str
    detail: str
    warnings: tuple[str, ...]
    slot: int | None
    slots: int | None
    gate: int | None
    generation: int
    outcome: str
    status: int | None
    planned: float
    waited: float | None
    seconds: float
    evaluated: int | None
    cached: int | None
    generated: int | None
    prompt_ms: float | None
    expected: int | None
    lost: int | None
    cause: str | None
    cause_detail: str

    @property
    def prompt(self) -> int | None:
        """Tokens of the prompt, where the server has said how many were evaluated."""
        return None if self.evaluated is None or self.cached is None else self.evaluated + self.cached

    @property
    def held(self) -> int | None:
        """Tokens that it left in its slot."""
        return None if self.prompt is None else self.prompt + (self.generated or 0)


class Records:
    """The latest exchanges, numbered from 1 in the order of their ends."""

    def __init__(self, kept: int = KEPT) -> None:
        self._records: deque[Record] = deque(maxlen=kept)
        self.count = 0

    def add(self, record: Record) -> None:
        self._records.append(record)
        self.count += 1

    def __iter__(self) -> Iterator[Record]:
        """Latest first."""
        return reversed(self._records)

    def latest(self, limit: int) -> list[Record]:
        """Latest first."""
        return list(itertools.islice(self, limit))

    def after(self, number: int) -> Sequence[tuple[int, Record]]:
        """Those that are kept of the ones after `number`, oldest first, each with its number."""
        missing = self.count - number if 0 <= number <= self.count else self.count
        found = self.latest(missing)
        return list(zip(range(self.count - len(found) + 1, self.count + 1), reversed(found), strict=True))


def find(records: Iterator[Record], beginning: str) -> list[Record]:
    """Those whose id begins so, latest first."""
    return [record for record in records if record.id.startswith(beginning)]
