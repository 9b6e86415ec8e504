"""Slot ids as a client may write them, and as the server reads them (llama.cpp tools/server/server-context.cpp)."""

from __future__ import annotations

import re
from dataclasses import dataclass

# get_slot_by_id() takes an int32_t and wraps it modulo the slot count; what doesn't fit is undefined there.
MAX_ID = 2**31 - 1

_INTEGRAL = re.compile(rb"(-?)(0|[1-9][0-9]*)(?:\.0+)?")


@dataclass(frozen=True, slots=True)
class Absent:
    """No `id_slot`, or `null`: the server chooses, and so may we."""


@dataclass(frozen=True, slots=True)
class Explicit:
    """The client named a slot; `id` is as sent, in 0 … 2**31 - 1."""

    id: int


@dataclass(frozen=True, slots=True)
class Unpredictable:
    """A value with which the server may choose any slot: negative, fraction, string, boolean, array, object."""


ClientId = Absent | Explicit | Unpredictable

ABSENT = Absent()
UNPREDICTABLE = Unpredictable()


def read_id(raw: bytes) -> ClientId:
    """Read the JSON text of an `id_slot` value; empty text means that the member is missing."""
    if raw in (b"", b"null"):
        return ABSENT
    match = _INTEGRAL.fullmatch(raw)
    # The length check keeps a megabyte of digits from becoming a number.
    if match is None or len(match[2]) > 10:
        return UNPREDICTABLE
    value = int(match[2])
    if value > MAX_ID or (match[1] and value):
        return UNPREDICTABLE
    return Explicit(value)


def normalise(slot_id: int, slot_count: int) -> int:
    """The slot that the server runs `slot_id` on: ids wrap modulo the slot count (get_slot_by_id)."""
    return slot_id % slot_count
