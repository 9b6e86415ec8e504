"""What the cache of each conversation did in its last turns, for people to look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from cachetools import LRUCache

from slotpin.pinning.counters import Counters
from slotpin.pinning.reuse import Reuse

CONVERSATIONS = 256
TURNS = 20


class Turned(msgspec.Struct, frozen=True):
    """In tokens, as in `Counters` and `Reuse`."""

    evaluated: int
    cached: int
    expected: int
    lost: int
    cause: str | None


class History:
    """The `TURNS` latest turns of the `CONVERSATIONS` latest conversations: counts, no text."""

    def __init__(self) -> None:
        self._turns: LRUCache[str, deque[Turned]] = LRUCache(CONVERSATIONS)

    def add(self, conversation: str, counters: Counters, reuse: Reuse) -> None:
        turns = self._turns.setdefault(conversation, deque(maxlen=TURNS))
        turns.append(Turned(counters.evaluated, counters.cached, reuse.expected, reuse.lost, reuse.cause))

    def turns(self, conversation: str) -> Sequence[Turned]:
        """Oldest first."""
        return list(self._turns.get(conversation, ()))
