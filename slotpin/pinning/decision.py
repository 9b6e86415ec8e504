"""Pin to a slot, leave alone, or refuse: pure functions over settings, topology, request and bindings."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from slotpin.pinning.ids import Absent, Explicit, Unpredictable, normalise
from slotpin.pinning.reasons import Reason, explain
from slotpin.pinning.request import Request
from slotpin.pinning.topology import Topology

if TYPE_CHECKING:
    from slotpin.pinning.bindings import Binding


@dataclass(frozen=True, slots=True)
class PinSettings:
    """The settings that a decision depends on. `generation` counts their changes."""

    enabled: Literal[False, True, "auto"]
    main_id: int
    compactor_id: int
    same_endpoint: bool
    generation: int = 0

    @property
    def needs_topology(self) -> bool:
        return self.enabled == "auto" and self.same_endpoint


@dataclass(frozen=True, slots=True)
class Unverified:
    """No topology: the probe failed, or its answer isn't one. `detail` narrows the cause for people.

    `silent`: no answer came in time, so the server may be there and busy.
    """

    reason: Literal[Reason.PROBE_FAILED, Reason.TOPOLOGY_INVALID, Reason.MODEL_NOT_LOADED]
    detail: str = ""
    silent: bool = False


Probed = Topology | Unverified


class Action(enum.StrEnum):
    PIN = "pin"
    LEAVE = "leave"
    REFUSE = "refuse"


class Decision(msgspec.Struct, frozen=True):
    """`slot` is where the request will run, None where the server chooses.

    `add_id` and `add_cache_prompt` say which members go into the body, and are only ever set with PIN. `unsafe`:
    nothing keeps this request and the other role apart. `warnings` are worth a person's attention, main cause first,
    and `detail` narrows that one.
    """

    action: Action
    reason: Reason
    slot: int | None = None
    add_id: bool = False
    add_cache_prompt: bool = False
    unsafe: bool = False
    detail: str = ""
    warnings: tuple[Reason, ...] = ()

    @property
    def explained(self) -> list[tuple[Reason, str]]:
        """Each warning in words."""
        details = (self.detail, *[""] * len(self.warnings))
        return [(cause, explain(cause, detail)) for cause, detail in zip(self.warnings, details, strict=False)]


def decide_main(settings: PinSettings, probed: Probed | None, request: Request) -> Decision:
    """`probed` may be None only where `settings.needs_topology` is false."""
    if settings.enabled is False:
        return Decision(Action.LEAVE, Reason.DISABLED)
    if not settings.same_endpoint:
        return Decision(Action.LEAVE, Reason.ENDPOINTS_DIFFER)
    if settings.enabled is True:
        decision = _vouched(settings.main_id, request, conflicts_with=settings.compactor_id)
    else:
        decision = _main_by_topology(settings, probed, request)
    if not request.keeps_cache:
        decision = _with_warning(decision, Reason.CACHE_PROMPT_OFF)
    return decision


def decide_compactor(
    settings: PinSettings, probed: Probed | None, request: Request, candidates: Sequence[Binding]
) -> Decision:
    """`candidates` are the bindings of the main requests that this side request may belong to."""
    if settings.enabled is False:
        return Decision(Action.LEAVE, Reason.DISABLED)
    if not settings.same_endpoint:
        return Decision(Action.LEAVE, Reason.ENDPOINTS_DIFFER)
    if settings.enabled is True:
        return _vouched(settings.compactor_id, request, conflicts_with=settings.main_id)
    slots = _verified_slots(settings, probed)
    if isinstance(slots, Decision):
        return refused(slots.reason, slots.detail)
    assert isinstance(probed, Topology)
    if flaw := _flaw(candidates, settings.generation, probed.ids, slots.compactor):
        return refused(flaw)
    if problem := _unpinnable(request):
        return refused(problem)
    match request.client_id:
        case Unpredictable():
            return refused(Reason.EXPLICIT_UNPREDICTABLE)
        case Explicit(own):
            slot = normalise(own, probed.count)
            if slot == slots.main or any(binding.decision.slot == slot for binding in candidates):
                return refused(Reason.EXPLICIT_CONFLICT)
            return Decision(Action.LEAVE, Reason.EXPLICIT, slot=slot)
        case Absent():
            return _pin(Reason.PINNED, slots.compactor, request)


class _Slots(msgspec.Struct, frozen=True):
    main: int
    compactor: int


def _main_by_topology(settings: PinSettings, probed: Probed | None, request: Request) -> Decision:
    slots = _verified_slots(settings, probed)
    if isinstance(slots, Decision):
        return slots
    assert isinstance(probed, Topology)
    if problem := _unpinnable(request):
        return _unsafe(problem)
    match request.client_id:
        case Unpredictable():
            return _unsafe(Reason.EXPLICIT_UNPREDICTABLE)
        case Explicit(own):
            slot = normalise(own, probed.count)
            if slot == slots.compactor:
                return _unsafe(Reason.EXPLICIT_CONFLICT, slot=slot)
            return Decision(Action.LEAVE, Reason.EXPLICIT, slot=slot)
        case Absent():
            return _pin(Reason.PINNED, slots.main, request)


def _verified_slots(settings: PinSettings, probed: Probed | None) -> _Slots | Decision:
    """Both roles' slots on this server, or why they can't be told apart there."""
    if probed is None:
        raise ValueError("automatic mode decides on a probed topology")
    if isinstance(probed, Unverified):
        return _unsafe(probed.reason, probed.detail)
    if probed.count < 2:
        return _unsafe(Reason.TOO_FEW_SLOTS)
    main = normalise(settings.main_id, probed.count)
    compactor = normalise(settings.compactor_id, probed.count)
    if main == compactor:
        return _unsafe(Reason.IDS_COLLIDE)
    # The server finds no slot for an id that it does not list, and then takes any (get_slot_by_id).
    if not probed.counts_from_0:
        return _unsafe(Reason.TOPOLOGY_INVALID, "its ids do not count from 0")
    return _Slots(main, compactor)


def _flaw(
    candidates: Sequence[Binding], generation: int, slot_ids: tuple[int, ...], compactor_slot: int
) -> Reason | None:
    """Why the candidates are no ticket, or None when they are."""
    flaws = {binding: _binding_flaw(binding, generation, slot_ids) for binding in candidates}
    if not flaws:
        return Reason.NO_BINDING
    if valid := {binding.conversation for binding, flaw in flaws.items() if flaw is None}:
        # An old conversation that has nothing to lose there must not stand in the way of the others for ever.
        flaws = {
            binding: flaw for binding, flaw in flaws.items() if not _harmless(binding, flaw, compactor_slot, valid)
        }
    distinct = set(flaws.values())
    return distinct.pop() if len(distinct) == 1 else Reason.AMBIGUOUS_OVERLAP


def _harmless(binding: Binding, flaw: Reason | None, compactor_slot: int, valid: Collection[str]) -> bool:
    """Whether a side request on the compactor's slot takes nothing that was kept for this ended conversation."""
    if not binding.ended or flaw is None or binding.conversation in valid:
        return False
    if flaw is Reason.TOPOLOGY_CHANGED:
        return True  # a server with other slots is another process: its cache is gone
    if flaw is Reason.SETTINGS_CHANGED:
        return binding.decision.slot not in (None, compactor_slot)
    # Where it ran nothing was kept for it, so only its own side requests have something to fear there.
    return binding.decision.slot != compactor_slot


