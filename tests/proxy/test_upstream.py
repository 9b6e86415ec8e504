"""A server that can't be reached, is loading, closes kept connections, or answers too early."""

from __future__ import annotations

import asyncio
import time

import pytest

from slotpin.proxy import upstream
from tests.support.proxy import Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    SSE_HEAD,
    Connection,
    Request,
    answer,
    chunk,
    ok,
    stub_upstream,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("target", [CHAT, "/v1/models"])
@pytest.mark.parametrize("enabled", [False, "auto", True])
@on_loop
async def test_nothing_listens(enabled: bool | str, target: str) -> None:
    async with stub_upstream() as stub:
        pass
    async with running_proxy(settings_for(stub, enabled)) as running:
        client = await running.client()
        for _ in range(2):  # and the connection goes on
            began = time.monotonic()
            await client.send(request("POST", target, b"{}"))
            response = await client.read_response()
            assert time.monotonic() - began < 1
            assert response.status == 502
            assert response.get(b"content-type") == b"application/json"
            assert set(response.error) >= {"message", "type", "code"}
            assert response.error["message"].startswith("slotpin: ")
            assert stub.url in response.error["message"]
        await client.close()
        assert await running.bindings() == (0, 0)
        # Back again, the server is used again.
        async with stub_upstream(port=stub.port):
            assert (await running.fetch(target)).status == 200


@on_loop
async def test_a_server_that_is_loading_speaks_for_itself() -> None:
    loading = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    loading = answer(loading, b"503 Service Unavailable", [b"Content-Type: application/json; charset=utf-8"])

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(loading)

    async with stub_upstream(script, slots=loading) as stub, running_proxy(settings_for(stub)) as running:
        for target in (CHAT, "/health", "/v1/models"):
            response = await running.fetch(target)
            assert (response.status, response.phrase) == (503, b"Service Unavailable")
            assert loading.endswith(response.body)
            assert response.get(b"Retry-After") is None
        chat = await running.fetch()
        assert chat.get(b"X-Slotpin-Reason") == b"probe_failed"
        assert b"loading" in (chat.get(b"X-Slotpin-Warning") or b"")
        assert b"id_slot" not in stub.requests[-1].body


# Kept connections


@on_loop
async def test_connections_are_used_again() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for number in range(50):
            assert (await running.fetch("/x" if number % 2 else CHAT)).status == 200
        assert stub.generating_accepts == 1


@on_loop
async def test_a_connection_is_left_before_the_server_closes_it() -> None:
    """cpp-httplib closes after 100 requests; from a client's side that looks like a broken answer."""

    async def raw(connection: Connection) -> None:
        for _ in range(100):
            if not (head := await connection.read_head()):
                return
            await connection.read_body(head)
            await connection.send(answer())

    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub, True)) as running:
        client = await running.client()
        for _ in range(250):
            await client.send(request("POST", CHAT, b"{}"))
            assert (await client.read_response()).status == 200
        assert stub.accepts < 10
        await client.close()


@on_loop
async def test_an_idle_connection_is_left_before_the_server_closes_it() -> None:
    """cpp-httplib closes after five seconds."""
    assert upstream.IDLE_SECONDS < 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream, "IDLE_SECONDS", 0.6)
        async with stub_upstream() as stub, running_proxy(settings_for(stub, True)) as running:
            for accepts in (1, 2):
                for _ in range(3):
                    assert (await running.fetch()).status == 200
                assert (stub.open, stub.accepts) == (1, accepts)
                await until(lambda: stub.open == 0, "the kept connection is closed")


async def one_request_each(connection: Connection) -> None:
    """Answers as if the connection were kept, and closes it."""
    head = await connection.read_head()
    await connection.read_body(head)
    await connection.send(answer())


def requests_of(running: Running) -> list[bytes]:
    return [
        request("GET", "/x"),
        request("POST", "/tokenize", b"{}"),
        request("POST", CHAT, b"{}"),
        request("DELETE", "/x"),
        request("POST", "/empty", b""),
    ]


@on_loop
async def test_a_connection_that_was_closed_while_idle() -> None:
    async with stub_upstream(raw=one_request_each) as stub, running_proxy(settings_for(stub, True)) as running:
        for whole in requests_of(running) * 4:
            client = await running.client()
            await client.send(whole)
            assert (await client.read_response()).status == 200
            await client.close()
            await asyncio.sleep(0.01)


class ClosesOnTheSecond:
    """Answers a connection's first request and closes at the first byte of its second, without reading on."""

    def __init__(self, by_reset: bool) -> None:
        self.by_reset = by_reset
        self.closed = 0

    async def __call__(self, connection: Connection) -> None:
        head = await connection.read_head()
        await connection.read_body(head)
        await connection.send(answer())
        if await connection.reader.read(1):
            self.closed += 1
            if self.by_reset:
                connection.reset()
            else:
                connection.close()


@pytest.mark.parametrize("by_reset", [True, False], ids=["RST", "FIN"])
@pytest.mark.parametrize("kind", range(5))
@on_loop
async def test_a_connection_that_closes_just_when_a_request_arrives(kind: int, by_reset: bool) -> None:
    raw = ClosesOnTheSecond(by_reset)
    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub, True)) as running:
        whole = requests_of(running)[kind]
        client = await running.client()
        for _ in range(6):
            await client.send(whole)
            assert (await client.read_response()).status == 200
        assert raw.closed >= 3
        await client.close()


