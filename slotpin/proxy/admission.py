"""Before a request goes out: wait for its slot, then see whether the slot still holds what it should."""

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


async def admit(plan: Plan, server: Server, who: str, retry_seconds: float) -> Admitted:
    """Wait until `plan` may go out; its decision may become one without a slot. Cancel it to give up the place."""
    admitted = Admitted(await server.gates.enter(plan.gate, who))
    try:
        await _last_look(plan, server, admitted, retry_seconds)
        pinned = plan.decision.slot is not None
        if server.gates.could_meet(pinned=pinned) and not await server.is_patched():
            await server.gates.clear(admitted.entered, pinned=pinned)
        admitted.entered.pinned = pinned
    except BaseException:
        server.gates.leave(admitted.entered, settled=True)
        raise
    return admitted


async def _last_look(plan: Plan, server: Server, admitted: Admitted, retry_seconds: float) -> None:
    conversation, slot = plan.conversation, plan.decision.slot
    if conversation is None or slot is None or plan.decision.action is not Action.PIN:
        return
    left = conversation.left
    if left is None or left.epoch != server.epoch or not isinstance(plan.probed, Topology):
        return
    if left.slot is None:
        # The server chose the last time: only where it can be seen to have put the tokens is there a slot to pin to.
        if server.find(conversation.key, left) != slot:
            plan.decision = unpinned(plan.decision, Reason.SLOT_EMPTIED)
        return
    if left.slot != slot:
        return  # it has been given another slot, and has to begin anew there
    admitted.other_ran = server.other_ran(conversation.key, slot)
    admitted.held = await server.holds(conversation.key, left, slot)
    if admitted.held is False and not await server.is_patched():
        helps = server.pinning_helps(retry_seconds)
        plan.decision = unpinned(plan.decision, Reason.SLOT_EMPTIED if helps else Reason.PINNING_STOPPED)


def busy_message(plan: Plan, seconds: float) -> str:
    """Which slot somebody has waited for in vain, and for whom."""
    assert plan.server is not None and plan.gate is not None
    holder = plan.server.gates.holder(plan.gate)
    held = f"held by {holder.who}" if holder is not None else "still busy for a client that has left"
    return f"slot {plan.gate} is {held}; this request has waited {seconds / 60:.3g} min"
