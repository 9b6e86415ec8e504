"""The board as a terminal shows it: 80 columns are enough, colours only help."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slotpin.observe.board import Board, SlotRow
from slotpin.observe.lines import exchange, seconds
from slotpin.observe.observer import fields
from slotpin.observe.records import WAITING, Record

TURNS = 10
_BARS = "▁▂▃▄▅▆▇█"
# Where the terminal can't show bars: tenths.
_DIGITS = "0123456789"
_MORE = {_BARS: "…", _DIGITS: "..."}
_WARNING, _QUIET = "yellow", "bright_black"


def screen(board: Board, url: str, console: Console) -> RenderableType:
    ticks = _BARS if console.encoding.lower().startswith("utf") else _DIGITS
    parts: list[RenderableType] = [_head(board, url), Text(), _slots(board, ticks)]
    waiting = [record for record in board.under_way if record.outcome == WAITING]
    elsewhere = [record for record in board.under_way if record.outcome != WAITING and record.gate is None]
    parts += _listed("waiting", [_waits(record) for record in waiting])
    parts += _listed("in slots of the server's choice", [_runs(record) for record in elsewhere])
    parts += _listed("latest", [_ended(record) for record in board.latest], whole=True)
    parts += _listed("warnings of the last minute", _warnings(board), _WARNING, whole=True)
    return Group(*parts)


def _head(board: Board, url: str) -> Text:
    mode = "off" if board.mode is False else str(board.mode).lower()
    totals = board.totals
    prompt = totals.cached + totals.evaluated
    share = f" ({100 * totals.cached / prompt:.0f}%)" if prompt else ""
    requests = "1 request" if totals.exchanges == 1 else f"{totals.exchanges:,} requests"
    build = f" ({board.build})" if board.build else ""
    refused = f", {totals.refused} refused" if totals.refused else ""
    text = Text()
    text.append(f"slotpin {board.version}", "bold")
    text.append(f" at {url}, up {seconds(board.uptime_seconds)}, pinning {mode}\n")
    text.append(f"in front of {board.upstream}{build}\n", _QUIET)
    text.append(f"{requests}, {totals.cached:,} of {prompt:,} prompt tokens re-used{share}\n")
    text.append(f"spared about {seconds(totals.spared_seconds)} of evaluation{refused}")
    return text


def _slots(board: Board, ticks: str) -> RenderableType:
    if not board.slots:
        return Text("no slot is known yet: slotpin asks llama-server when a request needs to know")
    more = _MORE[ticks]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_QUIET)
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column("conversation", no_wrap=True, max_width=17, overflow="ellipsis")
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("re-used", no_wrap=True)
    table.add_column("waits", justify="right", no_wrap=True)
    for row in board.slots:
        table.add_row(
            f"{row.model} {row.id}" if row.model else str(row.id),
            _whose(row.client, row.conversation) if row.role is not None else "-",
            row.role or "-",
            Text(_state(row, board.under_way), "bold" if row.busy else ""),
            _tokens(row, more),
            _sparkline(row.reused[-TURNS:], ticks),
            str(row.waiting or "-"),
        )
    return table


def _whose(client: str | None, conversation: str | None) -> str:
    return f"{client} {conversation[:6]}" if conversation else client or "-"


def _state(row: SlotRow, under_way: Sequence[Record]) -> str:
    running = next((record for record in under_way if record.id == row.running), None)
    if running is not None:
        return f"busy {seconds(running.seconds)}"
    return "busy" if row.busy else "idle"


def _tokens(row: SlotRow, more: str) -> str:
    unknown = "?" if row.running is None else more
    held = unknown if row.tokens is None else f"{row.tokens:,}"
    return f"{held} / {row.n_ctx:,}" if row.n_ctx else held


def _sparkline(shares: Sequence[int], ticks: str) -> str:
    if not shares:
        return "-"
    line = "".join(ticks[min(len(ticks) - 1, share * len(ticks) // 100)] for share in shares)
    return f"{line} {shares[-1]}%"


def _waits(record: Record) -> str:
    slot = "a slot" if record.gate is None else f"slot {record.gate}"
    return f"{record.role:9}  for {slot}  {seconds(record.seconds)}  {_whose(record.client, record.conversation)}"


def _runs(record: Record) -> str:
    return f"{record.role:9}  {record.reason}  {seconds(record.seconds)}  {_whose(record.client, record.conversation)}"


def _ended(record: Record) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(record.arrived))} {exchange(fields(record))}"


def _warnings(board: Board) -> list[str]:
    counts = ((each, f" ({each.count} times)" if each.count > 1 else "") for each in board.warnings)
    return [f"{each.cause}: {each.message}{count}" for each, count in counts]


def _listed(heading: str, lines: Sequence[str], style: str = "", *, whole: bool = False) -> list[RenderableType]:
    """What is too long is cut, or wrapped where its end is needed: a warning's remedy, an exchange's id."""
    if not lines:
        return []
    texts = [Text(line, style, no_wrap=not whole, overflow=None if whole else "ellipsis") for line in lines]
    return [Text(), Text(heading, _QUIET), *texts]
