"""The real opencode, with the settings of its page, in front of a real slotpin and a real llama-server."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slotpin.llama.launch import free_port
from tests.clients.agents import SHORT, environment
from tests.clients.pages import MODEL, URL, blocks
from tests.real.client import fetch
from tests.real.servers import llama, slotpin
from tests.support.llama import HOST
from tests.support.npm import program
from tests.support.processes import wait_until

FLAGS = ("--parallel", "4", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--ctx-size", "32768")
QUIET = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}


class Opencode:
    """`opencode serve`, which does what its terminal does, by HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, **body: object) -> Any:
        answer = fetch(f"{self._url}/session{path}", body)
        assert answer.status == 200, answer
        return answer.json

    def ask(self, session: str, text: str) -> dict[str, Any]:
        """The tokens of the answer to a prompt, as opencode counts them."""
        answer = self.post(f"/{session}/message", parts=[{"type": "text", "text": text}])
        assert answer["info"]["finish"] == "stop", answer
        tokens: dict[str, Any] = answer["info"]["tokens"]
        return tokens


@contextmanager
def opencode(home: Path, url: str) -> Iterator[Opencode]:
    """With the page's opencode.json in its folder."""
    (config,) = blocks("opencode", "json")
    (home / "opencode.json").write_text(config.replace(URL, url))
    port = free_port(HOST, 0)
    binary = program("opencode", "opencode-*/bin/opencode")
    with (home / "opencode.out").open("wb") as out:
        process = subprocess.Popen(
            [binary, "serve", "--port", str(port)],
            cwd=home,
            env=environment(home, **QUIET),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        wait_until(lambda: "listening on" in (home / "opencode.out").read_text(), "opencode listens", 60)
        yield Opencode(f"http://{HOST}:{port}")
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="opencode is pinned for x86-64 only")
def test_turns_titles_and_a_compaction(tmp_path: Path) -> None:
    with (
        llama(*FLAGS, "--alias", MODEL, *SHORT) as server,
        slotpin(tmp_path, server.url) as proxy,
        opencode(tmp_path, proxy.url) as client,
    ):
        first, second = (client.post("")["id"] for _ in range(2))
        for session in (first, second):
            said = [client.ask(session, text) for text in ("Which files are here?", "And which are mine?")]
            assert said[1]["cache"]["read"] >= said[0]["input"] - 1  # all of the turn before
        assert client.post(f"/{first}/summarize", providerID="slotpin", modelID=MODEL) is True
        kept = client.ask(second, "Go on.")
        assert kept["cache"]["read"] >= said[1]["input"] + said[1]["cache"]["read"] - 1
        after = client.ask(first, "Go on.")
        assert after["cache"]["read"] > after["input"]  # its system text and tools

        decisions = proxy.program.exchanges()
        turns = [
            (event["conversation"], event["slot"], event["reason"]) for event in decisions if event["role"] == "main"
        ]
        a, b = ("c1", 0, "pinned"), ("c2", 2, "pinned")
        assert turns == [a, a, b, b, b, a]
        side = [event for event in decisions if event["role"] == "compactor"]
        # The titles may come before their sessions' first turns.
        assert [(event["found_by"], event["slot"]) for event in side] == [("opencode-summary", 1)] * 3
        assert side[2]["reason"] == "pinned"
        assert {slot for slot, _ in server.selections} == {0, 1, 2}
