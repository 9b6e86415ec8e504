"""Streamed answers: each piece at once, and no faster than the client takes them."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from tests.support.proxy import Client, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import DONE, LAST_CHUNK, SSE_HEAD, Connection, Request, answer, chunk, stub_upstream

CHAT = "/v1/chat/completions"


class Steps:
    """A script that sends a piece each time the test says so."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def __call__(self, connection: Connection, _: Request) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(connection))

    async def _run(self, connection: Connection) -> None:
        while (piece := await self._pieces.get()) is not None:
            await connection.send(piece)

    def send(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)


@pytest.mark.parametrize("target", [CHAT, "/v1/stream/abc"])
@pytest.mark.parametrize(
    "head", [SSE_HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
)
@on_loop
async def test_the_head_comes_before_the_first_byte_of_the_body(head: bytes, target: str) -> None:
    steps = Steps()
    async with stub_upstream(steps) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", target, b"{}"))
        steps.send(head)
        got = await asyncio.wait_for(client.read_head(), 2)
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        client.leave()
        steps.end()


FRAMES = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b": comment\n\n",
    b":\n\n",
    b'data: {"x":"\xf0\x9f',  # a character cut in two
    b'\x98\x80"}\n',
    b"\n",
    b"event: response.created\r\nid: 7\r\nretry: 1\r\ndata: x\r\n\r\n",
    b"data",
    b": [DO",
    b"NE]\n",
    b"\n",
    b"data: the last one has no newline",
]


@pytest.mark.parametrize("target", [CHAT, "/compactor/v1/responses", "/v1/stream/abc", "/completion"])
@on_loop
async def test_each_piece_is_forwarded_at_once(target: str) -> None:
    """The next piece is sent only after the one before has arrived, so nothing can be held back."""
    steps = Steps()
    async with stub_upstream(steps) as stub, running_proxy(settings_for(stub, True)) as running:
        client = await running.client()
        await client.send(request("POST", target, b"{}"))
        steps.send(SSE_HEAD)
        await client.read_head()
        for frame in FRAMES:
            steps.send(chunk(frame))
            assert await asyncio.wait_for(client.read_chunk(), 2) == frame
        steps.send(LAST_CHUNK)
        assert await asyncio.wait_for(client.read_chunk(), 2) == b""
        steps.end()
        await client.close()


@on_loop
async def test_half_a_chunk_is_forwarded_at_once() -> None:
    steps = Steps()
    async with stub_upstream(steps) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        steps.send(SSE_HEAD + b"10\r\n01234567")
        await client.read_head()
        assert await asyncio.wait_for(client.read_chunk(), 2) == b"01234567"
        steps.send(b"89abcdef\r\n" + LAST_CHUNK)
        assert await asyncio.wait_for(client.read_chunk(), 2) == b"89abcdef"
        assert await asyncio.wait_for(client.read_chunk(), 2) == b""
        steps.end()
        await client.close()


@on_loop
async def test_a_stream_cut_at_every_byte() -> None:
    body = b"".join(FRAMES) + DONE

    async def script(connection: Connection, _: Request) -> None:
        for byte in SSE_HEAD + b"".join(map(chunk, FRAMES)) + chunk(DONE) + LAST_CHUNK:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        assert (await running.fetch()).body == body
        assert await running.bindings() == (0, 1)


@on_loop
async def test_compressed_streams_are_left_alone() -> None:
    async def script(connection: Connection, _: Request) -> None:
        head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
        await connection.send(head, chunk(b"\x1f\x8b\x08\x00 not really"), LAST_CHUNK)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(headers=[b"Accept-Encoding: gzip"])
        assert response.get(b"content-encoding") == b"gzip"
        assert response.body == b"\x1f\x8b\x08\x00 not really"
        # The message end can't be seen, so the end of the body stands for it.
        assert await running.bindings() == (0, 1)


