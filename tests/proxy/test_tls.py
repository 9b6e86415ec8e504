"""A server behind https: the system's certificates, or those of SSL_CERT_FILE."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.support.certificates import certificate_authority, server_tls
from tests.support.proxy import on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import DONE, LAST_CHUNK, SSE_HEAD, Connection, Request, answer, chunk, stub_upstream

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return certificate_authority(tmp_path_factory.mktemp("ca")).parent


@pytest.fixture
def trusted(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))


@pytest.mark.usefixtures("trusted")
def test_requests_and_looks_go_over_tls(authority: Path) -> None:
    tls = server_tls(authority, "IP:127.0.0.1")
    body = b"y" * 3_000_000

    async def script(connection: Connection, got: Request) -> None:
        if got.target == b"/upload":
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(got.body), got.body)
        else:
            await connection.send(SSE_HEAD, chunk(b"data: x\n\n"), chunk(DONE), LAST_CHUNK)

    @on_loop
    async def test() -> None:
        async with stub_upstream(script, tls=tls) as stub, running_proxy(settings_for(stub)) as running:
            for _ in range(3):
                response = await running.fetch()
                assert (response.status, response.body) == (200, b"data: x\n\n" + DONE)
                assert response.get(b"X-Slotpin-Reason") == b"pinned"
            assert (stub.generating_accepts, len(stub.probes)) == (1, 1)
            assert (await running.fetch("/upload", body)).body == body

    test()


@pytest.mark.usefixtures("trusted")
def test_a_client_that_leaves_is_noticed_over_tls(authority: Path) -> None:
    tls = server_tls(authority, "IP:127.0.0.1")

    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
        await connection.gone()

    @on_loop
    async def test() -> None:
        async with stub_upstream(script, tls=tls) as stub, running_proxy(settings_for(stub)) as running:
            client = await running.client()
            await client.send(request("POST", CHAT, b"{}"))
            await client.read_head()
            client.leave()
            await until(lambda: stub.open == 0, "the upstream connection is closed", 0.5)

    test()


UNTRUSTED = {
    "an unknown authority": (
        "IP:127.0.0.1",
        2,
        False,
        "issuer certificate",
    ),
    "another name": ("DNS:other.example", 2, True, "IP address mismatch"),
    "out of date": ("IP:127.0.0.1", -1, True, "certificate has expired"),
}


@pytest.mark.parametrize(("name", "days", "known", "why"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_bad_certificate_is_said_in_one_line(
    authority: Path, monkeypatch: pytest.MonkeyPatch, name: str, days: int, known: bool, why: str
) -> None:
    tls = server_tls(authority, name, days)
    if known:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))

    @on_loop
    async def test() -> None:
        async with stub_upstream(tls=tls) as stub, running_proxy(settings_for(stub)) as running:
            response = await running.fetch()
            assert response.status == 502
            message = response.error["message"]
            assert message.startswith(
                f"slotpin: cannot reach llama-server at {stub.url}: its certificate is not trusted ("
            )
            assert why in message
            assert "SSL_CERT_FILE" in message
            assert "\n" not in message
            (warning,) = running.logged("warning")
            assert "its certificate is not trusted" in str(warning["message"])
            assert stub.requests == []

    test()


@on_loop
async def test_https_to_a_server_without_tls() -> None:
    async def raw(connection: Connection) -> None:
        await connection.reader.read(1)
        await connection.send(answer(status=b"400 Bad Request"))

    async with stub_upstream(raw=raw) as stub:
        stub.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # so its URL says
        async with running_proxy(settings_for(stub)) as running:
            response = await running.fetch()
            assert response.status == 502
            assert "TLS fails (" in response.error["message"]
            assert response.error["message"].endswith("is it http:// instead of https://?")


@on_loop
async def test_http_to_a_server_with_tls(tmp_path: Path) -> None:
    certificate_authority(tmp_path)
    async with stub_upstream(tls=server_tls(tmp_path, "IP:127.0.0.1")) as stub:
        settings = settings_for(stub, main={"baseUrl": f"http://127.0.0.1:{stub.port}"})
        async with running_proxy(settings) as running:
            assert (await running.fetch()).status == 502
