"""The state of the proxy as JSON, without any text of a prompt and without secrets: the board and more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from slotpin.observe.board import board

if TYPE_CHECKING:
    from slotpin.pinning.conversations import Conversation
    from slotpin.proxy.probe import Target
    from slotpin.proxy.server import Server
    from slotpin.proxy.state import State


def status(state: State) -> dict[str, object]:
    running = state.running
    return {
        **msgspec.to_builtins(board(state)),
        "process": {"tasks": len(asyncio.all_tasks())},
        "generation": running.pin.generation,
        "mainIdSlot": running.pin.main_id,
        "compactorIdSlot": running.pin.compactor_id,
        "endpoints": {"main": running.main.url, "compactor": running.compactor.url},
        **_server(state, state.server(running.probe_target), running.probe_target),
        "models": {
            server.model: _server(state, server, server.target) for server in state.servers.values() if server.model
        },
        "conversations": [
            {
                "key": conversation.key,
                "slot": state.slot_of(conversation.key),
                "turns": conversation.turns,
                "idleSeconds": round(state.clock() - conversation.last_used, 3),
                "reuse": state.history.turns(conversation.key),
            }
            for conversation in _latest(state)
        ],
        "bindings": {"open": state.bindings.open_count, "ended": state.bindings.ended_count},
        "decisions": [
            {"role": role, "reason": reason, "count": count}
            for (role, reason), count in sorted(_summed(state.observer.totals.exchanges, 0, 1).items())
        ],
        "outcomes": {name: n for (name,), n in sorted(_summed(state.observer.totals.exchanges, 2).items())},
        "relayed": state.relayed,
        "probes": {"asked": state.probe.times.count, "failed": state.probe.failed},
    }


def _summed(counts: Mapping[tuple[str, str, str], int], *places: int) -> Counter[tuple[str, ...]]:
    """The counts by some of their labels."""
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, count in counts.items():
        sums[tuple(str(labels[place]) for place in places)] += count
    return sums


# As many conversations as a person looks at.
CONVERSATIONS = 32


def _latest(state: State) -> list[Conversation]:
    return sorted(state.conversations, key=lambda conversation: -conversation.last_used)[:CONVERSATIONS]


def _server(state: State, server: Server, target: Target) -> dict[str, object]:
    return {
        "topology": _topology(state, target),
        "server": {
            "build": state.probe.known_build(target),
            "epoch": server.epoch,
            "clearsIdleSlots": server.clears_idle_slots,
        },
        "gates": _gates(state, server),
        "sharing": _sharing(state, server),
    }


def _sharing(state: State, server: Server) -> dict[str, object]:
    """`state`: off, on, settling (slots can be claimed in a moment) or lost (Redis is gone). `strangers`: processes on
    this machine that have the same slots and don't share them."""
    if (shared := server.shared) is None:
        return {"state": "off", "strangers": state.neighbours.strangers()}
    found: dict[str, object] = {"state": shared.state, "otherSlotpins": shared.others, "losses": shared.losses}
    return found | {"strangers": state.neighbours.strangers()}


def _topology(state: State, target: Target) -> dict[str, object] | None:
    known = state.probe.latest(target)
    if known is None:
        return None
    found, asked_at = known
    slots = [{"id": slot.id, "n_ctx": slot.n_ctx, "busy": slot.busy, "tokens": slot.tokens} for slot in found.slots]
    return {"slots": slots, "ageSeconds": round(state.clock() - asked_at, 3)}


def _gates(state: State, server: Server) -> list[dict[str, object]]:
    """Only those that somebody holds or waits for."""
    gates = []
    for slot in sorted(server.gates):
        holder = server.gates.holder(slot)
        held = {"heldBy": holder.who, "sinceSeconds": round(state.clock() - holder.since, 3)} if holder else {}
        gates.append({"slot": slot, "waiting": server.gates.waiting(slot), **held})
    return gates
