"""A TCP relay in front of a server that keeps what clients sent."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_HEAD = re.compile(rb"(?:GET|POST) (\S+) HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)


class Relay:
    def __init__(self, url: str) -> None:
        self.url = url
        self._sent: list[bytearray] = []

    def heads(self, path: str) -> list[Mapping[str, str]]:
        """The headers, names in lower case, of each request for `path` that has come so far."""
        found: list[Mapping[str, str]] = []
        for sent in list(self._sent):
            for match in _HEAD.finditer(bytes(sent)):
                if match[1].decode() == path:
                    lines = (line.partition(":") for line in match[2].decode("latin-1").split("\r\n"))
                    found.append({name.lower(): value.strip() for name, _, value in lines})
        return found

    def serve(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(target)
            sent = bytearray()
            self._sent.append(sent)
            for source, sink, kept in ((client, server, sent), (server, client, bytearray())):
                threading.Thread(target=_pump, args=(source, sink, kept), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            kept += data
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    source.close()


@contextmanager
def relay(url: str) -> Iterator[Relay]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Relay(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=running.serve, args=(listener, (parts.hostname, parts.port)))
        thread.start()
        try:
            yield running
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