def _binding_flaw(binding: Binding, generation: int, slot_ids: tuple[int, ...]) -> Reason | None:
    if binding.generation != generation:
        return Reason.SETTINGS_CHANGED
    if binding.slot_ids is not None and binding.slot_ids != slot_ids:
        return Reason.TOPOLOGY_CHANGED
    # A main request that ran anywhere is no ticket, even when the topology has been verified since.
    return binding.decision.reason if binding.decision.unsafe else None


def _unpinnable(request: Request) -> Reason | None:
    """Why no slot can be given to this request alone."""
    if not request.route_pins:
        return Reason.ROUTE_IGNORES_SLOT
    return Reason.SEVERAL_COMPLETIONS if request.fans_out else None


def _vouched(slot: int, request: Request, conflicts_with: int) -> Decision:
    if request.fans_out:
        return _unsafe(Reason.SEVERAL_COMPLETIONS)
    match request.client_id:
        case Absent():
            decision = _pin(Reason.VOUCHED, slot, request)
        case Explicit(own):
            decision = Decision(Action.LEAVE, Reason.EXPLICIT, slot=own)
        case Unpredictable():
            decision = Decision(Action.LEAVE, Reason.EXPLICIT_UNPREDICTABLE)
            return _with_warning(decision, Reason.EXPLICIT_UNPREDICTABLE)
    if decision.slot == conflicts_with:
        cause = Reason.IDS_COLLIDE if decision.action is Action.PIN else Reason.EXPLICIT_CONFLICT
        return _with_warning(decision, cause)
    return decision


def _pin(reason: Reason, slot: int, request: Request) -> Decision:
    return Decision(Action.PIN, reason, slot=slot, add_id=True, add_cache_prompt=not request.has_cache_prompt)


def _unsafe(reason: Reason, detail: str = "", slot: int | None = None) -> Decision:
    return Decision(Action.LEAVE, reason, slot=slot, unsafe=True, detail=detail, warnings=(reason,))


def refused(reason: Reason, detail: str = "") -> Decision:
    """No answer but an error: for what may not reach the server now."""
    return Decision(Action.REFUSE, reason, unsafe=True, detail=detail, warnings=(reason,))


def placed(decision: Decision, slot: int, *, shared: str = "") -> Decision:
    """The same, pinned to the slot that the conversation has; `shared` says why it is not its own."""
    warnings = (Reason.SLOT_SHARED, *decision.warnings) if shared else decision.warnings
    return replace(decision, slot=slot, detail=shared, warnings=warnings)


def unpinned(decision: Decision, reason: Reason) -> Decision:
    """The same request without a slot: pinning would cost it its cache. `reason` is also a warning."""
    return Decision(Action.LEAVE, reason, warnings=(reason, *decision.warnings))


def let_pass(refusal: Decision, settings: PinSettings, probed: Probed | None, request: Request) -> Decision:
    """The same verdict for a client that can't go on without an answer: forward it, keep the warning.

    Where only a turn is missing that it could belong to, it runs on the compactor's slot: a conversation that slotpin
    has not seen yet, or no more, is less likely there than anywhere else. Otherwise the server chooses.
    """
    if refusal.reason is Reason.NO_BINDING and isinstance(request.client_id, Absent) and not _unpinnable(request):
        slots = _verified_slots(settings, probed)
        assert isinstance(slots, _Slots)  # asked before bindings are
        return replace(_pin(refusal.reason, slots.compactor, request), unsafe=True, warnings=refusal.warnings)
    return replace(refusal, action=Action.LEAVE)


def _with_warning(decision: Decision, warning: Reason) -> Decision:
    return replace(decision, warnings=(*decision.warnings, warning))
