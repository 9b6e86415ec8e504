"""Before a request goes out: does its slot still hold what it should? And what to say to one that waited in vain."""

from __future__ import annotations

from dataclasses import dataclass

from slotpin.pinning.decision import Action, unpinned
from slotpin.pinning.reasons import Reason
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


async def last_look(plan: Plan, server: Server, entered: Pass, retry_seconds: float) -> Admitted:
    """See whether the slot still holds what it should; the decision may become one without a slot."""
    admitted = Admitted(entered)
    conversation, slot = plan.conversation, plan.decision.slot
    if conversation is None or slot is None or plan.decision.action is not Action.PIN:
        return admitted
    left = conversation.left
    if left is None or left.epoch != server.epoch or not isinstance(plan.probed, Topology):
        return admitted
    if left.slot is None:
        # The server chose the last time: only where it can be seen to have put the tokens is there a slot to pin to.
        if server.find(conversation.key, left) != slot:
            plan.decision = unpinned(plan.decision, Reason.SLOT_EMPTIED)
        return admitted
    if left.slot != slot:
        return admitted  # it has been given another slot, and has to begin anew there
    admitted.other_ran = server.other_ran(conversation.key, slot)
    admitted.held = await server.holds(conversation.key, left, slot)
    if admitted.held is False and not await server.is_patched():
        helps = server.pinning_helps(retry_seconds)
        plan.decision = unpinned(plan.decision, Reason.SLOT_EMPTIED if helps else Reason.PINNING_STOPPED)
    return admitted


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
