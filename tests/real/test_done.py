"""Pi closes its socket when it has read `data: [DONE]`, before the end of the chunked body."""

from __future__ import annotations

import pytest

from tests.real.client import OpenRequest
from tests.real.prompts import chat
from tests.real.servers import Llama, Slotpin
from tests.support.processes import wait_until

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("way", ["close", "reset"])
def test_a_client_that_leaves_after_done_has_a_ticket(proxy: Slotpin, two_slots: Llama, way: str) -> None:
    for _ in range(5):
        request = OpenRequest(proxy.url + CHAT, chat(stream=True))
        request.read_until(b"data: [DONE]")
        getattr(request, way)()
        assert proxy.outcome(request.header("x-slotpin-request")) == "completed"
        assert proxy.bindings == (0, 1)
        answer = proxy.post("/compactor" + CHAT, chat())
        assert (answer.status, answer.slot) == (200, 1)
    assert two_slots.idle


def test_a_client_that_leaves_before_done_has_none(proxy: Slotpin, two_slots: Llama) -> None:
    request = OpenRequest(proxy.url + CHAT, chat(stream=True, tokens=20_000))
    request.read_until(b"data: ")
    request.close()
    assert proxy.outcome(request.header("x-slotpin-request")) == "client_left"
    assert proxy.bindings == (0, 0)
    wait_until(lambda: two_slots.idle, "llama-server has freed the slot", 10)
    assert proxy.post("/compactor" + CHAT, chat()).error["code"] == "no_binding"
