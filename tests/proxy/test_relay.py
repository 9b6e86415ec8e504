"""What goes through unchanged, and how both sides are framed (design section 6, RFC 9110 and 9112)."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from tests.support.proxy import Client, Running, on_loop, request, running_proxy, settings_for, until
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

# A body whose bytes would not survive a parser: escapes, order, spaces, numbers, a doubled key.
ODD_JSON = (
    b' {"z":1e400,"a" : -0,"\\u0061":[1.0,1],"big":1234567890123456789012345678901234567890,\r\n'
    b'"t":"\\ud83d\\ude00 \xc3\xa9 \\/","t":null, "messages":[{"role":"user","content":"hi"}]}\n '
)
ODD_BYTES = bytes(range(256)) * 3
GENERATING = ["/chat/completions", "/completions", "/completion", "/infill", "/responses"]
INSERTED = {"main": b'"id_slot":0,"cache_prompt":true,', "compactor": b'"id_slot":1,"cache_prompt":true,'}
FRAMES = [
    b'data: {"x":"\xc3',
    b'\xa9"}\n\n',
    b": comment\n\n",
    b"event: x\r\ndata: y\r\n\r\n",
    # The message end of every shape, one of which will be meant.
    b'data: {"stop":true}\n\n',
    b"event: message_stop\ndata: {}\n\n",
    b"event: response.completed\ndata: {}\n\n",
    DONE,
    b"data: tail",
]


async def odd_answer(connection: Connection, _: Request) -> None:
    await connection.send(answer(ODD_BYTES, headers=[b"Content-Type: application/octet-stream"]))


async def odd_stream(connection: Connection, _: Request) -> None:
    await connection.send(SSE_HEAD, *map(chunk, FRAMES), LAST_CHUNK)


def without_inserted(body: bytes, role: str) -> bytes:
    brace = body.index(b"{") + 1
    inserted = INSERTED[role]
    assert body[brace:].startswith(inserted), body[:200]
    return body[:brace] + body[brace + len(inserted) :]


async def relayed(stub: Stub, target: bytes | str, method: str = "GET", sent: bytes | None = None) -> Request:
    """The request as the server got it, sent through a proxy in front of `stub`."""
    async with running_proxy(settings_for(stub)) as running:
        response = await running.fetch(
            target if isinstance(target, str) else target.decode("latin-1"), sent, (), method
        )
        assert response.status == 200
    return stub.requests[-1]


# Endpoints


@pytest.mark.parametrize("base_path", ["", "/llm"])
@pytest.mark.parametrize("v1", ["", "/v1"])
@pytest.mark.parametrize("path", GENERATING)
@on_loop
async def test_generating_endpoints(path: str, v1: str, base_path: str) -> None:
    """All bytes equal in both directions but for the members put in; whole answers and streams; with every prefix."""
    async with stub_upstream(odd_answer, base_path=base_path) as stub:
        async with running_proxy(settings_for(stub)) as running:
            for prefix, role in (("", "main"), ("/main", "main"), ("/compactor", "compactor")):
                for stream in (False, True):
                    stub.script = odd_stream if stream else odd_answer
                    response = await running.fetch(f"{prefix}{v1}{path}?q=%20&q=1", ODD_JSON)
                    assert response.status == 200
                    assert response.body == (b"".join(FRAMES) if stream else ODD_BYTES)
                    assert response.get(b"X-Slotpin-Role") == role.encode()
                    assert response.get(b"X-Slotpin-Slot") == (b"1" if role == "compactor" else b"0")
                    assert response.get(b"X-Slotpin-Reason") == b"pinned"
                    assert response.get(b"X-Slotpin-Warning") is None
                    got = stub.requests[-1]
                    assert got.target == f"{base_path}{v1}{path}?q=%20&q=1".encode()
                    assert without_inserted(got.body, role) == ODD_JSON
        assert all(probe.target == f"{base_path}/slots".encode() for probe in stub.probes)


@pytest.mark.parametrize("base_path", ["", "/llm"])
@pytest.mark.parametrize("path", ["/messages", "/v1/messages"])
@on_loop
async def test_messages_goes_through_as_it_came(path: str, base_path: str) -> None:
    """llama-server ignores id_slot on this route, so nothing is put in, and no slot is claimed."""
    async with stub_upstream(odd_answer, base_path=base_path) as stub, running_proxy(settings_for(stub)) as running:
        for script, body in ((odd_answer, ODD_BYTES), (odd_stream, b"".join(FRAMES))):
            stub.script = script
            response = await running.fetch(f"{path}?q=%20&q=1", ODD_JSON)
            assert (response.status, response.body) == (200, body)
            assert response.get(b"X-Slotpin-Reason") == b"route_ignores_slot"
            assert response.get(b"X-Slotpin-Slot") is None
            assert (response.get(b"X-Slotpin-Warning") or b"").startswith(b"route_ignores_slot: ")
            assert stub.requests[-1].target == f"{base_path}{path}?q=%20&q=1".encode()
            assert stub.requests[-1].body == ODD_JSON


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/props?model=x"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/index.html?a=1&a=2&b="),
        ("POST", "/tokenize"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/apply-template"),
        ("POST", "/next-year/route"),
        ("PUT", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions"),
        ("PATCH", "/x"),
        ("DELETE", "/v1/stream/abc"),
        ("POST", "/v1/chat/completions/control"),
        ("POST", "/slots/0?action=save"),
        ("PROPFIND", "/x"),
    ],
)
@on_loop
async def test_everything_else_byte_for_byte(method: str, target: str) -> None:
    body = ODD_JSON if method in ("POST", "PUT", "PATCH") else None
    async with stub_upstream(odd_answer) as stub, running_proxy(settings_for(stub)) as running:
        for prefix in ("", "/main", "/compactor"):
            response = await running.fetch(prefix + target, body, (), method)
            assert (response.status, response.body) == (200, ODD_BYTES)
            got = stub.requests[-1]
            assert got.line == f"{method} {target} HTTP/1.1".encode()
            assert got.body == (body or b"")
        assert stub.probes == []
        assert not [name for name, _ in response.headers if name.lower().startswith(b"x-slotpin")]


@on_loop
async def test_slots_of_the_server_itself() -> None:
    async with stub_upstream(slots=3) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch("/slots", None)
        assert response.body.count(b'"id"') == 3


@pytest.mark.parametrize(
    "target",
    [
        b"/a%20b/%C3%A9%2F..%2f?x=%00&y=a+b&&=",
        b"//double//slash/",
        b"/v1/./models/../models",
        b"/a;b=c,d/@:!$&'()*+~",
        b"/x?",
        b"/x?/slotpin/status",
        b"/slotpins",
        b"/mainly/v1/models",
        b"/compactors",
        b"/v1/models?" + b"q" * 7000,
    ],
)
@on_loop
async def test_targets_as_sent(target: bytes) -> None:
    async with stub_upstream() as stub:
        got = await relayed(stub, target)
    # An empty query may go.
    assert got.target in (target, target.removesuffix(b"?"))


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"http://other.test:99/v1/models?a=b", b"/v1/models?a=b"),
        (b"HTTP://other.test/v1/models", b"/v1/models"),
        (b"http://other.test", b"/"),
        (b"http://other.test?a=b", b"/?a=b"),
        (b"http://other.test/compactor/v1/models", b"/v1/models"),
        (b"http://other.test/a;b?c;d", b"/a;b?c;d"),
    ],
)
@on_loop
async def test_absolute_form(sent: bytes, got: bytes) -> None:
    """RFC 9112 section 3.2.2: a server has to take it; the host in it is ours, not the next server's."""
    async with stub_upstream() as stub:
        arrived = await relayed(stub, sent)
    assert arrived.target == got
    assert arrived.get_all(b"host") == [f"127.0.0.1:{stub.port}".encode()]


