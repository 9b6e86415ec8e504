"""Unix sockets on both sides."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.proxy.bind import bind
from tests.support.proxy import on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import DONE, LAST_CHUNK, SSE_HEAD, Connection, Request, chunk, stub_upstream

CHAT = "/v1/chat/completions"


@on_loop
async def test_both_sides(tmp_path: Path) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(DONE), LAST_CHUNK)

    own = tmp_path / "slotpin.sock"
    listen = {"host": f"unix:{own}", "apiKeys": ["sk-one"]}
    async with stub_upstream(script, socket=tmp_path / "llama server.sock") as stub:
        async with running_proxy(settings_for(stub, listen=listen)) as running:
            assert running.proxy.url == f"unix:{own}"
            # Whoever can open the socket may use any name; a key counts here as well.
            for host in (b"localhost", b"evil.example"):
                response = await running.fetch(headers=[b"Authorization: Bearer sk-one"], host=host)
                assert (response.status, response.body) == (200, DONE)
                assert response.get(b"X-Slotpin-Reason") == b"pinned"
            assert (await running.fetch()).status == 401
            assert stub.requests[-1].get_all(b"host") == [b"localhost"]
            assert stub.generating_accepts == 1
            status = await running.fetch("/slotpin/status", None, [b"Authorization: Bearer sk-one"])
            assert stub.url.encode() in status.body
        assert not own.exists()


@on_loop
async def test_a_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(SSE_HEAD, chunk(b"data: x\n\n"))
        await connection.gone()

    listen = {"host": f"unix:{tmp_path / 'slotpin.sock'}"}
    async with (
        stub_upstream(script, socket=tmp_path / "llama.sock") as stub,
        running_proxy(settings_for(stub, listen=listen)) as running,
    ):
        client = await running.client()
        await client.send(request("POST", CHAT, b"{}"))
        await client.read_head()
        await client.close()
        await until(lambda: stub.open == 0, "the upstream connection is closed", 0.5)
        await running.until_outcome("client_left")


@pytest.mark.parametrize("there", ["nothing", "a file", "a dead socket"])
@on_loop
async def test_nobody_behind_the_path(tmp_path: Path, there: str) -> None:
    path = tmp_path / "llama.sock"
    if there == "a file":
        path.write_text("")
    elif there == "a dead socket":
        leave_behind(path)
    async with stub_upstream() as stub:
        stub.socket = path
        async with running_proxy(settings_for(stub)) as running:
            response = await running.fetch()
            assert response.status == 502
            assert f"unix:{path}" in response.error["message"]


def leave_behind(path: Path) -> None:
    """What a process leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@on_loop
async def test_a_socket_that_was_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "slotpin.sock"
    leave_behind(path)
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen={"host": f"unix:{path}"})) as running:
        assert (await running.fetch()).status == 200


@on_loop
async def test_a_socket_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "slotpin.sock"
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen={"host": f"unix:{path}"})) as running:
        with pytest.raises(UserError, match="another program listens there"):
            await bind(f"unix:{path}", 0, asyncio.Protocol)
        assert (await running.fetch()).status == 200


@on_loop
async def test_the_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "slotpin.sock"
    first = await bind(f"unix:{path}", 0, asyncio.Protocol)
    path.rename(tmp_path / "moved")
    second = await bind(f"unix:{path}", 0, asyncio.Protocol)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("file", "there is a file that is no socket; choose another path"),
        ("nowhere/slotpin.sock", "there is no folder {}/nowhere; make it"),
        ("file/slotpin.sock", "there is no folder {}/file; make it"),
        # Not even root may make a file there.
        ("/proc/slotpin.sock", "slotpin can't make a file there; choose a folder of your own instead of /proc"),
        ("x" * 120, "AF_UNIX path too long; see listen.host"),
    ],
)
@on_loop
async def test_where_no_socket_can_be(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError) as caught:
        await bind(f"unix:{tmp_path / name}", 0, asyncio.Protocol)
    said = str(caught.value)
    assert said.startswith(f"cannot listen on unix:{tmp_path / name}: {complaint.format(tmp_path)}")
    assert "\n" not in said
    assert (tmp_path / "file").read_text() == "precious"
