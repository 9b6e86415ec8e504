"""The real Pi with the blocks of its page: set up by its command, and by hand."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.agents import SHORT
from tests.clients.pages import MODEL, URL, blocks
from tests.real.servers import Slotpin, llama, slotpin
from tests.support.pi.rpc import Event, Pi, answers
from tests.support.program import TOP, run

WORDS = 2500
"""In a prompt: Pi, which takes four characters for a token, thinks that they are more than the page's settings let a
compaction keep."""
SYSTEM = 600
"""Tokens: Pi's system text and its tools have some more."""
LONG = ("administration", "characteristics", "representation", "transformation", "understanding", "international")


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Slotpin]:
    flags = ("--parallel", "4", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--ctx-size", "32768")
    (tmp_path / "proxy").mkdir()
    with llama(*flags, "--alias", MODEL, *SHORT) as server, slotpin(tmp_path / "proxy", server.url) as running:
        yield running


def prose(seed: int) -> str:
    return " ".join(random.Random(seed).choices(LONG, k=WORDS))


def two_prompts_a_compaction_and_one_more(home: Path, url: str, files: Mapping[str, str], *flags: str) -> list[Event]:
    """The answers' usages: of the turns, and of the compaction after the second."""
    with Pi(home, url, "--model", MODEL, *flags, files=files) as session:
        turns = [*answers(session.prompt(prose(1))), *answers(session.prompt(prose(2)))]
        compacted = session.call("compact")
        assert compacted["success"], compacted
        turns += answers(session.prompt("Go on."))
    assert [answer["stopReason"] for answer in turns] == ["stop"] * 3, turns
    first, second, last = (answer["usage"] for answer in turns)
    return [first, second, compacted["data"]["usage"], last]


def check_reuse(usages: list[Event]) -> None:
    first, second, compaction, last = usages
    assert second["cacheRead"] >= first["input"] - 1 > WORDS
    assert compaction["cacheRead"] == 0
    assert last["cacheRead"] > SYSTEM


LINE = re.compile(r"^[\d:]{8} (main|compactor) +slot (\d+) +(\w+)  re-used [\d,]+ of [\d,]+  ", re.MULTILINE)


def logged(proxy: Slotpin) -> list[tuple[str, str, str]]:
    """Role, slot and reason of each request, as the page's lines begin."""
    return [(event["role"], str(event["slot"]), event["reason"]) for event in proxy.program.exchanges()]


def test_set_up_by_its_command(tmp_path: Path, proxy: Slotpin) -> None:
    setup, find_extension = (shlex.split(block) for block in blocks("pi", "sh"))
    port = str(urlsplit(proxy.url).port)
    done = run(tmp_path, *setup[1:], "--yes", SLOTPIN_LISTEN_PORT=port)
    assert (setup[0], done.returncode) == ("slotpin", 0), done
    agent = tmp_path / ".pi" / "agent"
    files = {name: (agent / name).read_text() for name in ("models.json", "settings.json")}
    found = subprocess.run(
        find_extension, env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True, check=True
    )
    assert (agent / "extensions" / "slotpin.ts").read_bytes() == Path(found.stdout.strip()).read_bytes()
    usages = two_prompts_a_compaction_and_one_more(tmp_path / "pi", proxy.url, files, "-e", found.stdout.strip())
    check_reuse(usages)
    (log,) = blocks("pi", "")
    assert logged(proxy) == LINE.findall(log)


def test_set_up_by_hand(tmp_path: Path, proxy: Slotpin) -> None:
    models, settings = blocks("pi", "json")
    files = {"models.json": models.replace(URL, proxy.url), "settings.json": settings}
    usages = two_prompts_a_compaction_and_one_more(tmp_path / "pi", proxy.url, files)
    check_reuse(usages)
    (log,) = blocks("pi", "")
    assert logged(proxy) == LINE.findall(log)
    found = [event["found_by"] for event in proxy.program.exchanges()]
    assert found == ["default", "default", "pi-summary", "default"]
