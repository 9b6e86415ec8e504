"""Warnings: each cause is said once a minute, however often it comes up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import TTLCache

from slotpin.observe.log import Log

REPEAT_SECONDS = 60.0


@dataclass(slots=True)
class Warned:
    """A cause that came up within the last minute, and how often."""

    message: str
    count: int = 1


class Warner:
    """`clock` gives seconds."""

    def __init__(self, log: Log, clock: Callable[[], float]) -> None:
        self._log = log
        self.totals: Counter[str] = Counter()  # by cause
        self._recent: TTLCache[str, Warned] = TTLCache(256, REPEAT_SECONDS, timer=clock)

    def warn(self, cause: str, message: str, **fields: object) -> None:
        self.totals[cause] += 1
        if (known := self._recent.get(cause)) is not None:
            known.count += 1
            return
        self._recent[cause] = Warned(message)
        self._log.warning("warning", cause=cause, message=message, **fields)

    def recent(self) -> dict[str, Warned]:
        """By cause, what was warned of within the last minute."""
        self._recent.expire()
        return dict(self._recent.items())
