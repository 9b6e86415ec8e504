"""What `slotpin status` and `slotpin top` draw."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from slotpin.observe.board import Board, SlotRow, Sums, Warned
from slotpin.observe.records import UNDER_WAY, WAITING
from slotpin.observe.screen import screen
from tests.observe.made import record


def row(**fields: Any) -> SlotRow:
    whole: dict[str, Any] = {
        "id": 0,
        "model": "",
        "n_ctx": 65536,
        "tokens": 41204,
        "busy": False,
        "role": "main",
        "client": "claude-cli",
        "conversation": "c12",
        "running": None,
        "waiting": 0,
        "reused": [0, 50, 100],
    }
    return SlotRow(**(whole | fields))


def board(**fields: Any) -> Board:
    whole: dict[str, Any] = {
        "version": "1.2.3",
        "mode": "auto",
        "upstream": "http://127.0.0.1:8080",
        "build": "b1",
        "started": 1_790_000_000.0,
        "uptime_seconds": 7500.0,
        "slots": [row(), row(id=1, role=None, client=None, conversation=None, tokens=None, reused=[])],
        "under_way": [],
        "latest": [record()],
        "totals": Sums(exchanges=7, evaluated=1000, cached=9000, spared_seconds=200.0, refused=0, relayed=3),
        "warnings": [],
    }
    return Board(**(whole | fields))


def drawn(shown: Board, encoding: str = "utf-8", width: int = 80, terminal: bool = False, **variables: str) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, _environ=variables)
    console.print(screen(shown, "http://127.0.0.1:8484", console))
    file.flush()
    buffer = file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(encoding)


def lines(shown: Board, **how: Any) -> list[str]:
    return [line.rstrip() for line in drawn(shown, **how).splitlines()]


def test_the_head_says_what_runs_and_what_it_was_good_for() -> None:
    head = lines(board())
    assert head[0] == "slotpin 1.2.3 at http://127.0.0.1:8484, up 2 h 05 min, pinning auto"
    assert head[1] == "in front of http://127.0.0.1:8080 (b1)"
    assert head[2] == "7 requests, 9,000 of 10,000 prompt tokens re-used (90%)"
    assert head[3] == "spared about 3 min 20 s of evaluation"
    assert "pinning off" in lines(board(mode=False))[0]
    assert "pinning true" in lines(board(mode=True))[0]


def test_a_slot_has_its_conversation_and_its_last_turns() -> None:
    slots = lines(board())[5:8]
    assert slots[0].split() == ["slot", "conversation", "role", "state", "tokens", "re-used", "waits"]
    assert slots[1].split() == ["0", "claude-cli", "c12", "main", "idle", "41,204", "/", "65,536", "▁▅█", "100%", "-"]
    assert slots[2].split() == ["1", "-", "-", "idle", "?", "/", "65,536", "-", "-"]


def test_where_bars_can_t_be_shown_there_are_digits() -> None:
    assert "059 100%" in drawn(board(), encoding="ascii")


def test_who_runs_and_who_waits() -> None:
    running = record(id="aa", outcome=UNDER_WAY, seconds=12.0)
    waiting = record(id="bb", outcome=WAITING, seconds=3.0, role="compactor", conversation=None, gate=0)
    astray = record(id="cc", outcome=UNDER_WAY, reason="pinning_stopped", slot=None, gate=None, seconds=1.0)
    shown = board(slots=[row(busy=True, running="aa", waiting=1)], under_way=[running, waiting, astray])
    text = lines(shown)
    assert "busy 12.0 s" in text[6] and text[6].endswith("1")
    assert text[text.index("waiting") + 1] == "compactor  for slot 0  3.00 s  pi"
    assert text[text.index("in slots of the server's choice") + 1] == "main       pinning_stopped  1.00 s  pi c1"


def test_the_tokens_of_a_first_turn_are_not_known_yet() -> None:
    shown = board(slots=[row(busy=True, running="aa", tokens=None)])
    assert "  … / 65,536  " in drawn(shown)
    assert "  ... / 65,536  " in drawn(shown, encoding="ascii")


def test_an_id_is_never_cut() -> None:
    shown = board(latest=[record(lost=700, cause="prompt_changed", waited=7.0)])
    assert "34bdd6a85727" in drawn(shown)


@pytest.mark.parametrize("terminal", [False, True])
def test_eighty_columns_are_enough(terminal: bool) -> None:
    warning = Warned("cache_lost:prompt_changed", f"{'of a long text ' * 20}the remedy", 3)
    many = [row(id=number, waiting=12, tokens=131_072, n_ctx=131_072, reused=[97] * 20) for number in range(9)]
    shown = board(slots=many, warnings=[warning])
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        text = drawn(shown, "utf-8", 80, terminal, **variables)
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b[3" not in text  # no colour
        assert "the remedy (3 times)" in " ".join(text.split())
        assert text.count("131,072 / 131,072") == 9
        assert text.count(" 97%") == 9


def test_colours_are_there_where_they_are_wanted() -> None:
    shown = board(warnings=[Warned("a", "b", 1)])
    assert "\x1b[33m" in drawn(shown, terminal=True, TERM="xterm-256color")
    assert "\x1b" not in drawn(shown)


def test_before_any_slot_is_known() -> None:
    assert "no slot is known yet" in drawn(board(slots=[], latest=[]))


def test_models_of_a_router_are_named() -> None:
    assert "small 0" in drawn(board(slots=[row(model="small")]))
