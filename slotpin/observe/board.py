"""What a person looks at, in one value: each slot, who runs, who waits, what was re-used, what to see to.

Built here from slotpin's own memory, so that looking asks llama-server nothing; read again by the commands.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from slotpin import __version__
from slotpin.observe.records import WAITING, Record

if TYPE_CHECKING:
    from slotpin.proxy.server import Server
    from slotpin.proxy.state import State

LATEST = 8


class SlotRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A slot and whose tokens it holds. `tokens`: as last seen or counted, None where that is not known, as
    before a conversation's first answer in this slot.

    `running`: the request in it, if that is slotpin's; `busy` also when somebody else's was seen there. `reused`: of
    the conversation's last turns, the oldest first, how much of each prompt was re-used, in percent.
    """

    id: int
    model: str
    n_ctx: int | None = msgspec.field(name="n_ctx", default=None)
    tokens: int | None
    busy: bool
    role: str | None
    client: str | None
    conversation: str | None
    running: str | None
    waiting: int
    reused: list[int]


class Warned(msgspec.Struct, frozen=True):
    cause: str
    message: str
    count: int


class Sums(msgspec.Struct, frozen=True, rename="camel"):
    """Since the start, in tokens; `spared_seconds` is an estimate (totals.py)."""

    exchanges: int
    evaluated: int
    cached: int
    spared_seconds: float
    refused: int
    relayed: int


class Board(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`upstream` is llama-server's URL, `mode` `llamaCppSlots.enabled`; `started` Unix time; `latest`
    what has ended, latest first.
    """

    version: str
    mode: bool | str
    upstream: str
    build: str
    started: float
    uptime_seconds: float
    slots: list[SlotRow]
    under_way: list[Record]
    latest: list[Record]
    totals: Sums
    warnings: list[Warned]


def board(state: State) -> Board:
    running, observer, totals = state.running, state.observer, state.observer.totals
    under_way = observer.under_way
    return Board(
        version=__version__,
        mode=running.pin.enabled,
        upstream=running.main.url,
        build=state.probe.known_build(running.probe_target) or "",
        started=observer.since,
        uptime_seconds=round(state.clock() - state.started, 3),
        slots=[row for server in state.servers.values() for row in _rows(state, server, under_way)],
        under_way=under_way,
        latest=observer.records.latest(LATEST),
        totals=Sums(
            exchanges=observer.records.count,
            evaluated=totals.evaluated.total(),
            cached=totals.cached.total(),
            spared_seconds=round(totals.spared_ms / 1000, 3),
            refused=sum(count for (_, _, outcome), count in totals.exchanges.items() if outcome == "refused"),
            relayed=state.relayed,
        ),
        warnings=[
            Warned(cause, warned.message, warned.count) for cause, warned in sorted(state.warner.recent().items())
        ],
    )


def _rows(state: State, server: Server, under_way: Iterable[Record]) -> list[SlotRow]:
    """The slots that the server has listed; of one that was not asked, those that requests were sent to."""
    known = state.probe.latest(server.target)
    seen = {slot.id: slot for slot in known[0].slots} if known is not None else {}
    seen_at = time.time() - (state.clock() - known[1]) if known is not None else 0.0
    here = [record for record in under_way if record.server == server.model and record.gate is not None]
    held = {record.gate: record for record in here if record.outcome != WAITING}
    last: dict[int | None, Record] = {}
    for record in state.observer.records:
        if record.slot is not None and record.server == server.model and record.prompt is not None:
            last.setdefault(record.slot, record)
    rows = []
    for number in sorted(seen or {slot for slot in (*held, *last) if slot is not None}):
        slot, before, now = seen.get(number), last.get(number), held.get(number)
        whose = now or before
        tokens = slot.tokens if slot is not None else None
        if before is not None and before.arrived + before.seconds >= seen_at:
            tokens = before.held
        if now is not None and not _goes_on(before, now):
            tokens = None
        rows.append(
            SlotRow(
                id=number,
                model=server.model,
                n_ctx=slot.n_ctx if slot is not None else None,
                tokens=tokens,
                busy=now is not None or (slot is not None and slot.busy and _is_new(before, seen_at)),
                role=whose.role if whose is not None else None,
                client=whose.client if whose is not None else None,
                conversation=whose.conversation if whose is not None else None,
                running=now.id if now is not None else None,
                waiting=sum(record.outcome == WAITING and record.gate == number for record in here),
                reused=_reused(state, whose.conversation if whose is not None else None),
            )
        )
    return rows


def _goes_on(before: Record | None, now: Record) -> bool:
    """Whether the slot's tokens are those of the conversation that runs there now."""
    return before is not None and before.conversation is not None and before.conversation == now.conversation


def _is_new(before: Record | None, seen_at: float) -> bool:
    """Whether a look is newer than the end of the slot's last exchange."""
    return before is None or before.arrived + before.seconds < seen_at


def _reused(state: State, conversation: str | None) -> list[int]:
    turns = state.history.turns(conversation) if conversation is not None else ()
    return [round(100 * turn.cached / max(1, turn.cached + turn.evaluated)) for turn in turns]
