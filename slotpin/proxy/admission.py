"""Before a request goes out: does its slot still hold what it should? And what to say to one that waited in vain."""

from __future__ import annotations

from dataclasses import dataclass

from slotpin.pinning.decision import Action, Decision, unpinned
from slotpin.pinning.reasons import Reason
from slotpin.pinning.reuse import Left
from slotpin.pinning.topology import Topology
from slotpin.proxy.gates import Pass
from slotpin.proxy.plan import Plan
from slotpin.proxy.server import Server


@dataclass(slots=True)
class Admitted:
    """`held`: whether a look showed the conversation's tokens in its slot; None without a look. `other_ran`: something
    else may have run there since its last turn."""

    entered: Pass
    held: bool | None = None
    other_ran: bool = False


def pass_now(plan: Plan, server: Server, who: str, retry_seconds: float) -> Admitted | None:
    """Let a request through that has to wait for nothing: neither at its gate, nor for the server's answer, nor for
    other slotpins. It counts as sent then. Else None, and nothing has been done."""
    gates = server.gates
    if server.shared is not None or not gates.is_open(plan.gate):
        return None
    left = _left_there(plan, server)
    if _has_to_look(plan, server, left):
        return None
    look, decision = _look(plan, server, left), plan.decision
    if look.lost:
        if (patched := server.known_patched) is None:
            return None
        decision = _after(look, decision, server, retry_seconds, patched=patched)
    pinned = decision.slot is not None or plan.names_slot
    if gates.could_meet(pinned=pinned) and not server.known_patched:
        return None
    plan.decision = decision
    entered = gates.enter_now(plan.gate, who, plan.completions)
    assert entered is not None  # it is open
    gates.sent(entered, pinned=pinned)
    return Admitted(entered, look.held, look.other_ran)


async def last_look(plan: Plan, server: Server, entered: Pass, retry_seconds: float) -> Admitted:
    """See whether the slot still holds what it should; the decision may become one without a slot."""
    left = _left_there(plan, server)
    if _has_to_look(plan, server, left):
        await server.look()
    look = _look(plan, server, left)
    patched = look.held is False and await server.is_patched()
    plan.decision = _after(look, plan.decision, server, retry_seconds, patched=patched)
    return Admitted(entered, look.held, look.other_ran)


@dataclass(slots=True)
class _Look:
    """The first two as in `Admitted`. `lost`: the slot is not where the conversation's tokens are."""

    held: bool | None = None
    other_ran: bool = False
    lost: bool = False


def _left_there(plan: Plan, server: Server) -> Left | None:
    """What should be in the slot that the request is pinned to; None where that begins anew there."""
    conversation, slot = plan.conversation, plan.decision.slot
    if conversation is None or slot is None or plan.decision.action is not Action.PIN:
        return None
    left = conversation.left
    if left is None or left.epoch != server.epoch or not isinstance(plan.probed, Topology):
        return None
    return left if left.slot is None or left.slot == slot else None


def _has_to_look(plan: Plan, server: Server, left: Left | None) -> bool:
    """Where the server chose the last time, only what is known already can be of use."""
    if left is None or left.slot is None or plan.conversation is None:
        return False
    return server.has_to_look(plan.conversation.key, left)


def _look(plan: Plan, server: Server, left: Left | None) -> _Look:
    """By what is known of the slot."""
    conversation, slot = plan.conversation, plan.decision.slot
    if left is None or conversation is None or slot is None:
        return _Look()
    if left.slot is None:
        # The server chose the last time: only where it can be seen to have put the tokens is there a slot to pin to.
        return _Look(lost=server.find(conversation.key, left) != slot)
    held = server.holds(conversation.key, left, slot)
    return _Look(held, server.other_ran(conversation.key, slot), lost=held is False)


def _after(look: _Look, decision: Decision, server: Server, retry_seconds: float, *, patched: bool) -> Decision:
    """The decision, without a slot where that has lost the tokens and nothing brings them back."""
    if not look.lost or (look.held is False and patched):
        return decision
    helps = look.held is None or server.pinning_helps(retry_seconds)
    return unpinned(decision, Reason.SLOT_EMPTIED if helps else Reason.PINNING_STOPPED)


def busy_message(plan: Plan, seconds: float) -> str:
    """Which slot somebody has waited for in vain, and for whom."""
    assert plan.server is not None
    waited = f"this request has waited {seconds / 60:.3g} min"
    if plan.gate is None:
        return f"it is not known yet in which slots the requests before it run; {waited}"
    gates = plan.server.gates
    if plan.server.shared is not None:
        return f"slot {plan.gate} is in use, here or through another slotpin; {waited}"
    if (holder := gates.holder(plan.gate)) is not None:
        return f"slot {plan.gate} is held by {holder.who}; {waited}"
    left = "still busy for a client that has left" if gates.is_unsettled(plan.gate) else "perhaps taken by another one"
    return f"slot {plan.gate} is {left}; {waited}"
