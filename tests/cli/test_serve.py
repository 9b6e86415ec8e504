from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slotpin import __version__
from tests.support.certificates import certificate_authority, server_tls
from tests.support.processes import wait_until
from tests.support.program import Program, assert_lines, run

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


@contextmanager
def silent_server() -> Iterator[tuple[socket.socket, str]]:
    """A server that takes connections and says nothing by itself; its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def nobody() -> str:
    """A base URL where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def listens(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 80), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_says_where_it_listens_and_that_nothing_is_behind_it(tmp_path: Path) -> None:
    upstream = nobody()
    with Program(tmp_path, "serve", "--port", "0", "--enabled", "auto", "--upstream", upstream) as program:
        assert listens(program.url)
        lines = program.out.splitlines()
        assert lines[0] == f"slotpin {__version__} listens on {program.url}"
        found = dict(line.strip().split(maxsplit=1) for line in lines[1:])
        assert found["llama-server"] == upstream.removesuffix("/v1")
        nothing = f"nothing listens at {upstream.removesuffix('/v1')}"
        assert found["slots"] == f"unknown: {nothing}: start llama-server, or mend --upstream (main.baseUrl)"
        assert found["model"] == "unknown"
        assert found["llamaCppSlots"] == "enabled: auto"
        assert "Pi" not in found
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert logged(program) == ["stopped"]


@SIGNALS
def test_a_signal_ends_it_well(tmp_path: Path, number: signal.Signals) -> None:
    with Program(tmp_path, "serve", "--port", "0", "--upstream", nobody()) as program:
        url = program.url
        program.signal(number)
        assert program.wait() == 0
        assert not listens(url)
        assert logged(program) == ["stopped"]


def test_an_answer_under_way_is_finished_after_the_signal(tmp_path: Path) -> None:
    with silent_server() as (server, upstream), Program(tmp_path, "serve", *arguments(upstream)) as program:
        client, behind = held_request(program.url, server)
        with client, behind:
            url = program.url
            program.signal(signal.SIGTERM)
            wait_until(lambda: not listens(url), "no new request is taken")
            assert program.process.poll() is None
            (event,) = program.events("waiting_for_answers")
            assert (event["answers"], event["seconds"]) == (1, 3600)
            behind.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            answer = b""
            while piece := client.recv(65536):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\nhello")
            assert program.wait() == 0
            assert "Traceback" not in program.err


@SIGNALS
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with silent_server() as (server, upstream), Program(tmp_path, "serve", *arguments(upstream)) as program:
        client, behind = held_request(program.url, server)
        with client, behind:
            url = program.url
            program.signal(number)
            wait_until(lambda: not listens(url), "no new request is taken")
            assert program.process.poll() is None
            program.signal(number)
            assert program.wait(20) == 130  # it would wait an hour for the answer
            assert "Traceback" not in program.err


def test_a_certificate_that_is_not_trusted_is_said_at_the_start(tmp_path: Path) -> None:
    certificate_authority(tmp_path)
    tls = server_tls(tmp_path, "IP:127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=shake_hands, args=(server, tls), daemon=True).start()
        upstream = f"https://127.0.0.1:{server.getsockname()[1]}/v1"
        with Program(tmp_path, "serve", "--port", "0", "--enabled", "auto", "--upstream", upstream) as program:
            assert listens(program.url)
            (line,) = [line for line in program.out.splitlines() if line.startswith("  slots ")]
            assert "its certificate is not trusted (" in line
            assert program.err == ""


def shake_hands(server: socket.socket, tls: ssl.SSLContext) -> None:
    """Until the server is closed."""
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client, suppress(OSError):
            tls.wrap_socket(client, server_side=True)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "slotpin.sock"
    with Program(tmp_path, "serve", "--host", f"unix:{path}", "--upstream", nobody()) as program:
        wait_until(lambda: "enabled:" in program.out, "slotpin is ready")
        assert program.out.startswith(f"slotpin {__version__} listens on unix:{path}\n")
        program.process.kill()
        program.wait()
    assert path.exists()  # which is no obstacle to the next one
    with Program(tmp_path, "serve", "--host", f"unix:{path}", "--upstream", nobody()) as program:
        wait_until(lambda: "enabled:" in program.out, "slotpin is ready")
        second = run(tmp_path, "serve", "--host", f"unix:{path}", "--upstream", nobody())
        assert second.returncode == 2
        assert_lines(second.stderr, f"cannot listen on unix:{path}: another program listens there; choose another path")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
    assert not path.exists()


def test_its_own_routes(tmp_path: Path) -> None:
    with Program(tmp_path, "serve", "--port", "0", "--upstream", nobody()) as program:
        connection = http.client.HTTPConnection(urlsplit(program.url).netloc, timeout=30)
        try:
            connection.request("GET", "/slotpin/health")
            assert connection.getresponse().read() == b'{"status": "ok"}'
        finally:
            connection.close()


def test_sighup_without_a_file_changes_nothing(tmp_path: Path) -> None:
    with Program(tmp_path, "serve", "--port", "0", "--upstream", nobody()) as program:
        url = program.url
        program.signal(signal.SIGHUP)
        assert listens(url)
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert logged(program) == ["stopped"]


def logged(program: Program) -> list[str]:
    """The events, and nothing else stands there."""
    return [json.loads(line)["event"] for line in program.err.splitlines()]


def arguments(upstream: str) -> tuple[str, ...]:
    return ("--port", "0", "--upstream", upstream, "--set", "timeouts.drainSeconds=3600")


def held_request(url: str, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A request that has arrived at `server` and waits for its answer: both ends. Looks of slotpin's own go by."""
    client = socket.create_connection(("127.0.0.1", urlsplit(url).port or 80), timeout=30)
    client.sendall(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while True:
        behind, _ = server.accept()
        behind.settimeout(30)
        head = b""
        while b"\r\n\r\n" not in head:
            piece = behind.recv(65536)
            if not piece:
                break
            head += piece
        if head.startswith(b"GET /held "):
            return client, behind
        behind.close()
