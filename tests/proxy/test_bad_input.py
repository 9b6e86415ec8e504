"""Bytes that are no request: refused or closed, without a traceback, and the next client is served."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.fuzz import clean, requests, throw_all, wrong
from tests.support.proxy import Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import LAST_CHUNK, Connection, Request, answer, chunk, stub_upstream

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"

# No reading of these is safe: another server on the way may have read them differently (RFC 9112 sections 5 to 7, 11).
REFUSED = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "a version of its own": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP/2 by surprise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case method": b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "NUL in the target": b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nHo\x00st: x\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: x\x00y\r\n\r\n",
    "a space in a name": b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    "an empty name": b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a bare CR in a value": b"GET / HTTP/1.1\r\nHost: localhost\ry: z\r\n\r\n",
    "two lengths that differ": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "two lengths in one": HEAD + b"Content-Length: 2, 3\r\n\r\n{} ",
    "a negative length": HEAD + b"Content-Length: -2\r\n\r\n{}",
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "an empty length": HEAD + b"Content-Length: \r\n\r\n{}",
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "length and chunked": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "chunked, not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked behind a tab": HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "no chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n",
    "a negative chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk size beyond 64 bits": HEAD + b"Transfer-Encoding: chunked\r\n\r\n11111111111111111\r\nx",
    "a chunk that is longer than it says": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "high bytes in the target": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bare LF": b"POST /x HTTP/1.1\nHost: localhost\nContent-Length: 2\n\n{}",
    "LF behind a value": HEAD + b"X-A: b\nContent-Length: 2\r\n\r\n{}",
    "LF for the empty line": HEAD + b"Content-Length: 2\r\n\n{}",
    "LF behind a chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "LF behind a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\n0\r\n\r\n",
    "LF in a chunk extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a\n\r\n{}\r\n0\r\n\r\n",
    "CR twice": HEAD + b"X-A: b\r\r\nContent-Length: 2\r\n\r\n{}",
    "a folded value": HEAD + b"X-A: b\r\n Content-Length: 7\r\nContent-Length: 2\r\n\r\n{}",
    "a value folded with a tab": HEAD + b"X-A: b\r\n\tc\r\nContent-Length: 2\r\n\r\n{}",
    "a space before the first name": b"POST /x HTTP/1.1\r\n X-A: b\r\nHost: localhost\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "two lengths that agree": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two encodings": HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two encodings in one": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "no host": b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "two hosts": HEAD + b"Host: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "a bracket that is not closed": b"GET http://[x/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


async def answered(running: Running, data: bytes) -> bytes:
    """What comes back until the connection closes; the sender closes its half after a while."""
    client = await running.client()
    client.send_nowait(data)
    received, _ = await asyncio.wait_for(client.read_all(), 3)
    await client.close()
    return received


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
@on_loop
async def test_what_can_not_be_read_is_refused(data: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, True)) as running:
        received = await answered(running, data)
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"400", head
        assert b"\r\nConnection: close" in head
        assert json.loads(body)["error"]["message"].startswith("slotpin: ")
        assert stub.requests == []
        assert (await running.fetch()).status == 200


@on_loop
async def test_connect_is_not_served() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        response = await client.read_response()
        assert response.status == 405
        assert response.error["message"].startswith("slotpin: ")
        client.leave()
        assert stub.accepts == 0


# What can only mean one thing; what goes to the server is clean.
TOLERATED = {
    "empty lines first": b"\r\n\r\nPOST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "no host in HTTP/1.0": b"POST /x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk with an extension": b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'2;a=b;c="d"\r\n{}\r\n0\r\n\r\n',
    "chunked in capitals": b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: CHUNKED\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    "high bytes": b"POST /x HTTP/1.1\r\nHost: localhost\r\nX-A: \x80\r\nContent-Length: 2\r\n\r\n{}",
    "an odd method": b"PROPFIND /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "an absolute target": b"POST http://other.test/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "spaces round a length": b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length:  2 \r\n\r\n{}",
}


@pytest.mark.parametrize("data", TOLERATED.values(), ids=TOLERATED)
@on_loop
async def test_what_can_be_read_is_forwarded_clean(data: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.send_nowait(data)
        assert (await asyncio.wait_for(client.read_head(), 3)).startswith(b"HTTP/1.1 200 ")
        (got,) = stub.requests
        assert got.body == b"{}"
        assert b"\n" not in got.head.replace(b"\r\n", b"")
        assert b"\r" not in got.head.replace(b"\r\n", b"")
        assert len(got.get_all(b"content-length") + got.get_all(b"transfer-encoding")) == 1
        assert len(got.get_all(b"host")) == 1
        client.leave()
        assert (await running.fetch()).status == 200


@pytest.mark.parametrize(
    "bad", ["garbage\r\n\r\n", "GET /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"]
)
@on_loop
async def test_a_bad_request_behind_a_good_one(bad: str) -> None:
    """The good ones are answered, the bad one is refused, and what comes after it is not read."""
    good = request("POST", "/tokenize", b"{}")
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for count in (1, 3):
            client = await running.client()
            client.send_nowait(good * count + bad.encode() + good)
            for _ in range(count):
                assert (await client.read_response()).status == 200
            assert (await client.read_response()).status == 400
            assert await asyncio.wait_for(client.read_all(), 3) == (b"", False)
            await client.close()
        assert len(stub.requests) == 4
        client = await running.client()
        await client.send(request("GET", "/x"))
        assert (await client.read_response()).status == 200
        await client.send(bad.encode())
        assert (await asyncio.wait_for(client.read_response(), 3)).status == 400
        await client.close()
        assert (await running.fetch()).status == 200


@on_loop
async def test_a_body_that_is_none_behind_a_good_request() -> None:
    broken = request("POST", "/v1/chat/completions", None, [b"Transfer-Encoding: chunked"]) + b"xyz\r\n"

    async def script(connection: Connection, _: Request) -> None:
        await asyncio.sleep(0.05)
        await connection.send(answer())

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.send_nowait(request("GET", "/x") + broken)
        assert (await client.read_response()).status == 200
        assert (await asyncio.wait_for(client.read_response(), 3)).status == 400
        assert await client.read_all() == (b"", False)
        assert len(stub.requests) == 1
        await client.close()


@on_loop
async def test_a_client_that_leaves_after_bytes_that_are_no_request() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.send_nowait(request("POST", "/v1/chat/completions", b"{}") + b"garbage\r\n\r\n")
        await until(lambda: bool(stub.requests), "the request is with the server")
        client.leave()
        await until(lambda: stub.open == 0, "the upstream connection is closed", 0.5)


@pytest.mark.parametrize("size", [1_400_000, 5_000_000])
@pytest.mark.parametrize("where", ["value", "target", "many", "name", "unfinished"])
@on_loop
async def test_a_head_that_is_too_large(where: str, size: int) -> None:
    """431, and the client gets to read it although it is still sending."""
    big = {
        "value": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * size + b"\r\n\r\n",
        "target": b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "many": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * (size // 8) + b"\r\n",
        "name": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a" * size + b": b\r\n\r\n",
        "unfinished": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * size,
    }[where]
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(5):
            client = await running.client()
            sending = asyncio.create_task(client.send(big))
            response = await asyncio.wait_for(client.read_response(), 3)
            assert response.status == 431
            assert response.error["message"].startswith("slotpin: ")
            client.leave()
            await asyncio.gather(sending, return_exceptions=True)
        assert stub.requests == []
        assert (await running.fetch()).status == 200


@on_loop
async def test_a_large_head_that_llama_server_would_take() -> None:
    """cpp-httplib's limits: 100 lines of 8,192 bytes."""
    headers = [b"X-%02d: " % number + b"v" * 8184 for number in range(97)]
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        assert (await running.fetch(headers=headers)).status == 200
        assert len(stub.requests[0].head) > 790_000


