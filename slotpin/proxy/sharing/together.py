"""Slots and tickets of conversations that may come through any of several slotpins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from slotpin.pinning.bindings import Binding
from slotpin.pinning.decision import Action, Decision, PinSettings
from slotpin.pinning.ids import normalise
from slotpin.pinning.placement import Placement
from slotpin.pinning.reasons import Reason
from slotpin.pinning.topology import Topology
from slotpin.proxy.sharing.link import LostError
from slotpin.proxy.sharing.shared import Shared
from slotpin.proxy.sharing.table import Entry, digests, entry_of

if TYPE_CHECKING:
    from slotpin.proxy.plan import Plan
    from slotpin.proxy.server import Server

# After so many decisions that others were quicker than, one counts whatever they wrote: a slot that two conversations
# have for a turn costs time, no answer.
_ATTEMPTS = 6


async def place_together(
    plan: Plan, server: Server, shared: Shared, pin: PinSettings, decide: Callable[[], None]
) -> None:
    """Let `decide` decide on what all slotpins know, again until nobody has written meanwhile."""
    if not isinstance(plan.probed, Topology) or shared.lost:
        decide()
        return
    conversation, topology, table = plan.conversation, plan.probed, shared.table
    assert conversation is not None
    main, compactor = normalise(pin.main_id, topology.count), normalise(pin.compactor_id, topology.count)
    change = plan.change
    async with shared.committing:
        for attempt in range(1, _ATTEMPTS + 1):
            name = table.identify(conversation)
            before = table.get(name)
            if before is not None and before.by != shared.me:
                plan.change = before.difference(conversation.turn)
            else:
                plan.change = change
            homes = {slot: (key, shared.local_time(used)) for slot, (key, used) in table.homes().items()}
            server.placement.adopt(topology, main, compactor, homes, table.last(), table.compactor_used)
            decide()
            entries = _moved(shared, server.placement, name)
            own = entry_of(conversation, shared.now, shared.me)
            home = server.placement.home_of(conversation.key)
            entries[name] = msgspec.structs.replace(own, home=home, last=plan.decision.slot)
            try:
                written, left = await shared.commit(entries, force=attempt == _ATTEMPTS)
            except LostError:
                return
            if left is not None and left.left.slot is None and left.left != conversation.left:
                conversation.left = left.left  # where the server has put it can be looked for
                server.left_behind(conversation.key, left)
            elif written:
                return


def tickets(
    shared: Shared, ids: Sequence[tuple[str, str]], parents: Sequence[tuple[str, str]], pin: PinSettings, model: str
) -> tuple[Binding, ...]:
    """For a side request: turns that came through other slotpins and that it could belong to."""
    table = shared.table
    found = table.with_ids(digests(ids))
    if ids and not found and parents:
        found = table.with_ids(digests(parents))
    return tuple(Binding("", name, _decision(entry), pin.generation, None, model, ended=True) for name, entry in found)


def _decision(entry: Entry) -> Decision:
    action = Action.LEAVE if entry.last is None else Action.PIN
    return Decision(action, Reason.PINNED, slot=entry.last)


def _moved(shared: Shared, placement: Placement, but: str) -> dict[str, Entry]:
    """The entries of conversations that have lost their slot to another."""
    return {
        name: msgspec.structs.replace(entry, home=None, last=None if entry.last == entry.home else entry.last)
        for name, entry in shared.table.items()
        if name != but and entry.home is not None and placement.home_at(entry.home) != shared.table.local(name)
    }
