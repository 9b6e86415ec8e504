"""Where messages begin and end, on both sides."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from tests.proxy.odd import FRAMES, ODD_BYTES, ODD_JSON, odd_answer, odd_stream, without_inserted
from tests.support.proxy import on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    LAST_CHUNK,
    Connection,
    Request,
    answer,
    chunk,
    stub_upstream,
)

# Framing


@on_loop
async def test_exactly_one_framing_of_a_request() -> None:
    """The stub asserts that there is at most one; here: which."""
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", "/tokenize", None, [b"Transfer-Encoding: chunked"]))
        await client.send(chunk(b"hello "))
        await asyncio.sleep(0.02)
        await client.send(chunk(b"world"), LAST_CHUNK)
        assert (await client.read_response()).status == 200
        # A chunked body for a generating route has a length once it was rewritten.
        await client.send(request("POST", "/v1/chat/completions", None, [b"Transfer-Encoding: chunked"]))
        for byte in ODD_JSON:
            client.send_nowait(chunk(bytes([byte])))
        await client.send(LAST_CHUNK)
        assert (await client.read_response()).status == 200
        await client.send(request("POST", "/v1/chat/completions", b""))
        assert (await client.read_response()).status == 200
        await client.send(request("POST", "/v1/chat/completions", None, [b"Transfer-Encoding: chunked"]), LAST_CHUNK)
        assert (await client.read_response()).status == 200
        await client.send(request("GET", "/health"))
        assert (await client.read_response()).status == 200
        await client.close()
        streamed, rewritten, empty, empty_chunked, get = stub.requests
    assert streamed.body == b"hello world"
    assert streamed.get_all(b"transfer-encoding") == [b"chunked"]
    assert without_inserted(rewritten.body, "main") == ODD_JSON
    assert rewritten.get_all(b"content-length") == [b"%d" % len(rewritten.body)]
    assert empty.get_all(b"content-length") == empty_chunked.get_all(b"content-length") == [b"0"]
    assert not get.get_all(b"content-length") + get.get_all(b"transfer-encoding")


@on_loop
async def test_trailers_are_no_headers() -> None:
    """RFC 9110 section 6.5.1: merged into the head, a trailer could change what was decided on it."""
    trailers = b"0\r\nX-Late: 1\r\nAuthorization: Bearer late\r\nX-Slotpin-Role: compactor\r\n\r\n"

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"ok"), trailers)

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for target in ("/tokenize", "/v1/chat/completions"):
            head = request("POST", target, None, [b"Transfer-Encoding: chunked", b"Authorization: Bearer early"])
            await client.send(head + chunk(b'{"a":1}') + trailers)
            response = await client.read_response()
            assert (response.status, response.body) == (200, b"ok")
            got = stub.requests[-1]
            assert got.get_all(b"x-late") == []
            assert got.get_all(b"authorization") == [b"Bearer early"]
            assert response.get(b"X-Slotpin-Role") in (None, b"main")
        await client.close()


@on_loop
async def test_head_relays_the_head_only() -> None:
    async def script(connection: Connection, request: Request) -> None:
        assert request.method == b"HEAD"
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nX-A: b\r\n\r\n")

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(3):
            await client.send(request("HEAD", "/v1/models"))
            response = await client.read_response("HEAD")
            assert response.status == 200
            assert response.get(b"content-length") == b"12345"
            assert response.get_all(b"transfer-encoding") == []
        await client.close()


@on_loop
async def test_an_answer_to_head_is_no_sign_of_a_restart() -> None:
    """Its connection is not kept, by slotpin's choice; a server that closes one may be another process soon."""
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(2):
            assert (await running.fetch()).status == 200
            assert (await running.fetch("/health", None, method="HEAD")).status == 200
            await until(lambda: stub.open == 0, "its connection is closed")
        assert len(stub.probes) == 1


@pytest.mark.parametrize("head", [b"204 No Content", b"304 Not Modified", b"304 Not Modified\r\nContent-Length: 999"])
@on_loop
async def test_answers_without_a_body(head: bytes) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(b"HTTP/1.1 " + head + b"\r\nX-A: b\r\n\r\n")

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(3):
            await client.send(request("OPTIONS", "/v1/models", headers=[b"Origin: http://x"]))
            response = await client.read_response()
            assert response.status == int(head[:3])
            assert response.get(b"X-A") == b"b"
            assert response.get_all(b"transfer-encoding") == []
        assert stub.accepts == 1
        await client.close()


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@on_loop
async def test_an_answer_that_ends_with_its_connection(version: bytes) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(version + b" 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"until ", b"close")
        connection.close()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(3):
            await client.send(request("GET", "/x"))
            response = await client.read_response()
            assert response.body == b"until close"
            assert response.get_all(b"transfer-encoding") == [b"chunked"]
        await client.close()
        assert await running.fetch() is not None
        assert (await running.bindings())[1] == 1  # the end of the body is the message end


@on_loop
async def test_an_http_1_0_client() -> None:
    """No chunks for it: the end of its connection is the end of a body of unknown length."""
    async with stub_upstream(odd_stream) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", b"{}", version=b"1.0"))
        data, reset = await client.read_all()
        head, _, body = data.partition(b"\r\n\r\n")
        assert body == b"".join(FRAMES)
        assert not reset
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        await client.close()

        stub.script = odd_answer
        client = await running.client()
        for _ in range(2):
            await client.send(request("GET", "/x", headers=[b"Connection: keep-alive"], version=b"1.0"))
            response = await client.read_response()
            assert response.body == ODD_BYTES
            assert response.get_all(b"connection") == [b"keep-alive"]
        await client.send(request("GET", "/x", version=b"1.0"))
        data, _ = await client.read_all()
        assert data.endswith(ODD_BYTES)
        await client.close()


@on_loop
async def test_connection_close_of_the_client_is_kept() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("GET", "/x", headers=[b"Connection: close"]))
        data, _ = await client.read_all()
        assert b"connection: close" in data.lower()
        await client.close()
        # Not the upstream's business, whose connection is kept.
        await running.fetch("/x", None)
        assert stub.accepts == 1


