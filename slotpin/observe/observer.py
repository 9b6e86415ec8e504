"""Hears of every exchange: what is under way, the records of those that ended, the totals, the log, the trace."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol

from slotpin.observe.log import Log
from slotpin.observe.records import Record, Records
from slotpin.observe.totals import Totals

Header = Callable[[bytes], bytes | None]
Trace = Callable[[Record, Header], None]


class Exchange(Protocol):
    """One that has not ended yet."""

    def record(self) -> Record: ...


class Observer:
    """`began` and `ended` once for each exchange. `trace`, where it is set, hears of each one that ended.

    `since`: when it began to listen, in Unix time.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._under_way: dict[str, Exchange] = {}
        self.since = time.time()
        self.records = Records()
        self.totals = Totals()
        self.trace: Trace | None = None

    def began(self, exchange_id: str, exchange: Exchange) -> None:
        self._under_way[exchange_id] = exchange

    def ended(self, record: Record, header: Header) -> None:
        """`header` looks one of the request up by its name in lower case."""
        self._under_way.pop(record.id, None)
        self.records.add(record)
        self.totals.add(record)
        if self.trace is not None:
            self.trace(record, header)
        if self._log.is_enabled_for(logging.INFO):
            self._log.info("exchange", **fields(record))

    @property
    def under_way(self) -> list[Record]:
        """As they are now, oldest first."""
        return [exchange.record() for exchange in self._under_way.values()]

    def __iter__(self) -> Iterator[Record]:
        """Every exchange that is known, the latest first."""
        yield from reversed(self.under_way)
        yield from self.records


def fields(record: Record) -> dict[str, object]:
    """What the log has of an exchange."""
    return {
        "request": record.id,
        "role": record.role,
        "found_by": record.found_by,
        "client": record.client,
        "conversation": record.conversation,
        "action": record.action,
        "slot": record.slot,
        "slots": record.slots,
        "reason": record.reason,
        "generation": record.generation,
        "outcome": record.outcome,
        "status": record.status,
        "ms": round(record.seconds * 1000),
        "waited_ms": None if record.waited is None else round(record.waited * 1000),
        "evaluated": record.evaluated,
        "cached": record.cached,
        "generated": record.generated,
        "expected": record.expected,
        "lost": record.lost,
        "cause": record.cause,
    }


_PRODUCT = re.compile(rb"[A-Za-z][A-Za-z0-9._-]{0,23}")


@lru_cache(256)
def client_name(user_agent: bytes | None) -> str:
    """The product that a User-Agent names first (RFC 9110 section 10.1.5), in lower case."""
    found = _PRODUCT.match(user_agent) if user_agent else None
    return found[0].decode().lower() if found else "unknown"