@pytest.mark.parametrize("prefix", ["", "/main", "/compactor"])
@pytest.mark.parametrize("path", ["/v1/chat%2Fcompletions", "/v1/ch%61t/completions", "/%76%31/chat/completion%73"])
@on_loop
async def test_an_escape_is_no_way_around_the_pin(path: str, prefix: str) -> None:
    """cpp-httplib decodes a path before it routes it."""
    async with stub_upstream(odd_stream) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()  # the ticket of what is a side request
        response = await running.fetch(prefix + path)
        assert response.status == 200
        assert response.get(b"X-Slotpin-Reason") == b"pinned"
        assert response.get(b"X-Slotpin-Role") == (b"compactor" if prefix == "/compactor" else b"main")
        assert stub.requests[-1].target == path.encode()


@pytest.mark.parametrize("prefix", ["/comp%61ctor/", "/compactor%2F", "/m%61in/", "/%6dain%2f"])
@on_loop
async def test_an_escaped_role_is_stripped_whole_or_left_whole(prefix: str) -> None:
    async with stub_upstream(odd_stream) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()
        await running.fetch(f"{prefix}v1/models", None)
        assert stub.requests[-1].target in (b"/v1/models", f"{prefix}v1/models".encode())


@pytest.mark.parametrize("base_path", ["", "/llm"])
@on_loop
async def test_options_for_the_whole_server(base_path: str) -> None:
    async with stub_upstream(base_path=base_path) as stub:
        assert (await relayed(stub, "*", "OPTIONS")).line == b"OPTIONS * HTTP/1.1"