@on_loop
async def test_trailers_have_a_bound_too() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        client.send_nowait(request("POST", "/x", None, [b"Transfer-Encoding: chunked"]) + chunk(b"{}") + b"0\r\n")
        trailers = b"X-A: b\r\n" * 8192
        try:
            for _ in range(64):
                await client.send(trailers)
                await asyncio.sleep(0.002)
        except ConnectionError:
            return
        received, _ = await asyncio.wait_for(client.read_all(), 3)
        assert received == b"" or received.split(b" ")[1] in (b"400", b"431")


@on_loop
async def test_a_smuggled_request_is_not_forwarded() -> None:
    """The inner request must never arrive at the server as one of its own."""
    inner = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for outer in (
        HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(inner) + 5) + inner,
        HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
        HEAD + b"Content-Length: %d\r\n\r\n" % len(inner) + inner,
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
        HEAD + b"Connection: content-length\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(inner) + LAST_CHUNK,
        b"GET /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
        b"HEAD /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
    ):
        async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
            for cut in (len(outer), outer.index(b"\r\n\r\n") + 4):
                client = await running.client()
                client.send_nowait(outer[:cut])
                await asyncio.sleep(0.02)
                client.send_nowait(outer[cut:])
                await asyncio.sleep(0.03)
                client.leave()
                await asyncio.sleep(0.01)
                assert b"/smuggled" not in [got.target for got in stub.requests], outer


@pytest.mark.parametrize(
    "target", [b"/slotpin/\xff", b"/slotpin/%00", b"/slotpin/status?\xc3", b"/slotpin/" + b"a" * 20000]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PROPFIND", "HEAD", "OPTIONS"])
@on_loop
async def test_odd_requests_for_slotpins_own_routes(method: str, target: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request(method, target, b"{}" if method == "POST" else None, [b"Cookie: \xff=\x01"[:-1]]))
        response = await asyncio.wait_for(client.read_response(method), 3)
        assert response.status < 500
        client.leave()
        assert stub.requests == []


@on_loop
async def test_slotpins_own_routes() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        health = await running.fetch("/slotpin/health", None)
        assert json.loads(health.body) == {"status": "ok"}
        for method in ("GET", "POST", "DELETE"):
            unknown = await running.fetch("/slotpin/other", None, (), method)
            assert unknown.status == 404
            assert unknown.error["message"].startswith("slotpin: ")
        assert (await running.fetch("/slotpin", None)).status == 200  # the page
        # With a body of any framing, and with more behind it.
        client = await running.client()
        await client.send(
            request("POST", "/slotpin/x", None, [b"Transfer-Encoding: chunked"]), chunk(b"{}"), LAST_CHUNK
        )
        assert (await client.read_response()).status == 404
        assert stub.accepts == 0


@on_loop
async def test_odd_bytes_in_any_position() -> None:
    """A few of what `bench/fuzz.py` throws."""
    async with stub_upstream(clean) as stub, running_proxy(settings_for(stub)) as running:
        results = await throw_all(running, requests(3000, seed=20261130), patience=0.3)
        assert results.total() == 3000
        assert results["200"] > 100
        assert results["400"] > 500
        assert wrong(results) == {}
        assert (await running.fetch()).status == 200
