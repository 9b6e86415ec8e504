"""One exchange in plain words: why it went where it went, and what its cache did."""

from __future__ import annotations

import time

from slotpin.observe.lines import seconds
from slotpin.observe.records import UNDER_WAY, WAITING, Record
from slotpin.pinning.reasons import EXPLANATIONS, Reason, explain
from slotpin.pinning.reuse import ENDING, Cause, advise
from slotpin.pinning.roles import Role

_FOUND_BY = {
    "path": "its path says so",
    "header": "its X-Slotpin-Role header says so",
    "default": "nothing marks it as a side request",
}
# For the reasons that are no complaint.
_CHOSEN = {
    Reason.VOUCHED: "llamaCppSlots.enabled is true: pinned without asking llama-server for its slots",
    Reason.EXPLICIT: "the client's own id_slot, which slotpin leaves as it is",
    Reason.EXTENDS_CONVERSATION: "a side request that goes on with a conversation, so it runs on that one's slot, "
    "where everything is re-used",
    Reason.DISABLED: "llamaCppSlots.enabled is false: slotpin passes everything on as it is",
    Reason.ENDPOINTS_DIFFER: "main and compactor are different servers, so there is nothing to keep apart",
    Reason.NOT_JSON_OBJECT: "its body is not a JSON object, so slotpin passed it on as it came",
}
_OUTCOMES = {
    WAITING: "it waits for its slot",
    UNDER_WAY: "it is under way",
    "completed": "the client got its whole answer",
    "client_left": "the client left before the answer was complete",
    "cut_off": "slotpin was stopped before the answer was complete",
    "upstream_broke": "llama-server's answer broke off, or ended without its message end",
    "upstream_refused": "llama-server answered with an error, which was passed on",
    "unreachable": "llama-server could not be reached; the client got 502",
    "refused": "slotpin refused it, so that it could not damage a conversation's cache",
    "failed": "an error of slotpin's own; its log has the details",
}


def explained(record: Record) -> list[tuple[str, str]]:
    """Headings and what stands under them."""
    found = [
        ("Request", _request(record)),
        ("Role", f"{record.role}: {_FOUND_BY.get(record.found_by, f'the recogniser {record.found_by} matched')}"),
        ("Slot", _slot(record)),
    ]
    if record.conversation is not None:
        found.append(("Conversation", record.conversation))
    if (gate := _gate(record)) is not None:
        found.append(("Gate", gate))
    found.append(("Cache", _cache(record)))
    found.append(("Outcome", _outcome(record)))
    found += [("Warning", f"{code}: {_reason(code)}") for code in record.warnings if code != record.reason]
    return found


def _request(record: Record) -> str:
    arrived = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.arrived))
    model = f", model {record.model}" if record.model else ""
    return f"{record.id}, {arrived}, from {record.client}{model}"


def _slot(record: Record) -> str:
    of = f" of {record.slots}" if record.slots is not None else ""
    slot = f"slot {record.slot}{of}" if record.slot is not None else "a slot of llama-server's choice"
    if record.action == "refuse":
        slot = "none"
    if record.outcome == WAITING and record.gate is not None:
        slot = f"slot {record.gate}{of}, unless it turns out to be emptied"
    why = _pinned(record) if record.reason == Reason.PINNED else _reason(record.reason, record.detail)
    return f"{slot} ({record.reason}): {why}"


def _pinned(record: Record) -> str:
    main = "main requests" if record.conversation is None else "this conversation"
    kept_for = "side requests" if record.role == Role.COMPACTOR else main
    return f"slotpin put id_slot into the request, so that it runs in the slot that is kept for {kept_for}"


def _reason(code: str, detail: str = "") -> str:
    reason = Reason(code)
    return explain(reason, detail) if reason in EXPLANATIONS else _CHOSEN[reason]


def _gate(record: Record) -> str | None:
    if record.outcome == WAITING:
        return f"waiting for slot {record.gate} since {seconds(record.seconds)}"
    if record.waited is None:
        return None
    if record.waited < 0.01:
        return "the slot was free"
    return f"it waited {seconds(record.waited)} for its slot"


def _cache(record: Record) -> str:
    if record.evaluated is None or record.cached is None:
        refused = record.outcome == "refused"
        return "nothing was evaluated" if refused else "llama-server has not said what it re-used"
    prompt = record.evaluated + record.cached
    took = f" in {seconds(record.prompt_ms / 1000)}" if record.prompt_ms is not None else ""
    said = f"{record.cached:,} of {prompt:,} prompt tokens were re-used, {record.evaluated:,} evaluated{took}"
    if record.expected is None:
        return said
    if not record.expected:
        return f"{said}; nothing was expected to be there"
    if not record.lost or record.cause is None:
        rest = f", but for the last few ({ENDING} at most)" if record.lost else ""
        return f"{said}; all that the last turn left ({record.expected:,}) was found again{rest}"
    return (
        f"{said}; {record.lost:,} of {record.expected:,} were lost: {advise(Cause(record.cause), record.cause_detail)}"
    )


def _outcome(record: Record) -> str:
    took = f"; {seconds(record.seconds)}" if record.outcome != WAITING else ""
    generated = f", {record.generated} tokens generated" if record.generated is not None else ""
    status = f" (HTTP {record.status})" if record.status is not None and record.status != 200 else ""
    own = (
        f", of which slotpin took {1000 * record.planned:.1f} ms" if record.outcome not in (WAITING, UNDER_WAY) else ""
    )
    return f"{record.outcome}: {_OUTCOMES[record.outcome]}{status}{generated}{took}{own}"
