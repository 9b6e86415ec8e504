"""What the cache of each conversation did in its last turns, for people to look at."""

from __future__ import annotations

from collections import deque

from cachetools import LRUCache

from slotpin.pinning.counters import Counters
from slotpin.pinning.reuse import Reuse

CONVERSATIONS = 256
TURNS = 20


class History:
    """The `TURNS` latest turns of the `CONVERSATIONS` latest conversations: counts, no text."""

    def __init__(self) -> None:
        self._turns: LRUCache[str, deque[dict[str, object]]] = LRUCache(CONVERSATIONS)

    def add(self, conversation: str, counters: Counters, reuse: Reuse) -> None:
        turns = self._turns.setdefault(conversation, deque(maxlen=TURNS))
        turns.append(
            {
                "evaluated": counters.evaluated,
                "cached": counters.cached,
                "expected": reuse.expected,
                "lost": reuse.lost,
                "cause": reuse.cause,
            }
        )

    def turns(self, conversation: str) -> list[dict[str, object]]:
        """Oldest first."""
        return list(self._turns.get(conversation, ()))
