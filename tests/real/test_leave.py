"""Clients that leave: early, so that the server must stop, or right after the last event, as Pi does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.client import OpenRequest
from tests.real.prompts import chat, prose
from tests.real.servers import Llama, llama, slotpin
from tests.support.processes import wait_until

CHAT = "/v1/chat/completions"
# The server looks for a client that has left once a second, between two batches; a look at /slots delays that, so the
# first look comes after it, and only a few follow.
SERVER_LOOKS = 1.2
LOOK = 0.3


@pytest.fixture(scope="module")
def slow() -> Iterator[Llama]:
    with llama("--ctx-size", "131072", "--batch-size", "256", "--ubatch-size", "256") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", ["close", "reset"])
def test_a_client_that_leaves_while_its_prompt_is_evaluated(
    tmp_path: Path, slow: Llama, stream: bool, way: str
) -> None:
    # Many seconds of evaluation, and not the tokens of the test before.
    prompt = prose(100_000, seed=2 * stream + (way == "close"))
    with slotpin(tmp_path, slow.url) as proxy:
        request = OpenRequest(proxy.url + CHAT, chat(prompt, stream=stream))
        wait_until(lambda: proxy.bindings == (1, 0), "the main request is bound")
        wait_until(lambda: not slow.idle, "the server evaluates")
        left = time.monotonic()
        getattr(request, way)()
        wait_until(lambda: proxy.bindings == (0, 0), "the binding is gone", 1)
        time.sleep(SERVER_LOOKS)
        while not slow.idle:
            assert time.monotonic() < left + 4, "the server goes on evaluating"  # alone on a machine it takes under 2 s
            time.sleep(LOOK)
        took = time.monotonic() - left
        print(f"idle after {took:.1f} s")
        assert request.received == b""
        assert slow.slots[0]["n_prompt_tokens"] < 90_000  # it was stopped, it had not finished
        assert proxy.post("/compactor" + CHAT, chat()).error["code"] == "no_binding"
