"""A main request's decision, kept from its arrival until its message ends, and then as its compactor calls' ticket."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from cachetools import LRUCache

from slotpin.pinning.decision import Decision


@dataclass(frozen=True, slots=True)
class Binding:
    """`generation` counts changes of the slot settings; `slot_ids` is the topology it was made on, None if unknown."""

    request_id: str
    conversation: str
    decision: Decision
    generation: int
    slot_ids: tuple[int, ...] | None
    ended: bool = False


class Bindings:
    """Open bindings by request, and the last ended one of each conversation (the `max_ended` latest conversations)."""

    def __init__(self, max_ended: int = 256) -> None:
        self._open: dict[str, Binding] = {}
        self._ended: LRUCache[Hashable, Binding] = LRUCache(max_ended)
        self._latest_ended: str | None = None

    def open(self, binding: Binding) -> None:
        """A new main request ends the ticket that the one before it left for its conversation."""
        self._ended.pop(binding.conversation, None)
        self._open[binding.request_id] = binding

    def end(self, request_id: str) -> None:
        """The message ended: from now on the binding is its conversation's ticket."""
        binding = self._open.pop(request_id, None)
        if binding is None:
            return
        # A later turn of the conversation that is already open has taken the ticket's place.
        if any(other.conversation == binding.conversation for other in self._open.values()):
            return
        self._ended[binding.conversation] = replace(binding, ended=True)
        self._latest_ended = binding.conversation

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def candidates(self, conversation: str) -> tuple[Binding, ...]:
        """What a compactor request of `conversation` could belong to; an empty name means that it is not known."""
        if conversation:
            own = [binding for binding in self._open.values() if binding.conversation == conversation]
            ended = self._ended.get(conversation)
        else:
            own = list(self._open.values())
            ended = self._ended.get(self._latest_ended)
        return (*own, ended) if ended is not None else tuple(own)

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def ended_count(self) -> int:
        return len(self._ended)
