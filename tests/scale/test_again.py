"""What a balancer sends again: only what no node has seen. The nodes are stubs, which count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.real.client import fetch
from tests.scale.cluster import CHAT, Addressed, Balancer, haproxy, nginx

Start = Callable[[Path, list[Addressed]], AbstractContextManager[Balancer]]


@contextmanager
def one_haproxy(home: Path, cluster: list[Addressed]) -> Iterator[Balancer]:
    with haproxy(home, cluster) as (balancer,):
        yield balancer


BALANCERS = pytest.mark.parametrize("start", [one_haproxy, nginx], ids=["haproxy", "nginx"])


class Stub:
    """A node that is in service, takes a request to generate, and ends the connection or answers."""

    def __init__(self, *, breaks: bool) -> None:
        self.taken = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                stub.taken += 1
                if breaks:
                    self.close_connection = True
                else:
                    self._answer()

            def _answer(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Nothing listens there any more."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def stubs(*, breaks: bool) -> Iterator[list[Stub]]:
    with ExitStack() as stack:
        started = [Stub(breaks=breaks) for _ in range(3)]
        for stub in started:
            stack.callback(stub.close)
        yield started


def status(balancer: Balancer, session: str) -> int:
    """0 where the connection ended without an answer."""
    try:
        return fetch(balancer.url + CHAT, {"messages": []}, {"X-Slotpin-Session": session}).status
    except (HTTPException, OSError):
        return 0


@BALANCERS
def test_a_generation_that_may_have_begun_is_not_sent_again(tmp_path: Path, start: Start) -> None:
    with stubs(breaks=True) as nodes, start(tmp_path, [*nodes]) as balancer:
        for number in range(3):  # nginx takes out who fails more often
            assert status(balancer, f"s{number}") in (0, 502)
            assert sum(node.taken for node in nodes) == number + 1


@BALANCERS
def test_what_never_got_there_goes_to_another_node(tmp_path: Path, start: Start) -> None:
    with stubs(breaks=False) as nodes, start(tmp_path, [*nodes]) as balancer:
        sessions = [f"s{number}" for number in range(12)]
        assert {status(balancer, session) for session in sessions} == {200}
        assert nodes[0].taken
        before = nodes[0].taken
        nodes[0].close()
        assert {status(balancer, session) for session in sessions} == {200}
        assert nodes[0].taken == before
        assert sum(node.taken for node in nodes) == 2 * len(sessions)
