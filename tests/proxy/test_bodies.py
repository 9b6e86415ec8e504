"""Large bodies, and such as nobody reads."""

from __future__ import annotations

import asyncio
import hashlib
import random
import tracemalloc
from pathlib import Path

import pytest

import slotpin
from tests.proxy.odd import FRAMES, GENERATING, ODD_JSON, odd_stream, without_inserted
from tests.support.proxy import Client, Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import (
    LAST_CHUNK,
    SSE_HEAD,
    Connection,
    Request,
    answer,
    chunk,
    stub_upstream,
)

PACKAGE = Path(slotpin.__file__).parent

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


@on_loop
async def test_a_large_body_is_kept_no_longer_than_it_could_be_sent_again() -> None:
    """Answers take minutes, and each of them would keep its prompt."""
    size = 8 * 2**20
    goes_on = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        stub.requests.clear()
        await connection.send(SSE_HEAD, chunk(b":\n\n"))
        await goes_on.wait()
        await connection.send(chunk(b"data: {}\n\n"))
        await connection.gone()

    def kept() -> int:
        """Bytes that code of slotpin's has taken."""
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{PACKAGE}/*")])
        return sum(each.size for each in traces.statistics("filename"))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        tracemalloc.start()
        try:
            client = await running.client()
            body = b'{"stream":true,"messages":[{"role":"user","content":"%b"}]}' % (b"x" * size)
            await client.send(request("POST", "/v1/chat/completions", body))
            await client.read_head()
            assert kept() > size
            goes_on.set()
            await until(lambda: kept() < size / 8, "the body is let go")
        finally:
            tracemalloc.stop()
        client.leave()
        await running.until_outcome("client_left")


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
