"""What goes through unchanged (RFC 9110)."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.odd import FRAMES, GENERATING, ODD_BYTES, ODD_JSON, odd_answer, odd_stream, relayed, without_inserted
from tests.support.proxy import on_loop, request, running_proxy, settings_for
from tests.support.stub_upstream import (
    Connection,
    Request,
    answer,
    stub_upstream,
)

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
