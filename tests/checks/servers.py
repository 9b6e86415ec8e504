"""Servers for the checks to look at."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer, free_port
from tests.real.client import fetch
from tests.support.llama import HOST, stock_binary
from tests.support.tiny_model import full_attention

RECOMMENDED = ("--parallel", "2", "--kv-unified", "--no-cache-idle-slots", "--slots")
FOUR = ("--parallel", "4", *RECOMMENDED[2:])


@dataclass(frozen=True, slots=True)
class Running:
    """`url` without `/v1`."""

    url: str
    log_path: Path

    @property
    def upstream(self) -> tuple[str, ...]:
        """Flags of slotpin that lead there."""
        return "--upstream", f"{self.url}/v1"

    @property
    def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = fetch(f"{self.url}/slots").json
        return slots

    @property
    def held(self) -> list[int]:
        """How many tokens each slot holds."""
        return [slot.get("n_prompt_tokens", 0) for slot in self.slots]

    def use(self, slot: int, text: str) -> None:
        answer = fetch(f"{self.url}/completion", {"prompt": text, "n_predict": 1, "id_slot": slot})
        assert answer.status == 200, answer


@contextmanager
def llama(*flags: str, binary: Path | None = None, model: bool = True) -> Iterator[Running]:
    """A llama-server with no other flags than these and one for speed; a stock one without `binary`."""
    port = free_port(HOST, 0)
    args = ["--host", HOST, "--port", str(port), "--threads", "1", *flags]
    if model:
        args += ["--model", str(full_attention())]
        # A small pool: the tiny model's own context would take as long to set up as all the rest.
        args += [] if "--ctx-size" in flags else ["--ctx-size", "8192"]
    with asyncio.Runner() as runner:
        server = LlamaServer(binary or stock_binary(), args, HOST, port, server_log(port))
        try:
            runner.run(server.start())
            runner.run(server.wait_ready())
            yield Running(server.base_url, server.log_path)
        finally:
            runner.run(server.stop())


@contextmanager
def web_server(status: int, body: bytes) -> Iterator[str]:
    """An HTTP server that says the same to everything; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def other_protocol(greeting: bytes) -> Iterator[str]:
    """A server that greets and closes, as one that speaks no HTTP does; its URL."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(greeting)
                connection.recv(65536)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://{HOST}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def unused_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port
