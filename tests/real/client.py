"""Requests as a client sends them, and the answers as bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of an event stream; what is no JSON as text."""
        lines = [line[5:].strip() for line in self.body.decode().splitlines() if line.startswith("data:")]
        return [json.loads(line) if line.startswith("{") else line for line in lines]

    @property
    def role(self) -> str | None:
        return self.headers.get("x-slotpin-role")

    @property
    def slot(self) -> int | None:
        slot = self.headers.get("x-slotpin-slot")
        return None if slot is None else int(slot)

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-slotpin-reason")

    @property
    def warning(self) -> str:
        return self.headers.get("x-slotpin-warning", "")

    @property
    def request(self) -> str:
        """slotpin's id of the request, in its log."""
        return self.headers["x-slotpin-request"]


def fetch(url: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
    """One request on a connection of its own: POST with a body (bytes, or something for JSON), else GET."""
    parts = urlsplit(url)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(parts.netloc, timeout=SECONDS)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request("GET" if data is None else "POST", target, data, dict(headers or {}))
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, names, answer.read())
    finally:
        connection.close()


class OpenRequest:
    """A request whose answer is read as far as the test wants, and that the client can leave at any time."""

    def __init__(self, url: str, body: object, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=SECONDS)
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        self.received = b""

    def read_until(self, mark: bytes) -> bytes:
        """All that has come when `mark` has."""
        while mark not in self.received:
            piece = self._socket.recv(65536)
            assert piece, f"the answer ended without {mark!r}: {self.received!r}"
            self.received += piece
        return self.received

    def read_to_end(self) -> bytes:
        """All that has come when the server closes or breaks off the connection."""
        with contextlib.suppress(ConnectionError):
            while piece := self._socket.recv(65536):
                self.received += piece
        self._socket.close()
        return self.received

    def header(self, name: str) -> str:
        head = self.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0].decode()
        return next(line.split(": ")[1] for line in head.split("\r\n")[1:] if line.lower().startswith(f"{name}: "))

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Leave as a process that is killed does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
