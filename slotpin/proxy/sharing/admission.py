"""What a request waits for, beyond the gate of its own slotpin, where others have the same slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from slotpin.pinning.decision import Action, Decision, Unverified, refused, unpinned
from slotpin.pinning.reasons import Reason
from slotpin.pinning.roles import OnUnsafe, Role
from slotpin.pinning.topology import Topology
from slotpin.proxy.gates import FIRST_LOOK_SECONDS, PLACED_SECONDS, Pass
from slotpin.proxy.sharing.shared import Claimed, Counts, Flight, LeftBehind, Shared

if TYPE_CHECKING:
    from slotpin.proxy.plan import Plan
    from slotpin.proxy.server import Server

# A slot is claimed a little before its request is sent. Told anew where that was longer ago.
_LATE_SECONDS = 1.0


async def claim(plan: Plan, server: Server, entered: Pass) -> Claimed | None:
    """Wait until the request's slot is its own and idle; None where it has none. The decision may become one without a
    slot, or a refusal."""
    shared = server.shared
    assert shared is not None
    if plan.gate is None or not plan.pinned:
        return None
    busy, asked_at = server.seen(plan.gate)
    claimed = None if shared.lost else await shared.claim(entered, _who(plan, shared), busy, asked_at)
    if claimed is None:
        shared.release(entered, settled=True)
        plan.decision = without_slot(plan)
        if plan.pinned and not await server.is_patched():  # by its client
            await _idle(server, plan.gate, float("-inf"))
        return None
    if claimed.ran:
        server.was_there(plan.gate, _local(claimed.ran, shared))
    _learn(plan, server, claimed.counts, claimed.before)
    if claimed.free_from is not None:
        await _idle(server, plan.gate, claimed.free_from)
    return claimed


async def clear(plan: Plan, server: Server, entered: Pass, claimed: Claimed | None) -> None:
    """Wait until the request can't meet another one in its slot; then it counts as sent."""
    shared = server.shared
    assert shared is not None
    patched = await server.is_patched()
    if claimed is not None and plan.pinned:
        on_time = server.gates.now - claimed.at < _LATE_SECONDS
        if on_time and shared.holds(claimed) and (patched or not claimed.meets):
            server.gates.sent(entered, pinned=True)
            return
    elif claimed is not None:
        shared.release(entered, settled=True)  # its slot has lost its tokens: the server chooses one
        claimed = None
    flown = await _fly(plan, server, entered, claimed, patched)
    if flown and claimed is not None and not shared.holds(claimed):
        flown = False
    if not flown:
        shared.release(entered, settled=True)
        plan.decision = without_slot(plan)
        if plan.decision.action is Action.REFUSE:
            return
        flown = not plan.pinned and await _fly(plan, server, entered, None, patched)
    if flown or patched:
        server.gates.sent(entered, pinned=plan.pinned)
    else:
        await asyncio.sleep(shared.quiet_for)
        await server.gates.clear(entered, pinned=plan.pinned)


def without_slot(plan: Plan) -> Decision:
    """The decision where nothing keeps the requests of other slotpins out of the slot."""
    decision = plan.decision
    if decision.action is not Action.PIN:
        return decision
    if plan.classified.role is Role.MAIN or decision.reason is Reason.EXTENDS_CONVERSATION:
        return unpinned(decision, Reason.SHARING_LOST)
    refusal = refused(Reason.SHARING_LOST)
    return refusal if plan.classified.on_unsafe is OnUnsafe.REFUSE else replace(refusal, action=Action.LEAVE)


async def _fly(plan: Plan, server: Server, entered: Pass, claimed: Claimed | None, patched: bool) -> bool:
    """Whether all others know of the request now, and it can meet none of theirs."""
    shared = server.shared
    assert shared is not None
    if shared.lost or (plan.pinned and claimed is None):
        return False
    kind = "s" if claimed is None else "p"
    excused: list[str] = ["*"] if patched else []
    if kind == "s" and not patched:
        await asyncio.sleep(shared.opens_in)  # until then not all others have said what they have at the server
    while True:
        flown = await shared.fly(entered, kind, _who(plan, shared), excused)
        if flown is None:
            return False
        if flown.goes:
            if kind == "s":
                _learn(plan, server, flown.counts, flown.before)
            return True
        excused = [each.name for each in flown.meets if shared.running(each.name)]
        if len(excused) == len(flown.meets):
            continue
        probed, asked_at = await server.gates.next_look()
        if isinstance(probed, Unverified):
            if not probed.silent:
                excused = ["*"]  # it is gone, or does not say: waiting longer shows no more
            continue
        if claimed is not None:
            excused = _placed_elsewhere(flown.meets, flown.width, entered.slot, probed, asked_at)
        else:
            excused += [each.name for each in flown.meets if _has_begun(each, probed, asked_at)]


def _placed_elsewhere(
    meets: Sequence[Flight], width: int, slot: int | None, topology: Topology, asked_at: float
) -> list[str]:
    """All of them, if each has had its slot, which is not this one."""
    found = topology.slot(slot) if slot is not None else None
    if found is not None and found.busy:
        return []
    busy = sum(each.busy for each in topology.slots)
    latest = max(each.sent_at for each in meets)
    gone = all(each.kind == "g" for each in meets) and asked_at >= latest + FIRST_LOOK_SECONDS and busy <= width
    placed = asked_at >= latest + PLACED_SECONDS or busy >= min(width, topology.count) > 0
    return [each.name for each in meets] if gone or placed else []


def _has_begun(flight: Flight, topology: Topology, asked_at: float) -> bool:
    """Whether a pinned request is in its slot, so that the server gives that to no other."""
    slot = topology.slot(flight.slot) if flight.slot is not None else None
    seen = slot is not None and slot.busy and asked_at > flight.sent_at
    return seen or asked_at > flight.sent_at + PLACED_SECONDS + _LATE_SECONDS


async def _idle(server: Server, slot: int, not_before: float) -> None:
    """Look until the slot is idle, or its server does not say."""
    while True:
        probed, _ = await server.gates.next_look(not_before)
        if isinstance(probed, Unverified):
            if probed.silent:
                continue
            return
        found = probed.slot(slot)
        if found is None or not found.busy:
            return


def _learn(plan: Plan, server: Server, counts: Counts, before: LeftBehind | None) -> None:
    server.learned(counts)
    conversation, shared = plan.conversation, server.shared
    if conversation is not None and shared is not None and shared.table.name_of(conversation.key) is not None:
        conversation.left = before.left if before is not None else None
        server.left_behind(conversation.key, before)


def _who(plan: Plan, shared: Shared) -> str:
    if plan.conversation is None:
        return str(plan.classified.role)
    return shared.table.name_of(plan.conversation.key) or f"{shared.me}/{plan.conversation.key}"


def _local(who: str, shared: Shared) -> str:
    """The conversation's name here."""
    owner, _, key = who.partition("/")
    return key if owner == shared.me else shared.table.local(who)
