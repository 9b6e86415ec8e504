"""The real llama-server on a unix socket, slotpin on another one."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slotpin.llama.launch import server_args
from tests.support.llama import stock_binary
from tests.support.processes import wait_until
from tests.support.program import Program, run
from tests.support.tiny_model import full_attention


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, target: str, body: object = None) -> tuple[http.client.HTTPResponse, Any]:
    connection = _Connection(path)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, target, data, {"Authorization": "Bearer sk-own"})
        response = connection.getresponse()
        return response, json.loads(response.read())
    finally:
        connection.close()


def _is_ready(path: Path) -> bool:
    try:
        return ask(path, "GET", "/health")[0].status == 200
    except OSError:
        return False


@contextmanager
def llama_on(path: Path) -> Iterator[None]:
    args = server_args(full_attention(), str(path), 1, parallel=2, extra=["--threads", "1"])
    with path.with_suffix(".log").open("wb") as log, subprocess.Popen([stock_binary(), *args], stderr=log) as process:
        try:
            wait_until(lambda: _is_ready(path), "llama-server is ready", 120)
            yield
        finally:
            process.kill()


def test_a_pinned_turn_over_sockets_only(tmp_path: Path) -> None:
    llama, own = tmp_path / "llama.sock", tmp_path / "slotpin.sock"
    listen = {"host": f"unix:{own}", "apiKeys": ["sk-own"]}
    config = {"listen": listen, "main": {"baseUrl": f"unix:{llama}"}, "llamaCppSlots": {"enabled": "auto"}}
    (tmp_path / "slotpin.json").write_text(json.dumps(config))
    with llama_on(llama), Program(tmp_path, "serve") as program:
        wait_until(lambda: "enabled:" in program.out or program.process.poll() is not None, "slotpin is ready")
        assert program.out.splitlines()[0].endswith(f" listens on unix:{own}"), program.out + program.err
        assert "slots             2, context of each" in program.out
        turn = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        response, answer = ask(own, "POST", "/v1/chat/completions", turn)
        assert response.status == 200, answer
        assert response.headers["X-Slotpin-Reason"] == "pinned"
        assert answer["timings"]["predicted_n"] >= 1
        examined = run(tmp_path, "doctor")
        assert f" runs on unix:{own}\n" in examined.stdout, examined.stdout + examined.stderr
        assert examined.returncode == 0
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert not own.exists()
