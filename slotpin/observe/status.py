"""The state of the proxy as JSON, without any text of a prompt and without secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotpin import __version__

if TYPE_CHECKING:
    from slotpin.proxy.state import State


def status(state: State) -> dict[str, object]:
    running = state.running
    known = state.probe.latest(running.probe_target)
    topology = None
    if known is not None:
        found, age = known
        topology = {
            "slots": [{"id": slot.id, "n_ctx": slot.n_ctx} for slot in found.slots],
            "ageSeconds": round(age, 3),
        }
    return {
        "version": __version__,
        "uptimeSeconds": round(state.clock() - state.started, 3),
        "mode": running.pin.enabled,
        "generation": running.pin.generation,
        "mainIdSlot": running.pin.main_id,
        "compactorIdSlot": running.pin.compactor_id,
        "endpoints": {"main": running.main.url, "compactor": running.compactor.url},
        "topology": topology,
        "bindings": {"open": state.bindings.open_count, "ended": state.bindings.ended_count},
        "decisions": [
            {"role": role, "reason": reason, "count": count}
            for (role, reason), count in sorted(state.decisions.items())
        ],
        "outcomes": dict(sorted(state.outcomes.items())),
        "relayed": state.relayed,
        "probes": {"asked": state.probe.asked, "failed": state.probe.failed},
        "warnings": [
            {"cause": cause, "message": warned.message, "count": warned.count}
            for cause, warned in sorted(state.warner.recent().items())
        ],
    }
