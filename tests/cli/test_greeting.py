"""The lines at the start: what they propose must work as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slotpin.config import load
from slotpin.greeting import Start, greeting
from slotpin.pinning.topology import Slot, Topology
from slotpin.proxy.discover import Found

HERE = "http://127.0.0.1:8484"


def lines(url: str, start: Start, *, slots: int = 4, **listen: str) -> dict[str, str]:
    found = Found(Topology(tuple(Slot(number, 4096) for number in range(slots))), "tiny")
    said = greeting(
        url, load(start.config, {}, {f"listen.{name}": value for name, value in listen.items()}), found, start
    )
    return {line[:20].strip(): line[20:] for line in said[1:]}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """slotpin in a folder that PATH does not have."""
    path = tmp_path / ".venv" / "bin" / "slotpin"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return path


def test_the_program_is_named_so_that_a_shell_finds_it(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = " pi setup, then: pi --model slotpin/tiny"
    assert lines(HERE, Start())["Pi"] == f".venv/bin/slotpin{ends}"
    monkeypatch.chdir(program.parent)
    assert lines(HERE, Start())["Pi"] == f"{program}{ends}"
    monkeypatch.setenv("PATH", str(program.parent))
    assert lines(HERE, Start())["Pi"] == f"slotpin{ends}"


def test_pi_is_sent_to_this_slotpin(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    other = "http://127.0.0.1:8491"
    assert lines(other, Start(), port="8491")["Pi"].startswith("slotpin pi setup --port 8491, then: ")
    assert lines(other, Start(), port="0")["Pi"].startswith("slotpin pi setup --port 8491, then: ")
    lan = lines("http://192.0.2.1:8484", Start(), host="192.0.2.1")
    assert lan["Pi"].startswith("slotpin pi setup --host 192.0.2.1, then: ")
    file = program.parents[2] / "my slotpin.json"
    file.write_text(json.dumps({"listen": {"port": 8491}}))
    named = f"slotpin pi setup --config '{file}'"
    assert lines(other, Start(file))["Pi"].startswith(f"{named}, then: ")
    assert lines(HERE, Start(file), port="8484")["Pi"].startswith(f"{named} --port 8484, then: ")


def test_slots() -> None:
    assert lines(HERE, Start())["slots"] == "4, context of each 4096 tokens"
    assert lines(HERE, Start(own_server=True, shared=True))["slots"] == "4, sharing 4096 tokens"


@pytest.mark.parametrize(
    ("start", "remedy"),
    [
        (Start(), "start llama-server with --parallel 4"),
        (Start(own_server=True, shared=True), "slotpin up --parallel 4"),
    ],
)
def test_one_slot_is_too_few(start: Start, remedy: str) -> None:
    said = lines(HERE, start, slots=1)["slots"]
    assert said == f"1, so side requests can't be kept apart from the conversation; {remedy}"
