"""`slotpin up` with the real llama-server and a tiny model."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.llama import patched_binary
from tests.support.processes import is_alive, wait_until
from tests.support.program import Program, assert_lines, children, command_line, run
from tests.support.tiny_model import full_attention

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


def up(home: Path, *more: str) -> Program:
    files = ("--binary", str(patched_binary()), "--model", str(full_attention()))
    return Program(home, "up", *files, "--port", "0", "--server-port", str(unused_port()), *more)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def fetch(url: str, path: str, body: object = None) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())
    finally:
        connection.close()


def llama_server(program: Program) -> int:
    (pid,) = servers(program)
    return pid


def servers(program: Program) -> list[int]:
    """Its child that serves; `llama-server --help`, which it asks before, has no port."""
    return [pid for pid in children(program.process.pid) if "--port" in command_line(pid)]


def without_log(stderr: str) -> str:
    """What is there for people: no event, and not the line that a model is being loaded."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith(("{", "starting ")))


def test_ready_with_four_slots_and_ended_by_ctrl_c(tmp_path: Path) -> None:
    with up(tmp_path) as program:
        url = program.url
        found = dict(line.strip().split(maxsplit=1) for line in program.out.splitlines()[1:])
        assert found["slots"] == "4, sharing 32768 tokens"
        assert found["llamaCppSlots"] == "enabled: auto"
        assert found["model"] == full_attention().stem
        assert found["any"].endswith(f"{url}/v1")
        typed, _, rest = found["Pi"].partition(" pi setup ")
        assert typed in ("slotpin", f"{shlex.quote(sys.executable)} -m slotpin")  # as it is on PATH, or not
        assert rest == f"--port {urlsplit(url).port}, then: pi --model slotpin/{found['model']}"
        assert program.err == f"starting llama-server with {full_attention().name}\n"

        status, headers, answer = fetch(url, "/v1/chat/completions", CHAT)
        assert (status, headers["X-Slotpin-Slot"], headers["X-Slotpin-Role"]) == (200, "0", "main")
        assert answer["usage"]["completion_tokens"] == 4
        status, headers, _ = fetch(url, "/compactor/v1/chat/completions", CHAT)
        assert (status, headers["X-Slotpin-Slot"], headers["X-Slotpin-Role"]) == (200, "1", "compactor")
        server_log = Path(found["llama-server"] if "log" not in found["llama-server"] else program.out.split()[-1])
        log = server_log.read_text()
        assert "selected slot by id (0)" in log
        assert "selected slot by id (1)" in log

        server = llama_server(program)
        program.signal(signal.SIGINT)
        assert program.wait() == 0
        assert not is_alive(server)
        assert without_log(program.err) == ""


def test_no_llama_server_is_left_after_kill_9(tmp_path: Path) -> None:
    with up(tmp_path) as program:
        assert program.url
        server = llama_server(program)
        program.signal(signal.SIGKILL)
        program.wait()
        wait_until(lambda: not is_alive(server), "llama-server is gone", 10)


def test_sigterm_while_the_model_loads(tmp_path: Path) -> None:
    with up(tmp_path) as program:
        wait_until(lambda: bool(servers(program)), "llama-server is started", 20)
        server = llama_server(program)
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert not is_alive(server)
        assert without_log(program.err) == ""


def test_arguments_after_the_dashes_win(tmp_path: Path) -> None:
    with up(tmp_path, "--", "--parallel", "3", "--ctx-size", "4096") as program:
        status, _, slots = fetch(program.url, "/slots")
        assert status == 200
        assert [slot["id"] for slot in slots] == [0, 1, 2]
        assert "  slots             3, sharing 4096 tokens\n" in program.out


def test_a_port_after_the_dashes_is_not_lost(tmp_path: Path) -> None:
    """llama-server listens there; slotpin has to follow it or to say at once that it can't."""
    port = unused_port()
    with up(tmp_path, "--", "--port", str(port)) as program:
        wait_until(lambda: program.process.poll() is not None or "enabled:" in program.out, "ready, or an error", 20)
        if program.process.poll() is None:
            assert fetch(program.url, "/v1/chat/completions", CHAT)[0] == 200
        else:
            assert program.process.returncode == 2
            assert_lines(without_log(program.err), "")
            assert "--server-port" in program.err


def test_llama_server_killed_from_outside(tmp_path: Path) -> None:
    with up(tmp_path) as program:
        assert program.url
        os.kill(llama_server(program), signal.SIGKILL)
        assert program.wait() == 1
        assert_lines(without_log(program.err), "llama-server ended")


def test_a_model_that_can_not_be_loaded(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(full_attention().read_bytes()[:100_000])
    done = run(tmp_path, "up", "--binary", str(patched_binary()), "--model", str(model), "--port", "0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert_lines(without_log(done.stderr), "llama-server ended before it was ready: ")


def test_an_argument_that_llama_server_does_not_know(tmp_path: Path) -> None:
    files = ("--binary", str(patched_binary()), "--model", str(full_attention()))
    done = run(tmp_path, "up", *files, "--port", "0", "--", "--no-such-flag")
    assert done.returncode == 1
    assert_lines(without_log(done.stderr), "llama-server ended before it was ready: ")
    assert "--no-such-flag" in done.stderr


def test_the_server_s_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        files = ("--binary", str(patched_binary()), "--model", str(full_attention()))
        done = run(tmp_path, "up", *files, "--port", "0", "--server-port", str(port))
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert_lines(without_log(done.stderr), f"llama-server cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal's signals")
def test_ctrl_c_reaches_slotpin_alone(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group: the server must not be in it, or it would end first."""
    with up(tmp_path) as program:
        assert program.url
        assert os.getpgid(llama_server(program)) != os.getpgid(program.process.pid)
