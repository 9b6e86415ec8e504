"""What `GET /slots` says: how many slots there are, their ids, each one's context."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class TopologyError(ValueError):
    """The answer is not a list of slots; the message says why."""


class _Element(msgspec.Struct):
    id: int
    n_ctx: int | None = None


class _ElementIdOnly(msgspec.Struct):
    id: int


@dataclass(frozen=True, slots=True)
class Slot:
    id: int
    n_ctx: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """Slots with distinct ids, in the server's order."""

    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(slot.id for slot in self.slots)


def parse_topology(body: bytes) -> Topology:
    """Read an answer of `GET /slots`; fields other than `id` and `n_ctx` vary between server versions.

    Raises TopologyError.
    """
    elements: list[_Element] | list[_ElementIdOnly]
    try:
        elements = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "an array of objects with integer ids" if isinstance(error, msgspec.ValidationError) else "JSON"
        raise TopologyError(f"the answer is not {what}") from None
    slots = tuple(Slot(element.id, getattr(element, "n_ctx", None)) for element in elements)
    if len({slot.id for slot in slots}) != len(slots):
        raise TopologyError("two slots have the same id")
    return Topology(slots)


def _decode(body: bytes) -> list[_Element] | list[_ElementIdOnly]:
    try:
        return _FULL.decode(body)
    except msgspec.ValidationError:
        # An n_ctx of another type is no reason to distrust the ids.
        return _IDS_ONLY.decode(body)


_FULL = msgspec.json.Decoder(list[_Element])
_IDS_ONLY = msgspec.json.Decoder(list[_ElementIdOnly])
