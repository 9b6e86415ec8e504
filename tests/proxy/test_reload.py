"""New settings while the proxy runs: from its file, by SIGHUP, and for exchanges under way."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.program import Program
from tests.support.proxy import Client, Response, on_loop, request, running_proxy, settings_for, until
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
SIDE = "/compactor/v1/chat/completions"


class Served:
    """`slotpin serve` in a process of its own, and the file that it reads."""

    def __init__(self, program: Program, file: Path, stub: Stub) -> None:
        self._program = program
        self._file = file
        self._stub = stub
        self.port = 0

    def write(self, **sections: Any) -> None:
        tree = {"main": {"baseUrl": self._stub.url}, "log": {"format": "json"}, **sections}
        # Replaced whole, as editors do; a reader never sees half of it.
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(tree))
        new.rename(self._file)

    def write_text(self, text: str) -> None:
        self._file.write_text(text)

    def hup(self) -> None:
        self._program.signal(signal.SIGHUP)

    def events(self, name: str) -> list[dict[str, Any]]:
        return self._program.events(name)

    @property
    def err(self) -> str:
        return self._program.err

    async def fetch(self, target: str = CHAT, body: bytes = b"{}") -> Response:
        client = await Client.connect(self.port)
        await client.send(request("POST", target, body))
        response = await client.read_response()
        await client.close()
        return response

    async def generation(self) -> int:
        client = await Client.connect(self.port)
        await client.send(request("GET", "/slotpin/status"))
        shown: int = json.loads((await client.read_response()).body)["generation"]
        await client.close()
        return shown

    async def reloaded(self, count: int) -> None:
        await until(lambda: len(self.events("config_reloaded")) == count, f"{count} reloads", 10)


@asynccontextmanager
async def served(folder: Path, stub: Stub, **sections: Any) -> AsyncIterator[Served]:
    file = folder / "slotpin.json"
    stub_of_the_program = Served(None, file, stub)  # type: ignore[arg-type]
    stub_of_the_program.write(**sections)
    with Program(folder, "serve", "--config", str(file), "--port", "0") as program:
        running = Served(program, file, stub)
        running.port = urlsplit(await asyncio.to_thread(lambda: program.url)).port or 0
        yield running
        assert "Traceback" not in program.err


AUTO = {"enabled": "auto"}


@on_loop
async def test_by_its_file_and_by_sighup(tmp_path: Path) -> None:
    async with stub_upstream(slots=3) as stub, served(tmp_path, stub, llamaCppSlots=AUTO) as running:
        assert (await running.fetch()).get(b"X-Slotpin-Slot") == b"0"
        assert await running.generation() == 1

        # By the file alone, within a few seconds.
        running.write(llamaCppSlots={"enabled": "auto", "mainIdSlot": 2})
        await running.reloaded(1)
        refused = await running.fetch(SIDE)
        assert (refused.status, refused.error["code"]) == (503, "settings_changed")
        assert (await running.fetch()).get(b"X-Slotpin-Slot") == b"2"
        assert (await running.fetch(SIDE)).get(b"X-Slotpin-Slot") == b"1"
        assert await running.generation() == 2

        # What does not validate changes nothing, and says why.
        for text in ("{", '{"llamaCppSlots":{"enabled":"maybe"}}', '{"llamaCpSlots":{}}', "", '{"listen":{"port":-1}}'):
            before = len(running.events("config_rejected"))
            running.write_text(text)
            running.hup()
            await until(lambda n=before: len(running.events("config_rejected")) > n, f"{text} is rejected")  # type: ignore[misc]
            assert (await running.fetch()).get(b"X-Slotpin-Slot") == b"2"
        assert await running.generation() == 2
        assert all("slotpin.json" in event["problem"] for event in running.events("config_rejected"))
        assert {event["level"] for event in running.events("config_rejected")} == {"error"}

        # By the signal, at once.
        running.write(llamaCppSlots={"enabled": False})
        running.hup()
        await running.reloaded(2)
        assert (await running.fetch()).get(b"X-Slotpin-Reason") == b"disabled"
        assert await running.generation() == 3
        decisions = [event["generation"] for event in running.events("exchange")]
        assert decisions == sorted(decisions) and set(decisions) == {1, 2, 3}


@on_loop
async def test_a_file_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    async with stub_upstream() as stub, served(tmp_path, stub, llamaCppSlots=AUTO) as running:
        (tmp_path / "slotpin.json").unlink()
        running.hup()
        await until(lambda: bool(running.events("config_rejected")), "the loss is logged")
        assert (await running.fetch()).get(b"X-Slotpin-Reason") == b"pinned"
        running.write(llamaCppSlots={"enabled": True})
        await running.reloaded(1)
        assert (await running.fetch()).get(b"X-Slotpin-Reason") == b"vouched"
        # In JSON, with the fields that a decision has.
        await until(lambda: len(running.events("exchange")) == 2, "both are logged")
        event = running.events("exchange")[-1]
        assert {
            name: event.get(name) for name in ("role", "found_by", "action", "slot", "slots", "reason", "generation")
        } == {
            "role": "main",
            "found_by": "default",
            "action": "pin",
            "slot": 0,
            "slots": None,
            "reason": "vouched",
            "generation": 2,
        }


@on_loop
async def test_an_exchange_under_way_keeps_its_settings() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, got: Request) -> None:
        if b'"slow"' in got.body:
            await connection.send(SSE_HEAD)
            await go_on.wait()
            await connection.send(chunk(DONE), LAST_CHUNK)
        else:
            await connection.send(answer())

    async with (
        stub_upstream(script) as stub,
        stub_upstream(script) as other,
        running_proxy(settings_for(stub)) as running,
    ):
        client = await running.client()
        await client.send(request("POST", CHAT, b'{"slow":1}'))
        assert b"X-Slotpin-Slot: 0" in await client.read_head()
        # Half of a body is here when the settings change: it goes where its exchange began.
        half = await running.client()
        whole = request("POST", CHAT, b'{"half":1}')
        await half.send(whole[:-4])
        await asyncio.sleep(0.02)

        running.proxy.state.apply(
            settings_for(other, llamaCppSlots={"enabled": "auto", "mainIdSlot": 1, "compactorIdSlot": 0})
        )
        # The open exchange is no ticket under the new settings.
        refused = await running.fetch(SIDE)
        assert (refused.status, refused.error["code"]) == (503, "settings_changed")
        assert (await running.fetch()).get(b"X-Slotpin-Slot") == b"1"
        assert len(other.requests) == 1

        await half.send(whole[-4:])
        go_on.set()
        assert (await half.read_response()).get(b"X-Slotpin-Slot") == b"0"
        assert await client.read_chunk() == DONE
        assert await client.read_chunk() == b""
        assert [got.body.count(b'"id_slot":0') for got in stub.requests] == [1, 1]
        assert (await running.status())["generation"] == 2
        await client.close()


@on_loop
async def test_what_does_not_concern_pinning_keeps_the_tickets() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()
        rule = {"name": "mine", "model": "small"}
        running.proxy.state.apply(settings_for(stub, recognisers={"custom": [rule]}, timeouts={"drainSeconds": 1}))
        assert (await running.status())["generation"] == 1
        side = await running.fetch(body=b'{"model":"small"}')
        assert (side.get(b"X-Slotpin-Role"), side.get(b"X-Slotpin-Reason")) == (b"compactor", b"pinned")
        running.proxy.state.apply(settings_for(stub))
        assert (await running.fetch(body=b'{"model":"small"}')).get(b"X-Slotpin-Role") == b"main"


@on_loop
async def test_the_connect_timeout_is_reloaded_too() -> None:
    async with stub_upstream() as stub:
        pass
    with socket.create_server(("127.0.0.1", stub.port), backlog=0) as server:
        # A full queue makes Linux drop what asks for more: the connection is neither taken nor refused.
        waiting = [socket.socket() for _ in range(4)]
        for full in waiting:
            full.setblocking(False)
            full.connect_ex(server.getsockname())
        async with running_proxy(settings_for(stub, False, timeouts={"connectSeconds": 0.2})) as running:
            refused = await running.fetch()
            assert (refused.status, "0.2" in refused.error["message"]) == (502, True)
            running.proxy.state.apply(settings_for(stub, False, timeouts={"connectSeconds": 0.3}))
            assert "0.3" in (await running.fetch()).error["message"]
        for full in waiting:
            full.close()
