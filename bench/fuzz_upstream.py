"""A server for `bench.fuzz` that takes nothing but what is in order, and keeps what was not."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.load import BUILD

SLOTS = 32
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/1\.1")
_HEADER = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_CASE = re.compile(rb"case=(\d+)")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_TIMINGS = {"cache_n": 5, "prompt_n": 7, "predicted_n": 2}


class OutOfOrderError(Exception):
    pass


@dataclass(slots=True)
class Upstream:
    """`seen`: how many requests came for each case, as far as they name one. `faults`: what was not in order."""

    port: int = 0
    requests: int = 0
    seen: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Head:
    method: bytes
    target: bytes
    length: int | None
    chunked: bool


def _read_head(raw: bytes) -> _Head:
    line, *lines = raw.split(b"\r\n")
    first = _LINE.fullmatch(line)
    headers = [_HEADER.fullmatch(each) for each in lines]
    if first is None or None in headers:
        raise OutOfOrderError("a head that is not in order")
    named = [(header[1].lower(), header[2].strip(b" \t")) for header in headers if header is not None]
    lengths = [value for name, value in named if name == b"content-length"]
    encodings = [value for name, value in named if name == b"transfer-encoding"]
    hosts = [value for name, value in named if name == b"host"]
    if len(lengths) + len(encodings) > 1 or len(hosts) != 1:
        raise OutOfOrderError(f"lengths {lengths}, encodings {encodings}, hosts {hosts}")
    if not all(length.isdigit() for length in lengths) or encodings not in ([], [b"chunked"]):
        raise OutOfOrderError(f"lengths {lengths}, encodings {encodings}")
    return _Head(first[1], first[2], int(lengths[0]) if lengths else None, bool(encodings))


class _Connection(asyncio.Protocol):
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._data = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            self._take()
        except OutOfOrderError as fault:
            self._upstream.faults.append(f"{fault}: {bytes(self._data[:300])!r}")
            self._transport.abort()

    def _take(self) -> None:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = _read_head(bytes(self._data[:end]))
        body_at = end + 4
        over = _chunks_end(self._data, body_at) if head.chunked else body_at + (head.length or 0)
        if over is None or over > len(self._data):
            return
        if over < len(self._data):
            raise OutOfOrderError(f"bytes after the end of a request at {over}")
        body = bytes(self._data[body_at:over])
        self._data.clear()
        self._answer(head, body)

    def _answer(self, head: _Head, body: bytes) -> None:
        self._upstream.requests += 1
        if (case := _CASE.search(head.target)) is not None:
            self._upstream.seen[int(case[1])] += 1
        if head.target.startswith(b"/slots"):
            slots = [
                {"id": slot, "n_ctx": 4096, "is_processing": False, "id_task": self._upstream.requests}
                | {"n_prompt_tokens": 12}
                for slot in range(SLOTS)
            ]
            self._send(head, json.dumps(slots).encode())
        elif head.target.startswith(b"/props"):
            self._send(head, json.dumps({"build_info": BUILD}).encode())
        elif b'"stream": true' in body:
            frame = json.dumps({"choices": [{"delta": {"content": "é"}, "finish_reason": "stop"}], "timings": _TIMINGS})
            data = f"data: {frame}\n\ndata: [DONE]\n\n".encode()
            start = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            self._transport.write(start + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            answer = {"choices": [{"message": {"role": "assistant", "content": "é"}, "finish_reason": "stop"}]}
            self._send(head, json.dumps({**answer, "content": "é", "stop": True, "timings": _TIMINGS}).encode())

    def _send(self, head: _Head, body: bytes) -> None:
        start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(start if head.method == b"HEAD" else start + body)


def _chunks_end(data: bytearray, at: int) -> int | None:
    """Where a chunked body is over; None if it isn't yet."""
    while (end := data.find(b"\r\n", at)) >= 0:
        if _SIZE.fullmatch(data, at, end) is None:
            raise OutOfOrderError(f"a chunk of size {bytes(data[at:end])!r}")
        size = int(bytes(data[at:end]), 16)
        after = end + 2 + size
        if len(data) < after + 2:
            return None
        if data[after : after + 2] != b"\r\n":
            raise OutOfOrderError("a chunk that doesn't end where it should")
        if size == 0:
            return after + 2
        at = after + 2
    return None


@asynccontextmanager
async def running_upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(upstream), "127.0.0.1", 0, backlog=1024)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()
