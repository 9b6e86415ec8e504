"""What leaves the proxy for a decision, and how llama-server reads it (checked against the server itself)."""

from __future__ import annotations

import json
import math

from slotpin.pinning.decision import Action, Decision
from slotpin.pinning.request import Request, read_body
from slotpin.pinning.splice import splice


def read(body: bytes) -> Request:
    parsed = read_body(body)
    assert parsed is not None
    return parsed.request


def forward(body: bytes, decision: Decision) -> bytes | None:
    """The body that the server gets, None when it gets none."""
    if decision.action is Action.REFUSE:
        return None
    members: dict[str, bytes] = {}
    if decision.add_id:
        members["id_slot"] = str(decision.slot).encode()
    if decision.add_cache_prompt:
        members["cache_prompt"] = b"true"
    return b"".join(splice(body, members, read(body).nulls))


def slots_used(body: bytes, ids: tuple[int, ...]) -> frozenset[int]:
    """The slots on which the server may run `body`.

    The last of equal members wins; numbers are cut to int32, booleans are numbers; ids wrap modulo the slot count; what
    names no slot leaves the choice to the server. Negative ids count as a free choice here: stricter than the server.
    """
    anywhere = frozenset(ids)
    value = json.loads(body.decode("utf-8-sig")).get("id_slot")
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= int(value) < 2**31:
        return anywhere
    slot = int(value) % len(ids)
    return frozenset({slot}) if slot in ids else anywhere
