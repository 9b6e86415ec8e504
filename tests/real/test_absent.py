"""Nothing behind slotpin, or a server that still loads its model."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from slotpin.llama.launch import free_port
from tests.real.client import fetch
from tests.real.prompts import chat
from tests.real.servers import llama, slotpin
from tests.support.llama import HOST

CHAT = "/v1/chat/completions"


def test_a_server_that_loads_says_so_itself(tmp_path: Path) -> None:
    port = free_port(HOST, 0)
    # Many slots make the load long enough to be seen.
    many = ("--parallel", "32", "--no-kv-unified", "--ctx-size", "524288")
    with slotpin(tmp_path, f"http://{HOST}:{port}") as proxy, llama(*many, port=port, loaded=False) as server:
        loading = None
        deadline = time.monotonic() + 30
        while (answer := fetch(proxy.url + CHAT, chat())).status != 200:
            assert time.monotonic() < deadline, answer
            assert answer.status in (502, 503), answer  # 502: it does not listen yet
            if answer.status == 503:
                loading = answer
                refused = fetch(f"{proxy.url}/compactor{CHAT}", chat())
        assert loading is not None, "the server had loaded before the first look"
        assert loading.error == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        assert (loading.role, loading.slot, loading.reason) == ("main", None, "probe_failed")
        assert "the model is loading" in loading.warning
        assert refused.error["code"] in ("probe_failed", "no_binding")
        # No failure is kept. (The answer above may have been asked for before the load was done.)
        pinned = fetch(proxy.url + CHAT, chat())
        assert (pinned.slot, pinned.reason) == (0, "pinned")
        assert len(server.slots) == 32


def test_nothing_listens_there(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as closed:
        upstream = f"http://{HOST}:{closed.getsockname()[1]}"
    with slotpin(tmp_path, upstream) as proxy:
        for path, body in ((CHAT, chat()), ("/health", None), ("/main/v1/models", None)):
            began = time.monotonic()
            answer = fetch(proxy.url + path, body)
            assert time.monotonic() - began < 1.5  # at once: neither the probe's 2 s nor the 10 s of a connect
            assert answer.status == 502
            assert answer.error["type"] == "slotpin_error"
            assert answer.error["code"] == "upstream_unreachable"
            assert answer.error["message"] == f"slotpin: llama-server is not running at {upstream}"
        assert proxy.bindings == (0, 0)
        refused = fetch(f"{proxy.url}/compactor{CHAT}", chat())
        assert (refused.status, refused.error["code"]) == (503, "probe_failed")
        assert "nothing listens there" in refused.error["message"]


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    """A full backlog drops every SYN, as a machine that is switched off does."""
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        upstream = f"http://{HOST}:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            with slotpin(tmp_path, upstream, connect_seconds=0.5) as proxy:
                answer = fetch(f"{proxy.url}/health")
                assert answer.status == 502
                assert upstream in answer.error["message"]
        finally:
            for each in waiting:
                each.close()
