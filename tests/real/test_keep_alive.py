"""Connections that the real llama-server closes: idle for five seconds, or used a hundred times."""

from __future__ import annotations

import time

from tests.real.client import fetch
from tests.real.prompts import chat
from tests.real.servers import Slotpin

CHAT = "/v1/chat/completions"


def test_neither_costs_a_request(proxy: Slotpin) -> None:
    for _ in range(230):
        assert fetch(f"{proxy.url}/health").status == 200
    for pause in (0, 3.95, 5.05):
        time.sleep(pause)
        assert proxy.post(CHAT, chat(max_tokens=1)).status == 200
    assert set(proxy.status["outcomes"]) == {"completed"}
