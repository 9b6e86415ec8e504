"""What slotpin tells of its exchanges, in the proxy itself."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import pytest

from slotpin.observe.observer import client_name
from slotpin.observe.records import Records
from slotpin.observe.totals import Histogram
from slotpin.proxy.own_routes import MAX_VIEWERS
from tests.observe.made import record
from tests.support.proxy import Client, Running, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import Connection, Request, answer, stub_upstream

TURN = b'{"model":"m","messages":[{"role":"user","content":"PROMPT-TEXT"}]}'
SIDE = "/compactor/v1/chat/completions"
TIMINGS = b'{"timings":{"prompt_n":100,"cache_n":300,"predicted_n":7,"prompt_ms":250.0}}'


async def counted(connection: Connection, _: Request) -> None:
    await connection.send(answer(TIMINGS))


async def told(running: Running, path: str) -> Any:
    response = await running.fetch(f"/slotpin/{path}", None)
    assert response.status == 200, response
    return json.loads(response.body)


async def until_under_way(running: Running, *outcomes: str) -> None:
    observer = running.proxy.state.observer
    await until(lambda: [each.outcome for each in observer.under_way] == list(outcomes), "they are under way")


@on_loop
async def test_a_request_is_known_by_its_id_and_its_beginning() -> None:
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(body=TURN, headers=[b"User-Agent: Pi/1.6.0 (linux)"])
        id_ = (response.get(b"X-Slotpin-Request") or b"").decode()
        for asked in (id_, id_[:4], "latest"):
            said = await told(running, f"requests/{asked}")
            known = said["request"]
            assert known["id"] == id_
        assert (known["role"], known["reason"], known["slot"], known["slots"]) == ("main", "pinned", 0, 2)
        assert (known["client"], known["model"], known["outcome"], known["status"]) == ("pi", "m", "completed", 200)
        assert (known["evaluated"], known["cached"], known["generated"], known["promptMs"]) == (100, 300, 7, 250.0)
        assert 0 <= known["waited"] <= known["seconds"]
        words = dict(said["explained"])
        assert "300 of 400 prompt tokens were re-used" in words["Cache"]
        assert words["Slot"].startswith("slot 0 of 2 (pinned): ")


@on_loop
async def test_what_is_not_known_is_said_plainly() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        nothing = await running.fetch("/slotpin/requests/latest", None)
        assert (nothing.status, nothing.error["code"]) == (404, "unknown_request")
        assert "no request that generates has come through" in nothing.error["message"]
        for _ in range(40):
            await running.fetch(body=TURN)
        unknown = await running.fetch("/slotpin/requests/xyz", None)
        assert unknown.status == 404
        assert "no request xyz is known; kept are the last 40" in unknown.error["message"]
        several = await running.fetch("/slotpin/requests/", None)  # every id begins so
        assert (several.status, several.error["code"]) == (409, "ambiguous_request")
        assert len((await told(running, "requests?limit=3"))["ended"]) == 3
        assert (await running.fetch("/slotpin/requests?limit=-1", None)).status == 400


@on_loop
async def test_requests_that_wait_and_run_are_told_of_too() -> None:
    finish = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await finish.wait()
        await connection.send(answer(TIMINGS))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        first, second = await running.client(), await running.client()
        await first.send(request("POST", "/v1/chat/completions", TURN))
        await until(lambda: bool(stub.requests), "the first is sent")
        await second.send(request("POST", "/v1/chat/completions", TURN))

        await until_under_way(running, "under_way", "waiting")
        board = await told(running, "status")
        (row,) = [row for row in board["slots"] if row["id"] == 0]
        assert (row["busy"], row["role"], row["waiting"]) == (True, "main", 1)
        assert row["running"] == board["underWay"][0]["id"]
        assert row["tokens"] is None
        words = dict((await told(running, f"requests/{board['underWay'][1]['id']}"))["explained"])
        assert words["Gate"].startswith("waiting for slot 0 since ")
        finish.set()
        await first.read_response()
        await second.read_response()
        await running.until_outcome("completed", 2)
        board = await told(running, "status")
        (row,) = [row for row in board["slots"] if row["id"] == 0]
        assert (row["busy"], row["running"], row["waiting"], row["tokens"]) == (False, None, 0, 407)
        assert (row["n_ctx"], row["reused"]) == (4096, [75, 75])
        assert board["underWay"] == []


@on_loop
async def test_a_new_conversation_is_not_shown_with_the_tokens_of_the_one_before_it() -> None:
    finish = asyncio.Event()

    async def script(connection: Connection, _: Request) -> None:
        await finish.wait()
        await connection.send(answer(TIMINGS))

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        finish.set()
        second, third = (TURN.replace(b"PROMPT-TEXT", text) for text in (b"another", b"a third"))
        for body in (TURN, second):
            await running.fetch(body=body)
        assert [row["tokens"] for row in (await told(running, "status"))["slots"]] == [407, 407]
        finish.clear()
        for body, tokens in ((second, 407), (third, None)):
            client = await running.client()
            await client.send(request("POST", "/v1/chat/completions", body))
            await until_under_way(running, "under_way")
            (row,) = [row for row in (await told(running, "status"))["slots"] if row["busy"]]
            assert row["tokens"] == tokens
            finish.set()
            await client.read_response()
            await until_under_way(running)
            finish.clear()


@on_loop
async def test_a_client_that_leaves_while_it_waits_is_told_of() -> None:
    async def script(connection: Connection, _: Request) -> None:
        await connection.gone()

    async with stub_upstream(script) as stub, running_proxy(settings_for(stub)) as running:
        first, second = await running.client(), await running.client()
        await first.send(request("POST", "/v1/chat/completions", TURN))
        await until(lambda: bool(stub.requests), "the first is sent")
        await second.send(request("POST", "/v1/chat/completions", TURN))
        await until_under_way(running, "under_way", "waiting")
        second.leave()
        first.leave()
        await running.until_outcome("client_left", 2)
        shown = await told(running, "requests")
        assert [each["outcome"] for each in shown["ended"]] == ["client_left"] * 2
        assert shown["underWay"] == []


@on_loop
async def test_looking_asks_llama_server_nothing_and_shows_no_secret() -> None:
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(body=TURN, headers=[b"Authorization: Bearer main-key"])
        await running.fetch(SIDE, TURN)
        before = stub.accepts
        shown = b""
        for path in ("", "/", "/status", "/requests", "/requests/latest", "/metrics", "/health"):
            response = await running.fetch(f"/slotpin{path}", None)
            assert response.status == 200
            shown += response.body
        client = await running.client()
        await client.send(request("GET", "/slotpin/events"))
        await client.read_head()
        shown += await client.read_chunk() + await client.read_chunk()
        assert stub.accepts == before
        for secret in (b"PROMPT-TEXT", b"main-key", b"compactor-key"):
            assert secret not in shown


@on_loop
async def test_sums_and_what_was_spared() -> None:
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(body=TURN)
        await running.fetch(SIDE, b'{"messages":[],"id_slot":-1}')
        totals = (await told(running, "status"))["totals"]
        assert (totals["exchanges"], totals["refused"]) == (2, 1)
        assert (totals["evaluated"], totals["cached"]) == (100, 300)
        assert totals["sparedSeconds"] == pytest.approx(0.75)  # 300 tokens, 2.5 ms each


# Events


async def events(client: Client, count: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    while len(found) < count:
        lines = (await client.read_chunk()).decode().removesuffix("\n\n").split("\n")
        found.append(dict(line.split(": ", 1) for line in lines))
    return found


@on_loop
async def test_events_tell_of_what_was_and_of_what_comes() -> None:
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(body=TURN)
        await running.fetch(body=TURN)
        client = await running.client()
        await client.send(request("GET", "/slotpin/events"))
        head = await client.read_head()
        assert b"text/event-stream" in head and b"no-store" in head
        first, second, board = await events(client, 3)
        assert [event["event"] for event in (first, second, board)] == ["exchange", "exchange", "board"]
        assert [first["id"], second["id"]] == ["1", "2"]
        assert json.loads(board["data"])["totals"]["exchanges"] == 2
        await running.fetch(body=TURN)
        third, _ = await events(client, 2)
        assert (third["event"], third["id"]) == ("exchange", "3")
        # A page that comes back has missed nothing and gets nothing twice.
        again = await running.client()
        await again.send(request("GET", "/slotpin/events", None, [b"Last-Event-ID: 2"]))
        await again.read_head()
        missed, board = await events(again, 2)
        assert (missed["id"], board["event"]) == ("3", "board")
        # One that has seen another slotpin's begins anew.
        other = await running.client()
        await other.send(request("GET", "/slotpin/events", None, [b"Last-Event-ID: 99"]))
        await other.read_head()
        assert [event.get("id") for event in await events(other, 4)] == ["1", "2", "3", None]


@on_loop
async def test_events_do_not_hold_up_the_end() -> None:
    async with stub_upstream() as stub:
        settings = settings_for(stub, timeouts={"drainSeconds": 60})
        async with running_proxy(settings) as running:
            client = await running.client()
            await client.send(request("GET", "/slotpin/events"))
            await client.read_head()
            await asyncio.wait_for(running.proxy.stop(), 10)
            assert running.logged("waiting_for_answers") == []  # nobody waits for an answer there
            rest, reset = await client.read_all()
            assert rest.endswith(b"0\r\n\r\n") and not reset


@on_loop
async def test_only_so_many_may_look_at_once() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(MAX_VIEWERS):
            client = await running.client()
            await client.send(request("GET", "/slotpin/events"))
            await client.read_head()
        assert (await running.fetch("/slotpin/events", None)).status == 503
        client.leave()
        await running.fetch("/slotpin/health", None)  # by then it has been seen to leave
        late = await running.client()
        await late.send(request("GET", "/slotpin/events"))
        assert b" 200 " in await late.read_head()


# The page


@on_loop
async def test_the_page_is_one_document_under_a_strict_policy() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        page = await running.fetch("/slotpin/", None)
        policy = (page.get(b"Content-Security-Policy") or b"").decode()
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy and "http" not in policy
        text = page.body.decode()
        for kind in ("style", "script"):
            (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert [url for url in re.findall(r'(?:src|href)="([^"]*)"', text) if url != "data:,"] == []
        assert (await running.fetch("/slotpin/", None, method="HEAD")).status == 200


# What it is made of


def test_records_are_bounded_and_numbered() -> None:
    records = Records(kept=3)
    for number in range(1, 6):
        records.add(record(id=str(number)))
    assert [each.id for each in records] == ["5", "4", "3"]
    assert records.count == 5
    assert [(number, each.id) for number, each in records.after(4)] == [(5, "5")]
    assert [number for number, _ in records.after(0)] == [3, 4, 5]
    assert [number for number, _ in records.after(5)] == []
    assert [number for number, _ in records.after(6)] == [3, 4, 5]


def test_a_histogram_has_its_edges_included() -> None:
    histogram = Histogram((0.1, 1))
    for seconds in (0.05, 0.1, 0.11, 1, 1.5):
        histogram.observe(seconds)
    assert (histogram.counts, histogram.count) == ([2, 2, 1], 5)
    assert histogram.sum == pytest.approx(2.76)


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        (b"Pi/1.6.0 (linux)", "pi"),
        (b"claude-cli/2.0 (external)", "claude-cli"),
        (b"OpenAI/JS 6.1", "openai"),
        (None, "unknown"),
        (b"\xff<script>", "unknown"),
        (b"a" * 100, "a" * 24),
    ],
)
def test_a_client_is_called_what_its_user_agent_names_first(user_agent: bytes | None, name: str) -> None:
    assert client_name(user_agent) == name