# Heads


@on_loop
async def test_request_headers_as_sent() -> None:
    sent = [
        b"X-Order: 1",
        b"x-lower: a",
        b"X-UPPER: B",
        b"X-Order: 2",
        b"Cookie: a=b",
        b"Cookie: c=d",
        b"Authorization: Bearer main-key",
        b"Accept-Encoding: gzip, br",
        b"X-Empty: ",
        b"X-Latin: caf\xe9",
        b"X-Spaces:  two  inside  it",
        b"User-Agent: test/1",
        b"Content-Type: application/json; charset=utf-8",
        b"X-Conversation-Id: abc",
        b"X-Last: 9",
    ]
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(headers=sent)
        (got,) = stub.requests
    assert got.get_all(b"host") == [f"127.0.0.1:{stub.port}".encode()]
    lines = [name + b":" + value.strip() for name, value in got.headers]
    expected = [name + b":" + value.strip() for name, _, value in (line.partition(b":") for line in sent)]
    assert [line for line in lines if not line.lower().startswith((b"host:", b"content-length:"))] == expected


@on_loop
async def test_response_head_as_sent() -> None:
    head = [
        b"Server: llama.cpp",
        b"Set-Cookie: a=1; Path=/",
        b"set-cookie: b=2",
        b"X-Z: z",
        b"Access-Control-Allow-Origin: *",
        b"Content-Encoding: gzip",
        b"X-A: a",
        b"Set-Cookie: c=3",
        b"X-Latin: caf\xe9",
        b"Date: Mon, 30 Nov 2026 00:00:00 GMT",
    ]

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(ODD_BYTES, b"299 Odd  Phrase \xe9!", head))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        for target in ("/v1/chat/completions", "/tokenize"):
            response = await running.fetch(target)
            assert (response.status, response.phrase) == (299, b"Odd  Phrase \xe9!")
            assert response.body == ODD_BYTES
            lines = [name + b": " + value for name, value in response.headers]
            kept = [line for line in lines if not line.startswith((b"X-Slotpin-", b"Content-Length"))]
            assert kept == head


@pytest.mark.parametrize("phrase", [b"", b" "])
@on_loop
async def test_no_reason_phrase(phrase: bytes) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(b"HTTP/1.1 200" + phrase + b"\r\nContent-Length: 2\r\n\r\nok")

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch("/health", None)
        assert (response.status, response.phrase, response.body) == (200, b"", b"ok")


CORS = [
    b"Access-Control-Allow-Origin: http://localhost:3000",
    b"Access-Control-Allow-Credentials: true",
    b"Access-Control-Allow-Methods: GET, POST",
    b"Access-Control-Allow-Headers: *",
    b"Vary: Origin",
]


