"""slotpin under a service manager: a real datagram socket takes what it says, and passed-on sockets are real ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slotpin.llama.launch import free_port
from tests.real.client import fetch
from tests.support.llama import HOST, patched_binary
from tests.support.program import DEADLINE, Program, command, environment
from tests.support.tiny_model import full_attention

BEAT_SECONDS = 0.2
# What a service manager does: the socket becomes descriptor 3, and LISTEN_PID is the process that slotpin will be.
PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": os.environ.get("LISTEN_FDS", "1"), "LISTEN_PID": str(os.getpid())}
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        receiver.settimeout(DEADLINE)
        yield receiver


def said(receiver: socket.socket) -> str:
    return receiver.recv(4096).decode()


def next_but_beats(receiver: socket.socket) -> str:
    while (state := said(receiver)) == "WATCHDOG=1":
        pass
    return state


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_it_says_when_it_is_ready_and_when_it_stops(tmp_path: Path, abstract: bool) -> None:
    name = f"slotpin-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with manager(f"\0{name}" if abstract else name) as receiver:
        address = f"@{name}" if abstract else name
        with Program(tmp_path, "serve", "--port", "0", NOTIFY_SOCKET=address) as program:
            assert said(receiver) == "READY=1"
            program.signal(signal.SIGTERM)
            assert said(receiver) == "STOPPING=1"
            assert program.wait() == 0


def test_up_is_ready_when_the_model_is_loaded(tmp_path: Path) -> None:
    files = ("--binary", str(patched_binary()), "--model", str(full_attention()))
    server_port = free_port(HOST, 0)
    ports = ("--port", "0", "--server-port", str(server_port))
    path = str(tmp_path / "notify")
    with manager(path) as receiver, Program(tmp_path, "up", *files, *ports, NOTIFY_SOCKET=path) as program:
        assert said(receiver) == "READY=1"
        assert fetch(f"http://{HOST}:{server_port}/health").status == 200
        program.signal(signal.SIGTERM)
        assert said(receiver) == "STOPPING=1"
        assert program.wait() == 0


def test_nothing_is_ready_where_the_port_is_taken(tmp_path: Path) -> None:
    with manager(str(tmp_path / "notify")) as receiver, socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Program(tmp_path, "serve", "--port", port, NOTIFY_SOCKET=str(tmp_path / "notify")) as program:
            assert program.wait() == 2
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            said(receiver)


def test_the_watchdog_is_kept_as_long_as_it_works(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    beats = str(int(BEAT_SECONDS * 2e6))
    with (
        manager(path) as receiver,
        Program(tmp_path, "serve", "--port", "0", NOTIFY_SOCKET=path, WATCHDOG_USEC=beats) as program,
    ):
        assert next_but_beats(receiver) == "READY=1"
        assert [said(receiver) for _ in range(3)] == ["WATCHDOG=1"] * 3
        program.signal(signal.SIGSTOP)  # stands for a loop that hangs
        receiver.settimeout(10 * BEAT_SECONDS)
        with pytest.raises(TimeoutError):
            while True:
                said(receiver)


def test_another_process_watchdog_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    variables = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())}
    with manager(path) as receiver, Program(tmp_path, "serve", "--port", "0", **variables) as program:
        assert said(receiver) == "READY=1"
        assert program.url
        program.signal(signal.SIGTERM)
        assert said(receiver) == "STOPPING=1"


def test_a_manager_that_is_gone_is_no_matter(tmp_path: Path) -> None:
    variables = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "100000"}
    with Program(tmp_path, "serve", "--port", "0", **variables) as program:
        assert fetch(f"{program.url}/slotpin/health").status == 200


@contextmanager
def activated(home: Path, passed: socket.socket, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PASS_ON, str(passed.fileno()), *command("serve", "--port", "1")],
        cwd=home,
        env=environment(home) | variables,
        pass_fds=(passed.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> str:
    """Its first line."""
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["stopped"]
    return out.splitlines()[0]


def test_a_passed_on_socket_outlives_slotpin(tmp_path: Path) -> None:
    """Who connects while slotpin restarts waits, and is refused nothing."""
    with socket.create_server(("127.0.0.1", 0)) as passed:
        port = passed.getsockname()[1]
        health = f"http://127.0.0.1:{port}/slotpin/health"
        with activated(tmp_path, passed) as process:
            assert fetch(health).status == 200
            assert end(process).endswith(f"listens on http://127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as waiting:
            waiting.sendall(b"GET /slotpin/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            with activated(tmp_path, passed) as process:
                assert waiting.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
                end(process)


def test_a_passed_on_unix_socket_is_left_in_place(tmp_path: Path) -> None:
    path = tmp_path / "slotpin.sock"
    with socket.socket(socket.AF_UNIX) as passed:
        passed.bind(str(path))
        passed.listen()
        with activated(tmp_path, passed) as process:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(DEADLINE)
                client.connect(str(path))
                client.sendall(b"GET /slotpin/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
            assert end(process).endswith(f"listens on unix:{path}")
    assert path.exists()


def test_who_may_ask_goes_by_the_socket_and_not_by_the_settings(tmp_path: Path) -> None:
    """A loopback socket, under settings that would be of another machine's: a web page's name is still refused."""
    (tmp_path / "slotpin.json").write_text('{"listen": {"host": "0.0.0.0"}}')
    with socket.create_server(("127.0.0.1", 0)) as passed, activated(tmp_path, passed) as process:
        url = f"http://127.0.0.1:{passed.getsockname()[1]}/slotpin/status"
        assert fetch(url).status == 200
        assert fetch(url, headers={"Host": "page.example"}).status == 403
        assert process.poll() is None


@pytest.mark.parametrize(
    ("kind", "variables", "complaint"),
    [
        (socket.SOCK_STREAM, {"LISTEN_FDS": "2"}, "LISTEN_FDS is 2, and slotpin listens on one socket"),
        (socket.SOCK_DGRAM, {}, "the socket that was passed on does not listen"),
        (socket.SOCK_STREAM, {}, "the socket that was passed on does not listen"),
    ],
    ids=["two", "datagrams", "a connection"],
)
def test_sockets_that_are_no_good(
    tmp_path: Path, kind: socket.SocketKind, variables: dict[str, str], complaint: str
) -> None:
    with socket.socket(socket.AF_INET, kind) as passed, activated(tmp_path, passed, **variables) as process:
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 2
        assert err.startswith(f"slotpin: {complaint}")
        assert len(err.splitlines()) == 1


def test_a_socket_for_another_process_is_not_taken(tmp_path: Path) -> None:
    """As llama-server's wrapper or a shell would leave it in the environment."""
    with Program(tmp_path, "serve", "--port", "0", LISTEN_FDS="1", LISTEN_PID=str(os.getpid())) as program:
        assert fetch(f"{program.url}/slotpin/health").status == 200


def test_it_can_be_stopped_while_the_watchdog_waits(tmp_path: Path) -> None:
    with Program(tmp_path, "serve", "--port", "0", WATCHDOG_USEC="3600000000") as program:
        assert program.url
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
