"""How much of what a conversation's last turn left in its slot this turn found again, and why not all of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from slotpin.pinning.counters import Counters
from slotpin.pinning.turn import Difference

# The next turn never has all of a prompt's last tokens: a template closes it with an opening of the answer (a role, an
# empty thought) that it writes otherwise once the answer is there, and a sliding-window or hybrid model goes back to a
# checkpoint four tokens before the end (llama.cpp server-context.cpp, checkpoint_offsets). No loss to look into.
ENDING = 32

# Below these a loss is not worth a warning.
WARN_TOKENS = 256
WARN_SHARE = 10  # a tenth of what was expected


class Left(msgspec.Struct, frozen=True):
    """What a conversation's turn left in its slot, in tokens."""

    prompt: int  # evaluated and re-used
    generated: int | None
    slot: int | None  # None: the server chose
    epoch: int  # of the server process, as the caller counts restarts
    n_ctx: int | None  # of the slot


class Cause(enum.StrEnum):
    """Why tokens were lost, in the order in which they are looked for."""

    SERVER_RESTARTED = "server_restarted"
    SLOTS_CLEARED = "slots_cleared"
    OTHER_REQUEST = "other_request"
    COMPACTED = "client_compacted"
    PROMPT_CHANGED = "prompt_changed"
    CONTEXT_FULL = "context_full"
    WINDOW = "sliding_window_or_hybrid"
    UNKNOWN = "unknown"


class Evidence(msgspec.Struct, frozen=True):
    """What is known of a turn besides its counters."""

    epoch: int
    slot: int | None  # where it ran; None: the server chose
    emptied: bool  # a look before it showed the slot without tokens although nobody had used it
    other_ran: bool  # another exchange ran on that slot since the last turn
    held: bool | None  # a look before it showed tokens in the slot; None: not looked
    difference: Difference | None  # where its prompt stops being an append of the last one


class Reuse(msgspec.Struct, frozen=True):
    """In tokens. `lost` of `expected` were not found again; more than expected may be `got`."""

    expected: int
    got: int
    lost: int
    cause: Cause | None
    detail: str = ""  # which slot or message; has numbers, so it belongs into no refusal

    @property
    def worth_a_warning(self) -> bool:
        """Not where the client meant to lose them."""
        much = self.lost > WARN_TOKENS and self.lost * WARN_SHARE > self.expected
        return much and self.cause is not Cause.COMPACTED


@dataclass(frozen=True, slots=True)
class Advice:
    """Both are sentences without a full stop, in words that make no client try again (as in reasons.py)."""

    cause: str
    remedy: str


REMEDIES: dict[Cause, Advice] = {
    Cause.SERVER_RESTARTED: Advice(
        "llama-server restarted or slept since the last turn",
        "if it slept, start it with a larger --sleep-idle-seconds or without that flag",
    ),
    Cause.SLOTS_CLEARED: Advice(
        "llama-server cleared the conversation's slot while it was idle",
        "start it with --no-cache-idle-slots, or with slotpin up, which does so",
    ),
    Cause.OTHER_REQUEST: Advice(
        "another request ran on the conversation's slot since the last turn",
        "start llama-server with a larger --parallel, so that each conversation has a slot of its own",
    ),
    Cause.COMPACTED: Advice(
        "the client has put a summary in the place of earlier messages",
        "let it compact less often, where its context has room",
    ),
    Cause.PROMPT_CHANGED: Advice(
        "the client changed an earlier part of its prompt",
        "set the client up to only append: no time in its system text, tools in one order, old messages as they were",
    ),
    Cause.CONTEXT_FULL: Advice(
        "the last turn filled its slot's context",
        "start llama-server with a larger --ctx-size, or let the client compact earlier",
    ),
    Cause.WINDOW: Advice(
        "the slot held the conversation, but a sliding window or recurrent layers let the model go back nowhere in it",
        "start llama-server with --swa-full (sliding window) or --ctx-checkpoints 32 or more (recurrent layers)",
    ),
    Cause.UNKNOWN: Advice(
        "the cause is not known; a chat template that leaves out earlier reasoning does this",
        "look up the request in llama-server's log with --verbose",
    ),
}


def advise(cause: Cause, detail: str = "") -> str:
    """One line: why tokens were lost and what mends it."""
    advice = REMEDIES[cause]
    said = f"{advice.cause} ({detail})" if detail else advice.cause
    return f"{said}; {advice.remedy}"


def assess(left: Left | None, counters: Counters, evidence: Evidence) -> Reuse:
    """Compare a turn's counters with what its conversation's last turn left. `left` None: nothing was expected.

    Only the last prompt is expected back. Clients often drop part of what was generated after it, so that is no loss.
    At least one token of every prompt is evaluated (server-context.cpp, TAG_PROMPT_LOGITS).
    """
    got = counters.cached
    if left is None:
        return Reuse(0, got, 0, None)
    expected = max(0, min(left.prompt, counters.evaluated + got - 1))
    lost = max(0, expected - got)
    if lost <= ENDING:
        return Reuse(expected, got, lost, None)
    cause, detail = _cause(left, got, evidence)
    return Reuse(expected, got, lost, cause, detail)


def _cause(left: Left, got: int, evidence: Evidence) -> tuple[Cause, str]:
    if evidence.epoch != left.epoch:
        return Cause.SERVER_RESTARTED, ""
    if evidence.emptied:
        return Cause.SLOTS_CLEARED, _slot(left.slot)
    if evidence.other_ran:
        return Cause.OTHER_REQUEST, _slot(evidence.slot)
    if evidence.difference is not None:
        if evidence.difference.compacted:
            return Cause.COMPACTED, ""
        return Cause.PROMPT_CHANGED, _place(evidence.difference)
    if left.n_ctx is not None and left.prompt + (left.generated or 0) >= left.n_ctx:
        return Cause.CONTEXT_FULL, _slot(left.slot)
    if evidence.slot != left.slot:
        moved = evidence.slot is not None and left.slot is not None
        return (
            Cause.OTHER_REQUEST if moved else Cause.UNKNOWN,
            f"last turn on {_slot(left.slot)}, this one on {_slot(evidence.slot)}",
        )
    # Without a usable checkpoint such a model begins at token 0 (server-context.cpp, "forcing full prompt
    # re-processing"); a prompt that only differs keeps at least its first token.
    if evidence.held and got == 0:
        return Cause.WINDOW, _slot(evidence.slot)
    return Cause.UNKNOWN, _slot(evidence.slot)


def _slot(slot: int | None) -> str:
    return "a slot of the server's choice" if slot is None else f"slot {slot}"


def _place(difference: Difference) -> str:
    return difference.what if difference.index is None else f"message {difference.index} ({difference.what})"
