"""What a person reads on a terminal, and what a program reads otherwise."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from slotpin.observe import lines, log
from tests.real.client import fetch
from tests.real.prompts import chat
from tests.support.processes import wait_until
from tests.support.program import Program

EXCHANGE = {
    "event": "exchange",
    "level": "info",
    "timestamp": "12:04:31",
    "request": "34bdd6a85727",
    "role": "main",
    "found_by": "default",
    "client": "pi",
    "slot": 0,
    "reason": "pinned",
    "outcome": "completed",
    "ms": 1204,
    "waited_ms": 0,
    "evaluated": 34,
    "cached": 812,
}


def line(colours: bool = False, **fields: Any) -> str:
    event = {name: value for name, value in (EXCHANGE | fields).items() if value is not None}
    return lines.renderer(colours=colours)(None, "", event)


def test_an_exchange_is_a_short_line() -> None:
    assert line() == "12:04:31 main       slot 0    pinned  re-used 812 of 846  1.20 s  34bdd6a85727"


def test_an_exchange_says_what_went_wrong() -> None:
    said = line(outcome="client_left", evaluated=None, slot=None, waited_ms=12_300, reason="slot_emptied")
    assert said == "12:04:31 main       any slot  slot_emptied  client left  waited 12.3 s  1.20 s  34bdd6a85727"
    assert "  lost 700 (prompt_changed)  " in line(lost=700, cause="prompt_changed")


@pytest.mark.parametrize("outcome", ["refused", "unreachable"])
def test_what_ran_nowhere_has_no_slot(outcome: str) -> None:
    assert f" main       no slot   too_few_slots  {outcome}  " in line(
        outcome=outcome, slot=None, reason="too_few_slots"
    )


def test_what_went_wrong_stands_out() -> None:
    assert line(colours=True).count("\x1b[") == 2  # the dim time
    for outcome in ("refused", "upstream_broke", "failed"):
        assert "\x1b[1m\x1b[33mmain " in line(colours=True, outcome=outcome)
    assert "\x1b[1mmain " in line(colours=True, outcome="client_left")


def test_a_warning_has_its_cause_first_and_its_request_last() -> None:
    event: dict[str, Any] = {"event": "warning", "level": "warning", "timestamp": "12:04:40", "cause": "slot_shared"}
    event |= {"message": "too few slots; raise --parallel", "request": "5b7d", "role": "main"}
    render = lines.renderer(colours=False)
    assert render(None, "", event) == ("12:04:40 warning: slot_shared: too few slots; raise --parallel [request 5b7d]")


def test_any_other_event_has_its_fields() -> None:
    event: dict[str, Any] = {"event": "config_reloaded", "level": "info", "timestamp": "12:04:40"}
    event |= {"changed": ["log.level", "listen.port"], "generation": 2, "exception": "Traceback\nValueError"}
    said = lines.renderer(colours=False)(None, "", event)
    assert said == "12:04:40 config reloaded  changed=log.level, listen.port  generation=2\nTraceback\nValueError"


def test_colours_only_add_to_the_text() -> None:
    assert "\x1b" in line(colours=True)
    assert re.sub(r"\x1b\[\d+m", "", line(colours=True)) == line()


@pytest.mark.parametrize(
    ("value", "said"), [(0.432, "0.43 s"), (12.04, "12.0 s"), (200.4, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(value: float, said: str) -> None:
    assert lines.seconds(value) == said


def test_json_leaves_out_what_is_not_known(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log.configure("json", "info")
    try:
        log.get().info("exchange", request="a", cause=None)
        log.get().debug("decision", request="a")
    finally:
        structlog.reset_defaults()
    (written,) = capfdbinary.readouterr().err.splitlines()
    event = json.loads(written)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "exchange", "level": "info", "request": "a"}


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_cannot_be_written_is_lost(form: Literal["json", "console"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a full disk, or a reader that has gone, would end what the log only tells of."""
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", broken)
    log.configure(form, "info")
    try:
        log.get().info("config_reloaded", generation=2)
        logging.getLogger("asyncio").error("a library's")
    finally:
        structlog.reset_defaults()
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            broken.close()


def test_level_and_format_change_while_it_runs(tmp_path: Path) -> None:
    def write(**settings: str) -> None:
        content = {"listen": {"port": 0}, "main": {"baseUrl": "http://127.0.0.1:9/v1"}, "log": settings}
        (tmp_path / "slotpin.json").write_text(json.dumps(content))

    write(format="console", level="warning")
    with Program(tmp_path, "serve") as program:
        assert fetch(f"{program.url}/v1/chat/completions", chat()).status == 502
        write(format="json", level="info")
        program.signal(signal.SIGHUP)
        wait_until(lambda: bool(program.events("config_reloaded")), "the file is read")
        assert fetch(f"{program.url}/v1/chat/completions", chat()).status == 502
        wait_until(lambda: bool(program.events("exchange")), "the second one is logged")
        assert [json.loads(line)["event"] for line in program.err.splitlines()] == ["config_reloaded", "exchange"]
