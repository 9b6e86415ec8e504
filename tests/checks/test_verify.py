"""`slotpin verify` as a user runs it: its figures are the server's own."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slotpin.checks.conversation import Turn
from slotpin.checks.verify import Result, kept, verdict
from tests.checks.servers import FOUR, RECOMMENDED, Running, llama, unused_port
from tests.real.client import fetch
from tests.support.program import Program, assert_lines, run

NAMES = ["main turn", "compaction", "follow-up", "repeated follow-up"]
EVALUATED = re.compile(r"print_timing: id +(\d+) \| task \d+ \| prompt eval time = +[\d.]+ ms / +(\d+) tokens")
TOTAL = re.compile(r"release: id +(\d+) \| task \d+ \| stop processing: n_tokens = +(\d+)")
CHOSEN = re.compile(r"id +(\d+) \| task -?\d+ \| selected slot by (id|LRU|LCP)")


def verify(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    port = () if "--port" in arguments else ("--port", str(unused_port()))
    return run(home, "verify", *port, *arguments, **variables)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def logged(pattern: re.Pattern[str], server: Running) -> list[tuple[str, ...]]:
    return pattern.findall(server.log_path.read_text())


def test_the_figures_are_those_of_the_server_s_log(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        done = verify(tmp_path, "--enabled", "auto", "--json", *server.upstream)
        evaluated, totals, chosen = (logged(pattern, server) for pattern in (EVALUATED, TOTAL, CHOSEN))
    assert done.returncode == 0
    found = report(done)
    assert found["kept"] is True
    turns = found["throughSlotpin"] + found["direct"]
    assert [turn["name"] for turn in turns] == NAMES * 2
    assert [(str(turn["slot"]), str(turn["evaluated"])) for turn in turns] == evaluated
    # What the slot holds at the end: the prompt and the answer, whose last token is not evaluated.
    held = [(str(turn["slot"]), str(turn["evaluated"] + turn["reused"] + 15)) for turn in turns]
    assert held == totals
    assert chosen[:4] == [("0", "id"), ("1", "id"), ("0", "id"), ("0", "id")]
    assert "id" not in {how for _, how in chosen[4:]}

    main, side, follow_up, again = found["throughSlotpin"]
    assert 900 <= main["evaluated"] <= 1100
    assert main["reused"] == 0
    assert side["reused"] < 20
    assert follow_up["reused"] >= main["evaluated"]
    assert follow_up["evaluated"] < 60
    assert again["evaluated"] <= 2
    assert found["direct"][0]["reused"] < 20
    counted = f"{follow_up['reused']} were re-used and {follow_up['evaluated']} evaluated."
    assert found["verdict"].startswith("Main kept its cache: of the follow-up's ")
    assert counted in found["verdict"]
    assert "Main ran on slot 0, the compaction on slot 1, as slotpin had pinned them." in found["verdict"]


def test_the_table_and_the_progress(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        done = verify(tmp_path, "--enabled", "auto", "--tokens", "200", *server.upstream)
    assert done.returncode == 0
    rows = done.stdout.splitlines()
    assert rows[0].split() == ["slot", "evaluated", "re-used", "prompt", "ms"]
    assert rows[1] == "through slotpin"
    assert rows[6] == "without slotpin (other text, so that nothing is shared)"
    assert [row.strip().partition("  ")[0] for row in rows[2:6] + rows[7:11]] == NAMES * 2
    assert rows[-1].startswith("Main kept its cache")
    assert "through slotpin: follow-up: slot 0, " in done.stderr
    assert "without slotpin: repeated follow-up: slot " in done.stderr
    assert "{" not in done.stderr


def test_it_uses_the_slotpin_that_runs(tmp_path: Path) -> None:
    with (
        llama(*RECOMMENDED) as server,
        Program(tmp_path, "serve", "--enabled", "auto", "--port", "0", *server.upstream) as program,
    ):
        port = program.url.rpartition(":")[2]
        flags = ("--port", port, *server.upstream, "--tokens", "200", "--no-direct", "--json")
        done = verify(tmp_path, *flags)
        status = fetch(f"{program.url}/slotpin/status").json
        assert done.stderr.startswith(f"using the slotpin that runs on {program.url}\n")
    assert done.returncode == 0
    found = report(done)
    assert found["direct"] == []
    assert [turn["slot"] for turn in found["throughSlotpin"]] == [0, 1, 0, 0]
    assert sum(each["count"] for each in status["decisions"]) == 4


def test_other_requests_meanwhile_are_not_taken_for_its_own(tmp_path: Path) -> None:
    with llama(*FOUR) as server, busy(server, slot=3):
        done = verify(tmp_path, "--enabled", "auto", "--json", *server.upstream)
    assert done.returncode == 0
    found = report(done)
    assert [turn["slot"] for turn in found["throughSlotpin"]] == [0, 1, 0, 0]
    assert {turn["slot"] for turn in found["direct"]} <= {0, 1, 2}


@contextmanager
def busy(server: Running, slot: int) -> Iterator[None]:
    """One request after the other on that slot."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            server.use(slot, "somebody else's short prompt")

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            ended.set()
        asked.result()