@pytest.mark.parametrize("by_reset", [True, False], ids=["RST", "FIN"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("target", ["/tokenize", CHAT])
@on_loop
async def test_the_same_for_a_body_that_still_arrives(target: str, enabled: bool, by_reset: bool) -> None:
    """Part of it is gone with the connection that was closed; a new one would have been right from the start."""
    raw = ClosesOnTheSecond(by_reset)
    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub, enabled)) as running:
        client = await running.client()
        for _ in range(6):
            whole = request("POST", target, b'{"a":1}')
            await client.send(whole[:-3])
            await asyncio.sleep(0.02)
            client.send_nowait(whole[-3:])
            assert (await client.read_response()).status == 200
        await client.close()


@on_loop
async def test_what_the_server_had_for_a_while_is_not_sent_again() -> None:
    """It may have been running; a second run would cost the cache and the user's time."""

    async def script(connection: Connection, got: Request) -> None:
        if b'"slow"' in got.body:
            await asyncio.sleep(1.2)
            connection.close()
        else:
            await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        assert (await client.read_response()).status == 200
        await client.send(request("POST", CHAT, b'{"slow":1}'))
        assert (await client.read_response()).status == 502
        assert sum(b'"slow"' in got.body for got in stub.requests) == 1
        assert {got.connection for got in stub.requests} == {stub.requests[0].connection}
        await client.close()


@on_loop
async def test_what_was_answered_in_part_is_not_sent_again() -> None:
    async def script(connection: Connection, got: Request) -> None:
        if b'"break"' in got.body:
            await connection.send(b"HTTP/1.1 ")
            connection.close()
        else:
            await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()
        assert (await running.fetch(body=b'{"break":1}')).status == 502
        assert sum(b'"break"' in got.body for got in stub.requests) == 1


@on_loop
async def test_a_new_connection_that_breaks_is_not_tried_again() -> None:
    async def raw(connection: Connection) -> None:
        head = await connection.read_head()
        await connection.read_body(head)

    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub, True)) as running:
        response = await running.fetch()
        assert response.status == 502
        assert stub.url in response.error["message"]
        assert stub.accepts == 1


@on_loop
async def test_bytes_that_nobody_asked_for_spoil_a_connection() -> None:
    """Such as the 408 of a server that is about to close."""

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(b"right"))
        await asyncio.sleep(0.01)
        await connection.send(answer(b"wrong", b"408 Request Timeout"))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(5):
            assert (await running.fetch("/x", None)).body == b"right"
            await asyncio.sleep(0.03)


@pytest.mark.parametrize(
    "extra", [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", b"garbage", b"\r\n", b"HTTP/1.1 200"]
)
@on_loop
async def test_more_than_one_answer_to_a_request(extra: bytes) -> None:
    """A response that is left over must never become the answer to the next request."""

    async def script(connection: Connection, got: Request) -> None:
        await connection.send(answer(got.target) + extra)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for number in range(5):
            await client.send(request("GET", f"/{number}"))
            assert (await client.read_response()).body == b"/%d" % number
        await client.close()


@pytest.mark.parametrize(
    "wrong",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\r\n\r\n\r\n",
    ],
)
@on_loop
async def test_an_answer_that_is_not_http(wrong: bytes) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(wrong)
        connection.close()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch()
        assert response.status == 502
        assert stub.url in response.error["message"]
        assert await running.bindings() == (0, 0)
        stub.script = ok
        assert (await running.fetch()).status == 200


# Answers that come early


@pytest.mark.parametrize("closes", ["FIN", "keeps"])
@pytest.mark.parametrize("target", ["/upload", CHAT])
@on_loop
async def test_an_early_413_arrives(target: str, closes: str) -> None:
    """The server has read a head only; whatever it does with the rest, its answer is the answer."""

    async def raw(connection: Connection) -> None:
        head = await connection.read_head()
        if int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split()[1]) < 1000:
            await connection.read_body(head)
            await connection.send(answer(b"small"))
            return
        header = [] if closes == "keeps" else [b"Connection: close"]
        await connection.send(answer(b"too large", b"413 Payload Too Large", header))
        if closes == "FIN":
            connection.finish_sending()
            await connection.gone()
        elif closes == "keeps":
            connection.stop_reading()
            await asyncio.sleep(3600)

    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub, True)) as running:
        for _ in range(5):
            client = await running.client()
            sending = asyncio.create_task(client.send(request("POST", target, bytes(20 * 2**20))))
            response = await asyncio.wait_for(client.read_response(), 5)
            assert (response.status, response.body) == (413, b"too large")
            client.leave()
            await asyncio.gather(sending, return_exceptions=True)
            # The connection with half a request on it is used for no other.
            assert (await asyncio.wait_for(running.fetch(target, b"{}"), 5)).body == b"small"
        assert stub.accepts >= 5


@on_loop
async def test_a_slow_server_is_waited_for() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await asyncio.sleep(2.5)
        await connection.send(SSE_HEAD, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    tight = {"connectSeconds": 0.2}
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, timeouts=tight)) as running:
        assert (await running.fetch()).status == 200


@on_loop
async def test_a_server_that_comes_back_with_fewer_slots() -> None:
    async def script(connection: Connection, got: Request) -> None:
        if b'"die"' in got.body:
            connection.reset()
        else:
            await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        assert (await running.fetch()).get(b"X-Slotpin-Reason") == b"pinned"
        assert (await running.fetch("/health", None)).status == 200
        stub.slots = answer(b'[{"id":0}]')
        await asyncio.sleep(0.01)
        assert (await running.fetch(body=b'{"die":1}')).status == 502
        # What is known of the slots is not trusted any longer, whatever its age.
        again = await running.fetch()
        assert (again.status, again.get(b"X-Slotpin-Reason")) == (200, b"too_few_slots")
        await until(lambda: len(stub.probes) == 2, "a second probe")
