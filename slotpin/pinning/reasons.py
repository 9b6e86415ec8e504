"""Why a decision fell as it did: the codes, what a person can do about them, and what a refusal says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.StrEnum):
    """Reason codes, as they stand in logs, in `X-Slotpin-Reason` and in the `code` of a refusal."""

    PINNED = "pinned"
    VOUCHED = "vouched"  # enabled: true
    EXPLICIT = "explicit"  # the client's own id_slot, and no conflict
    DISABLED = "disabled"
    ENDPOINTS_DIFFER = "endpoints_differ"
    NOT_JSON_OBJECT = "not_json_object"
    PROBE_FAILED = "probe_failed"
    TOPOLOGY_INVALID = "topology_invalid"
    MODEL_NOT_LOADED = "model_not_loaded"
    TOO_FEW_SLOTS = "too_few_slots"
    IDS_COLLIDE = "ids_collide"
    EXPLICIT_CONFLICT = "explicit_conflict"
    EXPLICIT_UNPREDICTABLE = "explicit_unpredictable"
    ROUTE_IGNORES_SLOT = "route_ignores_slot"
    NO_BINDING = "no_binding"
    SETTINGS_CHANGED = "settings_changed"
    TOPOLOGY_CHANGED = "topology_changed"
    AMBIGUOUS_OVERLAP = "ambiguous_overlap"
    SEVERAL_COMPLETIONS = "several_completions"
    EXTENDS_CONVERSATION = "extends_conversation"  # a side request that is best off in the conversation's own slot
    SLOT_EMPTIED = "slot_emptied"  # the server may restore what the slot held, but only if it chooses the slot
    PINNING_STOPPED = "pinning_stopped"
    SLOT_BUSY = "slot_busy"
    SHARING_LOST = "sharing_lost"
    SLOT_SHARED = "slot_shared"  # only ever a warning
    CACHE_PROMPT_OFF = "cache_prompt_off"  # only ever a warning


@dataclass(frozen=True, slots=True)
class Explanation:
    """`cause` and `remedy` are sentences without a full stop. `passes`: it may be gone at the next try."""

    cause: str
    remedy: str
    passes: bool


# Clients scan these texts: Pi retries on words such as "timeout", "overloaded", "network error" or "connection", and a
# retry can't help here. So none of them may appear.
EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.PROBE_FAILED: Explanation(
        "llama-server did not list its slots",
        "check compactor.baseUrl, compactor.apiKey, and that it runs with --slots",
        passes=True,
    ),
    Reason.TOPOLOGY_INVALID: Explanation(
        "the answer to /slots is not a list of slots",
        "check that compactor.baseUrl names a llama-server",
        passes=True,
    ),
    Reason.MODEL_NOT_LOADED: Explanation(
        "the router has not loaded the request's model, or does not know it",
        "send a main request first, which loads it",
        passes=True,
    ),
    Reason.TOO_FEW_SLOTS: Explanation(
        "llama-server has fewer than two slots",
        "start it with --parallel 2 or more",
        passes=False,
    ),
    Reason.IDS_COLLIDE: Explanation(
        "mainIdSlot and compactorIdSlot are the same slot on this server",
        "choose ids that differ modulo its number of slots, or raise --parallel",
        passes=False,
    ),
    Reason.EXPLICIT_CONFLICT: Explanation(
        "the client's own id_slot puts the main conversation and the compactor on one slot",
        "take id_slot out of the client's settings, or change compactorIdSlot",
        passes=False,
    ),
    Reason.EXPLICIT_UNPREDICTABLE: Explanation(
        "the client's own id_slot lets the server choose any slot",
        "send a whole number from 0, or leave id_slot out",
        passes=False,
    ),
    Reason.ROUTE_IGNORES_SLOT: Explanation(
        "this llama-server ignores id_slot on the Anthropic route, so the request runs on any slot",
        "use the OpenAI routes",
        passes=False,
    ),
    Reason.NO_BINDING: Explanation(
        "no main request has come through slotpin that this side request could belong to",
        "send the main conversation through slotpin as well",
        passes=True,
    ),
    Reason.SETTINGS_CHANGED: Explanation(
        "the slot settings changed after the main request",
        "it works again from the next main request on",
        passes=True,
    ),
    Reason.TOPOLOGY_CHANGED: Explanation(
        "the server's slots changed after the main request",
        "it works again from the next main request on",
        passes=True,
    ),
    Reason.AMBIGUOUS_OVERLAP: Explanation(
        "several main requests are possible and their slot decisions differ",
        "it works again once they have ended",
        passes=True,
    ),
    Reason.SEVERAL_COMPLETIONS: Explanation(
        "the request asks for several completions, which llama-server spreads over other conversations' slots",
        "ask for one at a time",
        passes=False,
    ),
    Reason.SLOT_EMPTIED: Explanation(
        "the conversation's slot has lost its tokens, so the server may choose where to restore them",
        "start llama-server with --no-cache-idle-slots, and with a larger --ctx-size if the slots fill it",
        passes=True,
    ),
    Reason.PINNING_STOPPED: Explanation(
        "this llama-server clears every idle slot when a request starts, so pinning would lose the cache",
        "start it with --no-cache-idle-slots; until then the server chooses the slots",
        passes=True,
    ),
    Reason.SLOT_BUSY: Explanation(
        "the slot has been busy for longer than gate.waitSeconds",
        "wait for the request that holds it, or raise --parallel",
        passes=True,
    ),
    Reason.SHARING_LOST: Explanation(
        "slotpin can't share the slots with the other slotpins, so the server chooses them",
        "check that Redis runs, and sharing.redisUrl; pinning then comes back by itself",
        passes=True,
    ),
    Reason.SLOT_SHARED: Explanation(
        "llama-server has too few slots for a conversation of its own to each",
        "raise --parallel",
        passes=True,
    ),
    Reason.CACHE_PROMPT_OFF: Explanation(
        "the client sends cache_prompt: false, which can clear the main conversation's slot",
        "take cache_prompt out of the client's settings",
        passes=False,
    ),
}


def explain(reason: Reason, detail: str = "") -> str:
    """One line: what is wrong and what mends it. `detail` narrows the cause (the probe's own words)."""
    explanation = EXPLANATIONS[reason]
    cause = f"{explanation.cause} ({detail})" if detail else explanation.cause
    return f"{cause}; {explanation.remedy}"
