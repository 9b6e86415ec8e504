"""What `GET /slots` says: how many slots there are, their ids, each one's context, and what they do just now."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from slotpin.pinning.request import UNREADABLE


class TopologyError(ValueError):
    """The answer is not a list of slots; the message says why."""


class _Element(msgspec.Struct):
    """server_slot::to_json (llama.cpp tools/server/server-context.cpp)."""

    id: int
    n_ctx: int | None = None
    is_processing: bool = False
    id_task: int | None = None
    n_prompt_tokens: int | None = None


class _ElementIdOnly(msgspec.Struct):
    id: int


@dataclass(frozen=True, slots=True)
class Slot:
    """`tokens` is how many the slot's cache holds, 0 also for a slot that was never used. `task` is the last one's
    number, None for none since the server started: numbers only grow while it runs."""

    id: int
    n_ctx: int | None
    busy: bool = False
    task: int | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Slots with distinct ids, in the server's order. `counts_from_0`: the ids are 0 … n-1, in whatever order."""

    slots: tuple[Slot, ...]
    # Made once: each decision reads them several times.
    ids: tuple[int, ...] = field(init=False, repr=False, compare=False)
    count: int = field(init=False, repr=False, compare=False)
    counts_from_0: bool = field(init=False, repr=False, compare=False)
    _by_id: dict[int, Slot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(slot.id for slot in self.slots))
        object.__setattr__(self, "count", len(self.slots))
        object.__setattr__(self, "counts_from_0", set(self.ids) == set(range(len(self.slots))))
        object.__setattr__(self, "_by_id", {slot.id: slot for slot in self.slots})

    def slot(self, slot_id: int) -> Slot | None:
        return self._by_id.get(slot_id)

    @property
    def last_task(self) -> int:
        """-1 where no slot has run anything."""
        return max((slot.task for slot in self.slots if slot.task is not None), default=-1)


def parse_topology(body: bytes) -> Topology:
    """Read an answer of `GET /slots`; fields other than `id` vary between server versions.

    Raises TopologyError.
    """
    try:
        slots = _slots(body)
    except UNREADABLE as error:
        what = "an array of objects with integer ids" if isinstance(error, msgspec.ValidationError) else "JSON"
        raise TopologyError(f"the answer is not {what}") from None
    if len({slot.id for slot in slots}) != len(slots):
        raise TopologyError("two slots have the same id")
    return Topology(slots)


def _slots(body: bytes) -> tuple[Slot, ...]:
    try:
        return tuple(
            Slot(each.id, each.n_ctx, each.is_processing, each.id_task, each.n_prompt_tokens or 0)
            for each in _FULL.decode(body)
        )
    except msgspec.ValidationError:
        # A field of another type is no reason to distrust the ids.
        return tuple(Slot(each.id, None) for each in _IDS_ONLY.decode(body))


_FULL = msgspec.json.Decoder(list[_Element])
_IDS_ONLY = msgspec.json.Decoder(list[_ElementIdOnly])