def test_main_loses_its_cache(tmp_path: Path) -> None:
    """Both on one slot, and no host-memory cache to bring it back."""
    with llama(*RECOMMENDED, "--cache-ram", "0") as server:
        one_slot = ("--enabled", "true", "--set", "llamaCppSlots.compactorIdSlot=0")
        done = verify(tmp_path, *one_slot, "--tokens", "300", "--no-direct", "--json", *server.upstream)
    assert done.returncode == 1
    found = report(done)
    assert found["kept"] is False
    assert found["verdict"].startswith("Main lost its cache: of the follow-up's ")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "llamaCppSlots.enabled is false, so nothing is pinned; use --enabled auto"),
        (
            ("--enabled", "auto", "--tokens", "8000"),
            "--tokens 8000: that takes 13733 tokens of context",
        ),
        (("--enabled", "auto", "--set", "compactor.baseUrl=http://127.0.0.1:1/v1"), "main and side requests have"),
    ],
)
def test_what_can_not_be_run(tmp_path: Path, flags: tuple[str, ...], line: str) -> None:
    with llama(*RECOMMENDED) as server:
        done = verify(tmp_path, *flags, *server.upstream)
        assert server.held == [0, 0]
    assert done.returncode == 2
    assert done.stdout == ""
    assert_lines(done.stderr, line)


def test_one_slot(tmp_path: Path) -> None:
    with llama("--parallel", "1") as server:
        done = verify(tmp_path, "--enabled", "auto", *server.upstream)
    assert done.returncode == 2
    assert_lines(done.stderr, f"{server.url} has 1 slot, so nothing can be pinned; see slotpin doctor")


def test_nothing_listens(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    done = verify(tmp_path, "--enabled", "auto", "--upstream", f"{url}/v1")
    assert done.returncode == 2
    assert_lines(done.stderr, f"{url}: nothing listens there; see slotpin doctor")


def test_wrong_key(tmp_path: Path) -> None:
    with llama(*RECOMMENDED, "--api-key", "right") as server:
        done = verify(tmp_path, "--enabled", "auto", *server.upstream, SLOTPIN_COMPACTOR_API_KEY="wrong")
        assert done.returncode == 2
        assert_lines(done.stderr, f"{server.url} does not accept compactor.apiKey; see slotpin doctor")
        right = ("--tokens", "100", "--no-direct")
        done = verify(tmp_path, "--enabled", "auto", *right, *server.upstream, SLOTPIN_COMPACTOR_API_KEY="right")
        assert done.returncode == 0


def test_a_slotpin_that_wants_a_key(tmp_path: Path) -> None:
    """A second one beside it would know nothing of its requests."""
    keys = {"SLOTPIN_LISTEN_API_KEYS": '["k"]'}
    with (
        llama(*RECOMMENDED) as server,
        Program(tmp_path, "serve", "--enabled", "auto", "--port", "0", *server.upstream, **keys) as program,
    ):
        flags = ("--port", program.url.rpartition(":")[2], *server.upstream, "--tokens", "100", "--no-direct")
        done = verify(tmp_path, "--enabled", "auto", *flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert_lines(done.stderr, f"slotpin runs on {program.url} and wants a key: set SLOTPIN_LISTEN_API_KEYS=")
        assert verify(tmp_path, *flags, **keys).returncode == 0


# --- the verdict ----------------------------------------------------------------------------------------------------

MAIN = Turn("main turn", 0, 0, 1000, 0, 10.0, "pinned")
SIDE = Turn("compaction", 1, 1, 600, 0, 10.0, "pinned")
FOLLOW_UP = Turn("follow-up", 0, 0, 30, 1000, 1.0, "pinned")
AGAIN = Turn("repeated follow-up", 0, 0, 1, 1029, 1.0, "pinned")


def changed(**turns: Turn) -> list[Turn]:
    return list(({"main": MAIN, "side": SIDE, "follow_up": FOLLOW_UP, "again": AGAIN} | turns).values())


@pytest.mark.parametrize(
    ("turns", "keeps"),
    [
        (changed(), True),
        (changed(follow_up=replace(FOLLOW_UP, evaluated=130, reused=900)), True),
        (changed(follow_up=replace(FOLLOW_UP, evaluated=131, reused=899)), False),
        (changed(again=replace(AGAIN, evaluated=1030, reused=0)), False),
        (changed(side=replace(SIDE, evaluated=0, reused=600)), True),
    ],
)
def test_kept(turns: list[Turn], keeps: bool) -> None:
    assert kept(turns) is keeps
    said = verdict(Result(turns, []))
    assert said.startswith("Main kept its cache" if keeps else "Main lost its cache")


@pytest.mark.parametrize(
    ("turns", "direct", "part"),
    [
        (changed(), [], "Main ran on slot 0, the compaction on slot 1, as slotpin had pinned them."),
        (changed(side=replace(SIDE, slot=None)), [], "it is not known which slot each turn had"),
        (changed(side=replace(SIDE, pinned=None, reason="busy")), [], "not all of it pinned (busy)."),
        (changed(side=replace(SIDE, slot=0)), [], "is not where slotpin had sent them"),
        (changed(), changed(follow_up=replace(FOLLOW_UP, evaluated=1030)), "the follow-up evaluated 1030."),
        (changed(), changed(), "evaluated 30, about as much: llama-server happened to choose another slot"),
        (changed(), changed(side=replace(SIDE, slot=0)), "brought it back from its prompt cache in host memory (--cac"),
        (changed(), changed(side=replace(SIDE, slot=None)), "about as much: nothing was lost this time."),
        (changed(), changed(follow_up=replace(FOLLOW_UP, evaluated=9)), "evaluated only 9: that must not be"),
    ],
)
def test_the_verdict_s_words(turns: list[Turn], direct: list[Turn], part: str) -> None:
    assert part in verdict(Result(turns, direct))
