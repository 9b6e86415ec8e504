"""Whether llama-server empties its idle slots (`--cache-idle-slots` with a unified KV cache).

`/props` does not show it, the slots do: with that flag, starting any task clears all slots that are idle
(tools/server/server-context.cpp, TAG_IDLE_SLOT_CLEAR).
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from slotpin.checks.client import NoAnswerError, Server
from slotpin.checks.look import Slot, read_slots

# The seed of our prompts: `/slots` shows it, so what an earlier look has left is known for nobody's.
PROBE_SEED = 1936486500


class Idle(enum.Enum):
    KEPT = enum.auto()
    CLEARED = enum.auto()
    EMPTIED = enum.auto()  # one was, for whatever reason
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """`detail` says how it was seen, or why it was not."""

    idle: Idle
    detail: str


def is_nobodys(slot: Slot) -> bool:
    """Idle, and without tokens but those of an earlier look."""
    return not slot.is_processing and (not slot.holds_tokens or slot.params.seed == PROBE_SEED)


async def provoke(server: Server, slots: Sequence[Slot], *, careful: bool) -> Seen:
    """Two short prompts on two slots that nobody uses, then a look whether the first one still has its tokens.

    A server that clears idle slots clears those of others too when our prompt starts. `careful`: not while any slot
    is in use.
    """
    if reason := _obstacle(slots, careful=careful):
        return Seen(Idle.UNKNOWN, f"left out: {reason}")
    first, second = [slot.id for slot in slots if is_nobodys(slot)][-2:]
    try:
        for slot_id in (first, second):
            reply = await server.post("/completion", _prompt(slot_id))
            if reply.status != 200:
                return Seen(Idle.UNKNOWN, f"left out: slot {slot_id} answered {reply.error}")
    except NoAnswerError as error:
        return Seen(Idle.UNKNOWN, f"left out: {error}")
    after = await read_slots(server)
    left = {slot.id: slot for slot in after} if isinstance(after, list) else {}
    if first not in left or left[first].n_prompt_tokens is None:
        return Seen(Idle.UNKNOWN, "the server does not show what its slots hold")
    if left[first].holds_tokens:
        return Seen(Idle.KEPT, f"slot {first} kept its tokens while slot {second} worked")
    return Seen(Idle.CLEARED, f"slot {first} was emptied when a prompt started on slot {second}")


def without_provoking(slots: Sequence[Slot], detail: str) -> Seen:
    """What a look alone can tell: a slot that has worked and is empty now was emptied, by clearing or for room."""
    emptied = [slot.id for slot in slots if slot.used and not slot.is_processing and slot.n_prompt_tokens == 0]
    if emptied:
        return Seen(Idle.EMPTIED, f"slot {emptied[0]} has worked and is empty now")
    return Seen(Idle.UNKNOWN, detail)


def _obstacle(slots: Sequence[Slot], *, careful: bool) -> str:
    free = sum(map(is_nobodys, slots))
    if free < 2:
        return f"it takes two slots that nobody uses, and there {'is 1' if free == 1 else 'are none'}"
    if careful and free < len(slots):
        used = ", ".join(str(slot.id) for slot in slots if not is_nobodys(slot))
        return f"a server that clears idle slots would clear those in use ({used}) too; look all the same: --probe"
    return ""


def _prompt(slot_id: int) -> dict[str, object]:
    # New text each time: nothing of it may match what the host-memory cache holds.
    text = f"{secrets.token_hex(16)} is a prompt of slotpin doctor"
    return {"prompt": text, "n_predict": 1, "id_slot": slot_id, "cache_prompt": True, "seed": PROBE_SEED}