@pytest.mark.parametrize("method", ["OPTIONS", "POST", "GET", "HEAD"])
@on_loop
async def test_cors_headers_are_relayed_and_never_doubled(method: str) -> None:
    async def script(connection: Connection, got: Request) -> None:
        head = answer(b"" if got.method == b"OPTIONS" else b"{}", headers=CORS)
        await connection.send(head.removesuffix(b"{}") if got.method == b"HEAD" else head)

    asked = [b"Origin: http://localhost:3000", b"Access-Control-Request-Method: POST"]
    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch("/v1/chat/completions", b"{}" if method == "POST" else None, asked, method)
        assert stub.requests[-1].line == f"{method} /v1/chat/completions HTTP/1.1".encode()
        assert stub.requests[-1].get_all(b"origin") == [b"http://localhost:3000"]
        kept = [name + b": " + value for name, value in response.headers if name.startswith((b"Access", b"Vary"))]
        assert kept == CORS


HOP = [
    b"Connection: X-Named, keep-alive, x-other",
    b"Connection: X-Third",
    b"Keep-Alive: timeout=5",
    b"X-Named: 1",
    b"x-OTHER: 2",
    b"X-Third: 3",
    b"Proxy-Authorization: Basic eDp5",
    b"Proxy-Connection: keep-alive",
    b"Proxy-Authenticate: Basic",
    b"TE: trailers",
    b"Trailer: X-Trailer",
    b"X-Stays: 4",
]


@on_loop
async def test_hop_by_hop_headers_stay_on_their_hop() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(b"{}", headers=HOP))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(headers=HOP)
        (got,) = stub.requests
    for headers in (got.headers, response.headers):
        names = {name.lower() for name, _ in headers}
        assert b"x-stays" in names
        assert not names & {line.partition(b":")[0].lower() for line in HOP[:-1]}


@on_loop
async def test_connection_can_not_name_the_framing_away() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(b"hello", headers=[b"Connection: content-length, host"]))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(2):
            await client.send(request("POST", "/tokenize", b"{}", [b"Connection: content-length, host, keep-alive"]))
            response = await asyncio.wait_for(client.read_response(), 2)
            assert response.body == b"hello"
        assert stub.requests[-1].get_all(b"host") == [f"127.0.0.1:{stub.port}".encode()]
        assert stub.requests[-1].get_all(b"content-length") == [b"2"]
        await client.close()


@on_loop
async def test_own_request_headers_are_not_forwarded() -> None:
    sent = [b"X-Slotpin-Role: main", b"x-slotpin-session: s", b"X-SLOTPIN-Anything: 1", b"X-Slot: kept"]
    for enabled in (False, "auto", True):
        async with stub_upstream() as stub, running_proxy(settings_for(stub, enabled)) as running:
            for target in ("/v1/chat/completions", "/tokenize"):
                assert (await running.fetch(target, headers=sent)).status == 200
                names = [name.lower() for name, _ in stub.requests[-1].headers]
                assert b"x-slot" in names
                assert not [name for name in names if name.startswith(b"x-slotpin")]


@pytest.mark.parametrize("value", [b"Admin", b"main,compactor", b"main compactor", b"pass, refuse", b"\xff"])
@pytest.mark.parametrize(
    ("name", "code", "known"),
    [
        (b"X-Slotpin-Role", "invalid_role", "main or compactor"),
        (b"X-Slotpin-On-Unsafe", "invalid_on_unsafe", "refuse nor pass"),
    ],
)
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/compactor/v1/chat/completions", "/health"])
@on_loop
async def test_an_unknown_word_in_a_header_of_ours_is_an_error(
    target: str, name: bytes, code: str, known: str, value: bytes
) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(target, headers=[name + b": " + value])
        assert (response.status, response.error["code"]) == (400, code)
        assert response.error["message"].startswith("slotpin: ")
        assert known in response.error["message"]
        assert stub.requests == []
        assert (await running.fetch()).status == 200


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


# Large bodies


@on_loop
async def test_five_megabytes_of_chat() -> None:
    noise = random.Random(1).randbytes(3_700_000).hex().encode()[: 5 * 2**20]
    body = b'{"messages":[{"role":"user","content":"' + noise + b'"}],"temperature":0.10}'
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for headers in ([], [b"Transfer-Encoding: chunked"]):
            client = await running.client()
            if headers:
                await client.send(request("POST", "/v1/chat/completions", None, headers))
                for start in range(0, len(body), 65_537):
                    await client.send(chunk(body[start : start + 65_537]))
                await client.send(LAST_CHUNK)
            else:
                await client.send(request("POST", "/v1/chat/completions", body))
            assert (await client.read_response()).status == 200
            await client.close()
            restored = without_inserted(stub.requests[-1].body, "main")
            assert hashlib.sha256(restored).digest() == hashlib.sha256(body).digest()