@on_loop
async def test_expect_100_continue() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for target in ("/v1/chat/completions", "/tokenize"):
            client = await running.client()
            whole = request("POST", target, ODD_JSON, [b"Expect: 100-continue"])
            head, body = whole[: -len(ODD_JSON)], whole[-len(ODD_JSON) :]
            await client.send(head)
            assert (await client.read_head()).startswith(b"HTTP/1.1 100 Continue\r\n")
            await client.send(body)
            assert (await client.read_response()).status == 200
            assert stub.requests[-1].get_all(b"expect") == []
            await client.close()
        # A client that did not wait for it, as many do.
        client = await running.client()
        await client.send(request("POST", "/tokenize", b"{}", [b"Expect: 100-continue"]))
        while (response := await client.read_response()).status == 100:
            pass
        assert response.status == 200
        await client.close()


@on_loop
async def test_an_interim_answer_is_not_taken_for_the_real_one() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await connection.send(answer(b"real"))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(2):
            await client.send(request("GET", "/x"))
            while (response := await client.read_response()).status < 200:
                pass
            assert (response.status, response.body, response.get_all(b"link")) == (200, b"real", [])
        assert stub.accepts == 1
        await client.close()


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
@pytest.mark.parametrize("split", [False, True])
@on_loop
async def test_an_upgrade_is_passed_over(upgrade: bytes, split: bool) -> None:
    """RFC 9110 section 7.8: a server may ignore it. Java's HttpClient sends h2c with its first request."""
    headers = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + upgrade, b"HTTP2-Settings: AAMAAABk"]
    async with stub_upstream(odd_answer) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for method, target, body in (
            ("POST", "/v1/chat/completions", ODD_JSON),
            ("POST", "/tokenize", ODD_JSON),
            ("GET", "/health", None),
            ("GET", "/health", None),
        ):
            whole = request(method, target, body, headers)
            cut = whole.index(b"\r\n\r\n") + 4
            await client.send(whole[:cut] if split else whole)
            if split:
                await asyncio.sleep(0.02)
                await client.send(whole[cut:])
            response = await asyncio.wait_for(client.read_response(), 2)
            assert (response.status, response.body) == (200, ODD_BYTES)
            got = stub.requests[-1]
            assert got.get_all(b"upgrade") == got.get_all(b"http2-settings") == []
            assert len(got.body) >= len(body or b"")
        await client.close()


# Several requests on a connection


@on_loop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(connection: Connection, request: Request) -> None:
        await asyncio.sleep(0.02 if request.target.endswith(b"0") else 0)
        await connection.send(answer(request.target + request.body))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(b"".join(request("POST", f"/x/{number}", b"%d" % number) for number in range(100)))
        for number in range(100):
            assert (await client.read_response()).body == b"/x/%d%d" % (number, number)
        await client.close()
        assert stub.accepts <= 2


@pytest.mark.parametrize("size", [1_000, 70_000, 100_000, 200_000, 300_000, 2_000_000])
@pytest.mark.parametrize("target", ["/tokenize", "/v1/chat/completions"])
@on_loop
async def test_a_large_request_sent_ahead(size: int, target: str) -> None:
    """Sent while the answer before it is still under way: held back, and then read to its end."""
    release = asyncio.Event()

    async def script(connection: Connection, request: Request) -> None:
        if request.target == b"/first":
            await release.wait()
        await connection.send(answer(hashlib.sha256(request.body).hexdigest().encode()))

    body = b'{"x":"' + b"y" * size + b'"}'
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, False)) as running:
        client = await running.client()
        await client.send(request("GET", "/first"))
        await until(lambda: len(stub.requests) == 1, "the first request is under way")
        client.send_nowait(request("POST", target, body))
        await asyncio.sleep(0.1)
        release.set()
        await client.read_response()
        response = await asyncio.wait_for(client.read_response(), 5)
        assert response.body == hashlib.sha256(body).hexdigest().encode()
        await client.send(request("GET", "/third"))
        assert (await asyncio.wait_for(client.read_response(), 5)).status == 200
        await client.close()


@on_loop
async def test_a_request_cut_at_every_byte() -> None:
    whole = request("POST", "/main/v1/chat/completions?a=b", b'{"messages":[]}', [b"X-A: b", b"X-Slotpin-Role: main"])
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for cut in range(1, len(whole)):
            client.send_nowait(whole[:cut])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client.send_nowait(whole[cut:])
            assert (await client.read_response()).status == 200
        assert len({(got.head, got.body) for got in stub.requests}) == 1
        await client.close()
