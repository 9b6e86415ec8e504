"""Slot ids as a client may write them, and as the server reads them (llama.cpp tools/server/server-context.cpp)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# get_slot_by_id() takes an int32_t and wraps it modulo the slot count; what doesn't fit is undefined there.
MAX_ID = 2**31 - 1

# JSON's numbers; longer than this none is worth reading.
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class Absent:
    """No `id_slot`, or `null`: the server chooses, and so may we."""


@dataclass(frozen=True, slots=True)
class Explicit:
    """The client named a slot; `id` is as sent, in 0 … 2**31 - 1."""

    id: int


@dataclass(frozen=True, slots=True)
class Unpredictable:
    """A value with which the server may choose any slot: negative, fraction, string, boolean, array, object.

    `reads_as` is what this source of the server makes of it; None where it then chooses.
    """

    reads_as: int | None = field(default=None, compare=False)

    def lands_on(self, slot_count: int) -> int | None:
        """The slot, with a negative id wrapped as the unsigned number that it is cast to (get_slot_by_id)."""
        return None if self.reads_as is None else (self.reads_as & (2**64 - 1)) % slot_count


ClientId = Absent | Explicit | Unpredictable

ABSENT = Absent()
UNPREDICTABLE = Unpredictable()


def read_id(raw: bytes) -> ClientId:
    """Read the JSON text of an `id_slot` value; empty text means that the member is missing."""
    if raw in (b"", b"null"):
        return ABSENT
    if raw in (b"true", b"false"):
        return Unpredictable(int(raw == b"true"))
    if len(raw) > _LONGEST or not _NUMBER.fullmatch(raw):
        return UNPREDICTABLE
    value = float(raw)  # exact for everything up to MAX_ID, and what the server makes of a float
    if not 0 <= value <= MAX_ID or not value.is_integer():
        cut = int(value) if abs(value) <= MAX_ID else -1
        return Unpredictable(cut if cut != -1 else None)
    return Explicit(int(value))


def normalise(slot_id: int, slot_count: int) -> int:
    """The slot that the server runs `slot_id` on: ids wrap modulo the slot count (get_slot_by_id)."""
    return slot_id % slot_count
