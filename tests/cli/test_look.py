"""`slotpin status`, `top` and `explain` against a slotpin that runs, and against none."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import termios
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slotpin import __version__
from tests.checks.servers import llama
from tests.real.client import fetch
from tests.real.prompts import chat
from tests.support.processes import wait_until
from tests.support.program import Program, assert_lines, command, environment, run

NOBODY = "http://127.0.0.1:9/v1"
LOOKS = [("status",), ("status", "--json"), ("top", "--count", "1"), ("explain",)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Program]:
    """In front of nothing; one request has been in vain."""
    with Program(tmp_path, "serve", "--port", "0", "--enabled", "auto", "--upstream", NOBODY) as program:
        fetch(f"{program.url}/v1/chat/completions", chat(), {"User-Agent": "pi/1.6.0"})
        yield program


def test_status(tmp_path: Path, running: Program) -> None:
    done = run(tmp_path, "status", "--url", running.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"slotpin {__version__} at {running.url}, up ")
    assert "\n1 request, " in done.stdout
    assert "\x1b" not in done.stdout
    shown = json.loads(run(tmp_path, "status", "--json", "--url", f"{running.url}/v1/").stdout)
    assert (shown["version"], shown["mode"], shown["totals"]["exchanges"]) == (__version__, "auto", 1)


def test_it_looks_where_the_configuration_says(tmp_path: Path, running: Program) -> None:
    port = running.url.rpartition(":")[2]
    (tmp_path / "slotpin.json").write_text(json.dumps({"listen": {"port": int(port)}}))
    assert run(tmp_path, "status").returncode == 0
    (tmp_path / "slotpin.json").write_text("{}")
    assert run(tmp_path, "status", "--port", port).returncode == 0


def test_top_without_a_terminal_prints_one_screen_after_the_other(tmp_path: Path, running: Program) -> None:
    done = run(tmp_path, "top", "--url", running.url, "--count", "2", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(f"slotpin {__version__} at ") == 2
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("no_color", ["", "1"])
def test_top_on_a_terminal_ends_with_q_and_leaves_it_as_it_was(tmp_path: Path, running: Program, no_color: str) -> None:
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (24, 80))
        before = termios.tcgetattr(theirs)
        variables = environment(tmp_path) | {"TERM": "xterm-256color", "NO_COLOR": no_color}
        words = command("top", "--url", running.url, "--interval", "60")
        with subprocess.Popen(words, cwd=tmp_path, env=variables, stdin=theirs, stdout=theirs, stderr=theirs) as top:
            shown = b""
            while b"latest" not in shown:
                shown += os.read(ours, 65536)
            assert f"slotpin {__version__}".encode() in shown
            assert (b"\x1b[1m" in shown) is not bool(no_color)
            assert termios.tcgetattr(theirs) != before
            os.write(ours, b"xq")
            assert top.wait(20) == 0
        assert termios.tcgetattr(theirs) == before
        rest = os.read(ours, 65536)
        assert b"\x1b[?1049l" in rest and b"\x1b[?25h" in rest  # the screen as it was, with its cursor
    finally:
        os.close(ours)
        os.close(theirs)


def test_explain(tmp_path: Path, running: Program) -> None:
    latest = run(tmp_path, "explain", "--url", running.url)
    assert (latest.returncode, latest.stderr) == (0, "")
    id_ = latest.stdout.split()[1].removesuffix(",")
    assert ", from pi" in latest.stdout
    assert "unreachable: llama-server could not be reached" in latest.stdout
    assert run(tmp_path, "explain", id_[:5], "--url", running.url).stdout == latest.stdout
    assert json.loads(run(tmp_path, "explain", id_, "--json", "--url", running.url).stdout)["id"] == id_


def test_an_id_that_is_not_known(tmp_path: Path, running: Program) -> None:
    done = run(tmp_path, "explain", "nothing/../x", "--url", running.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert_lines(done.stderr, "no request nothing/../x is known; kept are the last 1 that generate")


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_where_no_slotpin_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    done = run(tmp_path, *words, "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert_lines(done.stderr, f"no slotpin at {url}: nothing listens there; start it with slotpin serve")


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_where_something_else_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = run(tmp_path, *words, "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert_lines(done.stderr, f"no slotpin at {url}: what answers there is not slotpin")


def test_where_a_llama_server_runs(tmp_path: Path) -> None:
    with llama() as server:
        done = run(tmp_path, "status", "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert_lines(done.stderr, f"no slotpin at {server.url}: that is a llama-server, not slotpin; ")


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_where_a_slotpin_wants_a_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    keys = {"SLOTPIN_LISTEN_API_KEYS": '["k"]'}
    with Program(tmp_path, "serve", "--port", "0", "--upstream", NOBODY, **keys) as program:
        done = run(tmp_path, *words, "--url", program.url)
        assert (done.returncode, done.stdout) == (2, "")
        assert_lines(done.stderr, f"slotpin runs on {program.url} and wants a key: set SLOTPIN_LISTEN_API_KEYS=")
        right = run(tmp_path, *words, "--url", program.url, **keys)
        assert "wants a key" not in right.stderr


def test_mistakes(tmp_path: Path) -> None:
    done = run(tmp_path, "status", "--url", "127.0.0.1:8484")
    assert done.returncode == 2
    assert_lines(done.stderr, "--url 127.0.0.1:8484: write http://HOST:PORT")
    assert run(tmp_path, "top", "--interval", "0").returncode == 2


def test_the_log_is_set_by_flags(tmp_path: Path) -> None:
    flags = ("--port", "0", "--upstream", NOBODY, "--log-format", "console", "--log-level", "debug")
    with Program(tmp_path, "serve", *flags) as program:
        fetch(f"{program.url}/v1/chat/completions", chat())
        wait_until(lambda: program.err.count("\n") == 2, "both lines are logged")
        decision, exchange = program.err.splitlines()
        assert "decision" in decision and "reason=disabled" in decision
        assert "main       no slot   disabled  unreachable  " in exchange
    wrong = run(tmp_path, "serve", "--log-level", "loud")
    assert_lines(wrong.stderr, 'command line: $.log.level: "loud" is not allowed; use "debug"')