class Flood:
    """Sends `count` distinct blocks as fast as they are taken."""

    def __init__(self, framed: str, count: int = 640) -> None:
        self.framed = framed
        self.count = count
        self.sent = 0
        self.digest = hashlib.sha256()

    async def __call__(self, connection: Connection, _: Request) -> None:
        head = {
            "chunked": SSE_HEAD,
            "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (self.count * 65536),
            "close": b"HTTP/1.1 200 OK\r\n\r\n",
        }[self.framed]
        await connection.send(head)
        for number in range(self.count):
            block = (b"%08d" % number) * 8192
            self.digest.update(block)
            await connection.send(chunk(block) if self.framed == "chunked" else block)
            self.sent += 1
        if self.framed == "chunked":
            await connection.send(LAST_CHUNK)
        elif self.framed == "close":
            connection.close()

    async def stuck(self) -> int:
        """How many blocks were sent when it came to a halt."""
        while True:
            before = self.sent
            await asyncio.sleep(0.25)
            if self.sent == before:
                return self.sent


async def read_digest(client: Client) -> bytes:
    body = (await asyncio.wait_for(client.read_response(), 20)).body
    return hashlib.sha256(body).digest()


@pytest.mark.parametrize("framed", ["chunked", "length", "close"])
@pytest.mark.parametrize("target", [CHAT, "/v1/stream/abc"])
@on_loop
async def test_a_client_that_stops_reading_stops_the_server(target: str, framed: str) -> None:
    flood = Flood(framed)
    async with stub_upstream(flood) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.stop_reading()
        await client.send(request("POST", target, b"{}"))
        await until(lambda: flood.sent > 0, "the flood begins")
        # What the kernel's buffers take is out of our hands: some megabytes a connection. 40 MB are on offer.
        assert await flood.stuck() < flood.count * 0.6
        client.go_on_reading()
        assert await read_digest(client) == flood.digest.digest()
        await client.close()


@on_loop
async def test_back_pressure_holds_for_requests_sent_ahead() -> None:
    """Each answer is small enough to be read at once; together they are not."""
    body, count = bytes(200_000), 400

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(body))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.stop_reading()
        await client.send(request("GET", "/x") * count)
        served = -1
        while served < len(stub.requests):
            served = len(stub.requests)
            await asyncio.sleep(0.25)
        assert served < count / 2
        client.go_on_reading()
        for _ in range(count):
            assert (await client.read_response()).body == body
        await client.close()


@on_loop
async def test_back_pressure_holds_for_slotpins_own_answers() -> None:
    """A client that sends requests ahead and reads no answer could fill the memory with them."""
    count, session = 3000, [b"X-Slotpin-Session: s"]
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(CHAT, headers=session)
        conversations = running.proxy.state.conversations
        client = await running.client()
        client.stop_reading()
        client.send_nowait(request("GET", "/slotpin/") * count + request("POST", "/slotpin/forget", headers=session))
        await asyncio.sleep(0.5)
        assert len(conversations) == 1
        client.go_on_reading()
        for _ in range(count):
            assert (await client.read_response()).status == 200
        assert (await client.read_response()).body == b'{"forgotten":true}'
        assert len(conversations) == 0
        await client.close()


@on_loop
async def test_a_client_that_stops_reading_and_leaves() -> None:
    flood = Flood("chunked")
    async with stub_upstream(flood) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.stop_reading()
        await client.send(request("POST", CHAT, b"{}"))
        await until(lambda: flood.sent > 0, "the flood begins")
        await flood.stuck()
        client.leave()
        await until(lambda: stub.open == 0, "the upstream connection is closed")
        assert await running.bindings() == (0, 0)


@on_loop
async def test_a_slow_client_does_not_slow_another() -> None:
    flood = Flood("chunked")

    async def script(connection: Connection, request: Request) -> None:
        await (flood(connection, request) if request.target == b"/slow" else connection.send(answer(b"quick")))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        slow = await running.client()
        slow.stop_reading()
        await slow.send(request("GET", "/slow"))
        await until(lambda: flood.sent > 0, "the flood begins")
        for _ in range(20):
            assert (await asyncio.wait_for(running.fetch("/quick", None), 2)).body == b"quick"
        slow.leave()