async def _upload(running: Running, target: str, body: bytes, chunked: bool) -> None:
    client = await running.client()
    if chunked:
        await client.send(request("POST", target, None, [b"Transfer-Encoding: chunked"]))
        for start in range(0, len(body), 300_000):
            await client.send(chunk(body[start : start + 300_000]))
        await client.send(LAST_CHUNK)
    else:
        await client.send(request("POST", target, body))
    assert (await client.read_response()).status == 200
    await client.close()


@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_twenty_megabytes_of_upload(chunked: bool) -> None:
    body = random.Random(2).randbytes(20 * 2**20)
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await _upload(running, "/v1/audio/transcriptions", body, chunked)
        (got,) = stub.requests
        assert hashlib.sha256(got.body).digest() == hashlib.sha256(body).digest()
        assert got.get_all(b"transfer-encoding") == ([b"chunked"] if chunked else [])


@on_loop
async def test_an_upload_is_read_no_faster_than_the_server_takes_it() -> None:
    go_on = asyncio.Event()

    async def raw(connection: Connection) -> None:
        head = await connection.read_head()
        connection.stop_reading()
        await go_on.wait()
        connection.go_on_reading()
        body = await connection.read_body(head)
        await connection.send(answer(hashlib.sha256(body).hexdigest().encode()))
        await connection.gone()

    body = random.Random(3).randbytes(40 * 2**20)
    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        sending = asyncio.create_task(client.send(request("POST", "/upload", body)))
        await asyncio.sleep(0.3)
        assert not sending.done()  # not in the proxy's memory
        go_on.set()
        assert (await client.read_response()).body == hashlib.sha256(body).hexdigest().encode()
        await sending
        await client.close()


@on_loop
async def test_switched_off_no_byte_of_a_body_changes() -> None:
    bodies = [
        ODD_JSON,
        b'{"id_slot":null,"cache_prompt":null}',
        b'{"id_slot":5}',
        b"[1]",
        b"not json",
        b"",
        b"\xef\xbb\xbf{}",
        bytes(range(256)) * 4096,
    ]
    async with stub_upstream(odd_stream) as stub, running_proxy(settings_for(stub, False)) as running:
        for path in GENERATING:
            for prefix in ("", "/v1", "/main/v1", "/compactor/v1"):
                for body in bodies:
                    response = await running.fetch(prefix + path, body)
                    assert response.status == 200
                    assert response.body == b"".join(FRAMES)
                    assert stub.requests[-1].body == body
        assert response.get(b"X-Slotpin-Reason") == b"disabled"
        assert stub.probes == []


@pytest.mark.parametrize(
    "body", [b"[1]", b"not json", b"", b'"text"', b'{"a":1} x', b"{", b"\x1f\x8b\x08\x00gzip", b"\xff{}"]
)
@on_loop
async def test_what_is_no_json_object_goes_through(body: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for target in ("/v1/chat/completions", "/compactor/v1/chat/completions"):
            assert (await running.fetch(target, body)).status == 200
            assert stub.requests[-1].body == body


@on_loop
async def test_a_client_that_waits_for_an_answer_it_got_early() -> None:
    """Many clients read only after they have sent everything."""

    async def raw(connection: Connection) -> None:
        await connection.read_head()
        await connection.send(answer(b"too large", b"413 Content Too Large", [b"Connection: close"]))
        connection.finish_sending()
        await connection.gone()

    body = bytes(8 * 2**20)
    async with stub_upstream(raw=raw) as stub, running_proxy(settings_for(stub)) as running:
        client = await Client.connect(running.port)
        sending = asyncio.create_task(client.send(request("POST", "/upload", body)))
        response = await client.read_response()
        assert (response.status, response.body) == (413, b"too large")
        await asyncio.wait([sending])
        await client.close()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: stub.open == 0, "the upstream connection is closed")
