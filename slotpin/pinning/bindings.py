"""A main request's decision, kept from its arrival until its message ends, and then as its compactor calls' ticket."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from slotpin.pinning.decision import Decision
from slotpin.pinning.recent import Recent


class Binding(msgspec.Struct, frozen=True):
    """`generation` counts changes of the slot settings; `slot_ids` is the topology it was made on, None if unknown.
    `model` is a router's, whose models have slots of their own; empty elsewhere."""

    request_id: str
    conversation: str
    decision: Decision
    generation: int
    slot_ids: tuple[int, ...] | None
    model: str = ""
    ended: bool = False


class Bindings:
    """Open bindings by request, and the last ended one of each conversation, until that is forgotten.

    `max_ended` is for those that end after their conversation was forgotten: more than there are conversations.
    """

    def __init__(self, max_ended: int = 1024) -> None:
        self._open: dict[str, Binding] = {}
        # The requests of each conversation that are open and may leave a ticket, in the order of their arrival.
        self._requests: dict[str, dict[str, None]] = {}
        self._ended: Recent[str, Binding] = Recent(max_ended)

    def open(self, binding: Binding) -> None:
        """A new main request ends the ticket that the one before it left for its conversation."""
        self._ended.pop(binding.conversation, None)
        self._open[binding.request_id] = binding
        self._requests.setdefault(binding.conversation, {})[binding.request_id] = None

    def end(self, request_id: str) -> None:
        """The message ended: from now on the binding is its conversation's ticket."""
        binding = self._open.pop(request_id, None)
        if binding is None:
            return
        requests = self._requests.get(binding.conversation, {})
        if request_id not in requests:
            return  # a later turn has ended before
        # Only the latest turn leaves a ticket, and those that came before this one never will.
        if next(reversed(requests)) == request_id:
            self._ended[binding.conversation] = replace(binding, ended=True)
        while next(iter(requests)) != request_id:
            del requests[next(iter(requests))]
        self._drop(binding)

    def abort(self, request_id: str) -> None:
        if (binding := self._open.pop(request_id, None)) is not None:
            self._drop(binding)

    def _drop(self, binding: Binding) -> None:
        requests = self._requests.get(binding.conversation, {})
        requests.pop(binding.request_id, None)
        if not requests:
            self._requests.pop(binding.conversation, None)

    def forget(self, conversation: str) -> None:
        """Its ticket is no longer needed."""
        self._ended.pop(conversation, None)

    def candidates(self, conversation: str, model: str = "") -> tuple[Binding, ...]:
        """What a compactor request of `conversation` could belong to; an empty name means that it is not known."""
        return tuple(
            binding
            for binding in (*self._open.values(), *self._ended.values())
            if binding.model == model and conversation in ("", binding.conversation)
        )

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def ended_count(self) -> int:
        return len(self._ended)
