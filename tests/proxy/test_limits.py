"""How long is waited for whom: a client's head, a connection, a server that says nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slotpin.config import Settings
from slotpin.proxy import listener
from tests.support.proxy import is_of_the_proxy, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    Connection,
    Request,
    Stub,
    answer,
    chunk,
    stub_upstream,
)

CHAT = "/v1/chat/completions"


def test_nothing_is_limited_by_default() -> None:
    timeouts = Settings().timeouts
    assert (timeouts.idle_seconds, timeouts.connect_seconds) == (0, 10)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "])
@on_loop
async def test_a_client_that_does_not_finish_its_head(sent: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener, "HEAD_SECONDS", 0.6)
            client = await running.client()
            await running.fetch("/slotpin/health", None)
        for byte in sent:
            client.send_nowait(bytes([byte]))  # each is a sign of life, but not one that counts
            await asyncio.sleep(0.002)
        assert await asyncio.wait_for(client.read_all(), 2) in ((b"", False), (b"", True))
        assert stub.requests == []
        assert running.logged("exchange") == []


@on_loop
async def test_a_second_head_has_no_longer_than_the_first() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("GET", "/slotpin/health"))
        assert (await client.read_response("GET")).status == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener, "HEAD_SECONDS", 0.3)
            await client.send(b"GET /slotpin/health HTTP/1.1\r\nHost: ")
            assert await asyncio.wait_for(client.read_all(), 3) in ((b"", False), (b"", True))


@on_loop
async def test_an_idle_client_is_let_go() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener, "KEEP_ALIVE_SECONDS", 0.6)
            client = await running.client()
            await client.send(request("GET", "/x"))
            await client.read_response()
            assert await asyncio.wait_for(client.reader.read(), 2) == b""


@on_loop
async def test_a_slow_body_is_waited_for() -> None:
    """The head is the client's; its body may take any time."""
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener, "HEAD_SECONDS", 0.6)
            client = await running.client()
            await client.send(request("POST", CHAT, None, [b"Content-Length: 2"]))
            await asyncio.sleep(0.9)
            await client.send(b"{}")
            assert (await client.read_response()).status == 200


# A server that says nothing


@pytest.mark.parametrize("target", [CHAT, "/tokenize"])
@pytest.mark.parametrize("sent", [(), (b"HTTP/1.1 200",)])
@on_loop
async def test_silence_before_the_answer(sent: tuple[bytes, ...], target: str) -> None:
    async def script(connection: Connection, got: Request) -> None:
        if b'"quick"' in got.body:
            await connection.send(answer())
            return
        await connection.send(*sent)
        await connection.gone()

    timeouts = {"idleSeconds": 0.6}
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        await running.fetch(target, b'{"quick":1}')
        response = await asyncio.wait_for(running.fetch(target), 3)
        assert response.status == 502
        assert "nothing came for 0.6 s (timeouts.idleSeconds)" in response.error["message"]
        await until(lambda: stub.open == 0, "the upstream connection is closed")


@on_loop
async def test_silence_in_mid_answer() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD)
        for _turn in range(8):
            await asyncio.sleep(0.15)
            await connection.send(chunk(b"data: x\n\n"))  # each piece begins the time anew
        await connection.gone()

    timeouts = {"idleSeconds": 1}
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        data, _ = await asyncio.wait_for(client.read_all(), 5)
        assert data.count(b"data: x") == 8
        assert not data.endswith(LAST_CHUNK)
        await running.until_outcome("upstream_broke")


@on_loop
async def test_a_client_that_reads_slowly_is_not_the_servers_silence() -> None:
    body = bytes(40_000_000)

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(body))

    timeouts = {"idleSeconds": 0.6}
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        client = await running.client()
        client.stop_reading()
        await client.send(request("GET", "/x"))
        await asyncio.sleep(1.5)
        client.go_on_reading()
        assert len((await client.read_response()).body) == len(body)


@on_loop
async def test_a_client_that_sends_slowly_is_not_the_servers_silence() -> None:
    timeouts = {"idleSeconds": 0.6}
    async with stub_upstream() as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        client = await running.client()
        await client.send(request("POST", "/upload", None, [b"Content-Length: 2"]))
        await asyncio.sleep(1)
        await client.send(b"{}")
        assert (await client.read_response()).status == 200


@on_loop
async def test_a_kept_connection_is_not_silent() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(DONE), LAST_CHUNK)

    timeouts = {"idleSeconds": 0.6}
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, timeouts=timeouts)) as running:
        for _ in range(3):
            assert (await running.fetch()).status == 200
            await asyncio.sleep(0.8)
        assert stub.generating_accepts == 1


# A server that takes no connection


@contextmanager
def full_queue(stub: Stub) -> Iterator[None]:
    """At the stub's port, which is free again: Linux drops what asks for more, it is neither taken nor refused."""
    with socket.create_server(("127.0.0.1", stub.port), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        for full in waiting:
            full.setblocking(False)
            full.connect_ex(server.getsockname())
        yield
        for full in waiting:
            full.close()


@pytest.mark.parametrize("target", [CHAT, "/tokenize"])
@on_loop
async def test_a_connection_that_does_not_open(target: str) -> None:
    async with stub_upstream() as stub:
        pass
    timeouts = {"connectSeconds": 0.2}
    with full_queue(stub):
        async with running_proxy(settings_for(stub, False, timeouts=timeouts)) as running:
            response = await running.fetch(target)
            assert response.status == 502
            assert response.error["message"].endswith(f"{stub.url}: no answer within 0.2 s")


@pytest.mark.parametrize("target", [CHAT, "/tokenize"])
@pytest.mark.parametrize("enabled", [False, True])
@on_loop
async def test_a_client_that_leaves_while_a_connection_opens(enabled: bool, target: str) -> None:
    async with stub_upstream() as stub:
        pass
    with full_queue(stub):
        async with running_proxy(settings_for(stub, enabled)) as running:
            client = await running.client()
            await client.send(request("POST", target, b"{}"))
            await until(lambda: any(map(is_of_the_proxy, asyncio.all_tasks())), "the connection is asked for")
            await asyncio.sleep(0.05)
            client.leave()
            await until(lambda: not any(map(is_of_the_proxy, asyncio.all_tasks())), "no task is left", 0.5)
            assert await running.bindings() == (0, 0)
            assert (await running.status())["gates"] == []
