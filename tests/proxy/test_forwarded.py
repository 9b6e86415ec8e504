"""X-Forwarded-* and Via, where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.proxy import on_loop, request, running_proxy, settings_for
from tests.support.stub_upstream import Connection, Request, answer, stub_upstream

TARGETS = ["/v1/chat/completions", "/tokenize"]
SENT = [b"X-Forwarded-For: 10.0.0.9", b"X-Forwarded-Proto: https", b"Via: 1.1 front", b"Forwarded: for=10.0.0.9"]
NAMES = (b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"via")


def said(got: Request) -> dict[bytes, list[bytes]]:
    return {name: got.get_all(name) for name in NAMES}


@pytest.mark.parametrize("target", TARGETS)
@on_loop
async def test_off_nothing_is_added_and_what_came_passes(target: str) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(target)
        assert said(stub.requests[-1]) == {name: [] for name in NAMES}
        assert response.get_all(b"via") == []
        await running.fetch(target, headers=SENT)
        assert said(stub.requests[-1]) == {
            b"x-forwarded-for": [b"10.0.0.9"],
            b"x-forwarded-host": [],
            b"x-forwarded-proto": [b"https"],
            b"via": [b"1.1 front"],
        }


@pytest.mark.parametrize("target", TARGETS)
@on_loop
async def test_forwarded_headers(target: str) -> None:
    on = {"forwardedHeaders": True}
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=on)) as running:
        await running.fetch(target, host=b"localhost:99")
        assert said(stub.requests[-1]) == {
            b"x-forwarded-for": [b"127.0.0.1"],
            b"x-forwarded-host": [b"localhost:99"],
            b"x-forwarded-proto": [b"http"],
            b"via": [],
        }
        # A proxy before this one has said who asked: its word is kept, its own address is put behind.
        await running.fetch(target, headers=[*SENT, b"x-forwarded-for: 10.0.0.10", b"X-Forwarded-Host: front.example"])
        assert said(stub.requests[-1]) == {
            b"x-forwarded-for": [b"10.0.0.9, 10.0.0.10, 127.0.0.1"],
            b"x-forwarded-host": [b"front.example"],
            b"x-forwarded-proto": [b"https"],
            b"via": [b"1.1 front"],
        }
        assert stub.requests[-1].get_all(b"forwarded") == [b"for=10.0.0.9"]


@on_loop
async def test_a_unix_socket_has_no_address(tmp_path: Path) -> None:
    on = {"forwardedHeaders": True, "host": f"unix:{tmp_path / 'x.sock'}"}
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=on)) as running:
        await running.fetch()
        assert stub.requests[-1].get_all(b"x-forwarded-for") == []
        await running.fetch(headers=SENT)
        assert stub.requests[-1].get_all(b"x-forwarded-for") == [b"10.0.0.9"]


@pytest.mark.parametrize("target", TARGETS)
@on_loop
async def test_via(target: str) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(headers=[b"Via: 1.1 behind"]))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub, listen={"via": True})) as running:
        response = await running.fetch(target, headers=SENT)
        assert stub.requests[-1].get_all(b"via") == [b"1.1 front", b"1.1 slotpin"]
        assert stub.requests[-1].get_all(b"x-forwarded-for") == [b"10.0.0.9"]
        assert response.get_all(b"via") == [b"1.1 behind", b"1.1 slotpin"]
        client = await running.client()
        await client.send(request("POST", target, b"{}", version=b"1.0"))
        await client.read_all()
        assert stub.requests[-1].get_all(b"via") == [b"1.0 slotpin"]
        await client.close()
