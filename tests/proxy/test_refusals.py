"""Refusals, what passes with a warning, and two servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from slotpin.config import Settings
from slotpin.observe.warnings import Warner
from slotpin.proxy.probe import Probe
from tests.support.clock import Clock
from tests.support.proxy import Response, capturing_log, on_loop, request, running_proxy, settings_for, until
from tests.support.stub_upstream import Connection, Request, Stub, answer, stub_upstream

CHAT = "/v1/chat/completions"
SIDE = "/compactor/v1/chat/completions"

# What Pi looks for in a message to decide that another try could help.
PI_RETRIES = re.compile(
    r"time.?out|timed out|overloaded|rate.?limit|too many requests|network error|connection|server error|\b5\d\d\b"
    r"|unavailable|fetch failed|socket hang up|terminated|retry",
    re.IGNORECASE,
)


def assert_refused(response: Response, status: int, code: str) -> None:
    assert (response.status, response.error["code"]) == (status, code)
    message = response.error["message"]
    assert message.startswith("slotpin: ")
    assert "\n" not in message and len(message) < 400
    assert not PI_RETRIES.search(message)
    assert set(json.loads(response.body)) == {"error"}
    assert set(response.error) == {"message", "type", "param", "code"}
    assert response.get(b"Content-Type") == b"application/json"
    retry_after = response.get(b"Retry-After")
    assert (retry_after is not None and int(retry_after) > 0) if status == 503 else retry_after is None
    assert response.get(b"X-Should-Retry") == (b"false" if status == 409 else None)
    assert response.get(b"X-Slotpin-Role") == b"compactor"
    assert response.get(b"X-Slotpin-Reason") == code.encode()
    assert response.get(b"X-Slotpin-Slot") is None
    assert (response.get(b"X-Slotpin-Warning") or b"").startswith(code.encode())


@dataclass(frozen=True)
class Unsafe:
    """A server or a body with which a side request can't be kept apart, and how its refusal looks."""

    code: str
    status: int
    slots: int | bytes = 2
    ids: Mapping[str, object] = field(default_factory=dict)
    body: bytes = b"{}"


UNSAFE = {
    "no topology": Unsafe("topology_invalid", 503, slots=answer(b"[]x")),
    "wrong key": Unsafe("probe_failed", 503, slots=answer(b"", b"401 Unauthorized")),
    "no slots": Unsafe("too_few_slots", 409, slots=0),
    "one slot": Unsafe("too_few_slots", 409, slots=1),
    "equal ids modulo": Unsafe("ids_collide", 409, ids={"mainIdSlot": 0, "compactorIdSlot": 2}),
    "equal ids": Unsafe("ids_collide", 409, ids={"mainIdSlot": 1, "compactorIdSlot": 1}),
    "main's slot": Unsafe("explicit_conflict", 409, body=b'{"id_slot":0}'),
    "main's slot modulo": Unsafe("explicit_conflict", 409, body=b'{"id_slot":2}'),
    "negative": Unsafe("explicit_unpredictable", 409, body=b'{"id_slot":-1}'),
    "string": Unsafe("explicit_unpredictable", 409, body=b'{"id_slot":"1"}'),
    "fraction": Unsafe("explicit_unpredictable", 409, body=b'{"id_slot":1.5}'),
    "boolean": Unsafe("explicit_unpredictable", 409, body=b'{"id_slot":true}'),
}
each_unsafe = pytest.mark.parametrize("unsafe", UNSAFE.values(), ids=UNSAFE)


def settings_of(unsafe: Unsafe, stub: Stub) -> Settings:
    return settings_for(stub, llamaCppSlots={"enabled": "auto", **unsafe.ids})


@each_unsafe
@on_loop
async def test_an_unsafe_side_request_is_refused(unsafe: Unsafe) -> None:
    async with stub_upstream(slots=unsafe.slots) as stub, running_proxy(settings_of(unsafe, stub)) as running:
        main = await running.fetch()
        assert main.status == 200
        by_header = [b"X-Slotpin-Role: compactor"]
        for target, headers in ((SIDE, []), (CHAT, by_header), ("/compactor/infill", [])):
            assert_refused(await running.fetch(target, unsafe.body, headers), unsafe.status, unsafe.code)
        assert len(stub.requests) == 1
        assert (await running.status())["outcomes"] == {"completed": 1, "refused": 3}


@each_unsafe
@on_loop
async def test_an_unsafe_main_request_is_neither_refused_nor_touched(unsafe: Unsafe) -> None:
    body = unsafe.body
    if unsafe.code == "explicit_conflict":
        body = b'{"id_slot":3}'  # the compactor's slot, modulo
    async with stub_upstream(slots=unsafe.slots) as stub, running_proxy(settings_of(unsafe, stub)) as running:
        response = await running.fetch(body=body)
        assert response.status == 200
        assert response.get(b"X-Slotpin-Reason") == unsafe.code.encode()
        assert response.get(b"X-Slotpin-Warning") is not None
        assert stub.requests[0].body == body
        # Nor does it leave a ticket.
        assert_refused(await running.fetch(SIDE), unsafe.status, unsafe.code)


@on_loop
async def test_no_binding() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        assert_refused(await running.fetch(SIDE), 503, "no_binding")
        assert stub.requests == []


@on_loop
async def test_topology_changed() -> None:
    async with stub_upstream(slots=3) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch()
        stub.slots = answer(b'[{"id":0},{"id":1}]')
        running.proxy.state.probe.forget(running.proxy.state.running.probe_target)
        assert_refused(await running.fetch(SIDE), 503, "topology_changed")
        await running.fetch()
        assert (await running.fetch(SIDE)).get(b"X-Slotpin-Reason") == b"pinned"


@on_loop
async def test_ambiguous_overlap() -> None:
    """Two main requests that are possible, one of them on a slot of its own that the topology has since lost."""

    async def script(connection: Connection, got: Request) -> None:
        if b'"hang"' in got.body:
            await connection.gone()
        else:
            await connection.send(answer())

    async with stub_upstream(script, slots=3) as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, b'{"hang":1,"id_slot":2}'))
        await until(lambda: bool(stub.requests), "the first main request is with the server")
        stub.slots = answer(b'[{"id":0},{"id":1}]')
        running.proxy.state.probe.forget(running.proxy.state.running.probe_target)
        await running.fetch(headers=[b"X-Session-Affinity: other"])
        assert_refused(await running.fetch(SIDE), 503, "ambiguous_overlap")
        client.leave()
        await running.until_outcome("client_left")
        assert (await running.fetch(SIDE)).status == 200


@on_loop
async def test_refusals_keep_the_connection() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for _ in range(3):
            await client.send(request("POST", SIDE, b'{"a":1}'))
            assert (await client.read_response()).status == 503
        await client.send(request("POST", CHAT, b"{}"))
        assert (await client.read_response()).status == 200
        await client.close()


PI_SUMMARY = b'{"messages":[{"role":"system","content":"You are a context summarization assistant. Do."}]}'


@pytest.mark.parametrize("custom", [False, True])
@on_loop
async def test_what_its_client_can_not_do_without_passes(custom: bool) -> None:
    """Pi's own /compact: before any turn on the compactor's slot, with a warning."""
    rule = {"name": "mine", "model": "small", "onUnsafe": "pass"}
    body = b'{"model":"small","messages":[]}' if custom else PI_SUMMARY
    async with stub_upstream() as stub, running_proxy(settings_for(stub, recognisers={"custom": [rule]})) as running:
        response = await running.fetch(body=body)
        assert response.status == 200
        assert response.get(b"X-Slotpin-Role") == b"compactor"
        assert response.get(b"X-Slotpin-Reason") == b"no_binding"
        assert (response.get(b"X-Slotpin-Warning") or b"").startswith(b"no_binding")
        assert stub.requests[0].body == b'{"id_slot":1,"cache_prompt":true,' + body[1:]
        # The same by path or header is refused.
        assert_refused(await running.fetch(SIDE, body), 503, "no_binding")
        assert_refused(await running.fetch(CHAT, body, [b"X-Slotpin-Role: compactor"]), 503, "no_binding")
        # And pinned without a warning, once it can be.
        await running.fetch()
        response = await running.fetch(body=body)
        assert (response.get(b"X-Slotpin-Slot"), response.get(b"X-Slotpin-Reason")) == (b"1", b"pinned")


PASS, REFUSE = b"X-Slotpin-On-Unsafe: pass", b"X-Slotpin-On-Unsafe: Refuse"


@pytest.mark.parametrize(
    ("target", "body", "headers", "passes"),
    [
        (SIDE, b"{}", [PASS], True),
        (SIDE, b"{}", [REFUSE], False),
        (CHAT, b"{}", [b"X-Slotpin-Role: compactor", PASS], True),
        (CHAT, PI_SUMMARY, [], True),
        (CHAT, PI_SUMMARY, [REFUSE], False),
        (CHAT, PI_SUMMARY, [b"X-Slotpin-On-Unsafe:"], True),
    ],
)
@on_loop
async def test_the_client_says_whether_it_can_go_on_without(
    target: str, body: bytes, headers: list[bytes], passes: bool
) -> None:
    async with stub_upstream(slots=1) as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch(target, body, headers)
        if not passes:
            assert_refused(response, 409, "too_few_slots")
            return
        assert (response.status, response.get(b"X-Slotpin-Reason")) == (200, b"too_few_slots")
        assert (response.get(b"X-Slotpin-Warning") or b"").startswith(b"too_few_slots")
        assert stub.requests[-1].body == body


@on_loop
async def test_path_wins_over_header_and_header_over_recogniser() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for target, header, role in (
            ("/main/v1/chat/completions", b"compactor", b"main"),
            (SIDE, b"main", b"compactor"),
            (CHAT, b"main", b"main"),
        ):
            response = await running.fetch(target, PI_SUMMARY, [b"X-Slotpin-Role: " + header])
            assert response.get(b"X-Slotpin-Role") == role
        events = running.logged("exchange")
        assert [event["found_by"] for event in events] == ["path", "path", "header"]
        await running.fetch(body=PI_SUMMARY)
        assert running.logged("exchange")[-1]["found_by"] == "pi-summary"


# Two servers


def secrets(got: Request) -> bytes:
    return b"\n".join(value for name, value in got.headers if name.lower() != b"host")


MAIN_KEY = [b"Authorization: Bearer main-key", b"X-Api-Key: main-key"]


@pytest.mark.parametrize("enabled", [False, "auto", True])
@on_loop
async def test_each_role_has_its_own_server(enabled: bool | str) -> None:
    async with (
        stub_upstream() as main,
        stub_upstream() as side,
        running_proxy(settings_for(main, enabled, side)) as running,
    ):
        for path in ("/v1/chat/completions", "/completion", "/v1/models", "/health"):
            await running.fetch(path, b'{"id_slot":null}', MAIN_KEY)
            assert len(main.requests) == 1 and side.requests == []
            got = main.requests.pop()
            assert got.target == path.encode()
            assert got.get_all(b"authorization") == [b"Bearer main-key"]
            response = await running.fetch(f"/compactor{path}", b'{"id_slot":null}')
            assert main.requests == []
            (got,) = side.requests
            side.requests.clear()
            assert (got.target, got.body) == (path.encode(), b'{"id_slot":null}')
            if path in ("/v1/chat/completions", "/completion"):
                reason = b"disabled" if enabled is False else b"endpoints_differ"
                assert response.get(b"X-Slotpin-Reason") == reason
        assert main.probes == side.probes == []


@pytest.mark.parametrize("enabled", [False, "auto", True])
@pytest.mark.parametrize("target", [CHAT, "/v1/models"])
@on_loop
async def test_mains_key_does_not_go_to_the_other_server(target: str, enabled: bool | str) -> None:
    """Its client gave that key to main's URL; that the request goes elsewhere is slotpin's doing."""
    async with (
        stub_upstream() as main,
        stub_upstream() as side,
        running_proxy(settings_for(main, enabled, side)) as running,
    ):
        await running.fetch(target, b"{}", [b"X-Slotpin-Role: compactor", *MAIN_KEY])
        (got,) = side.requests
        assert b"main-key" not in secrets(got)
        assert got.get_all(b"authorization") == [b"Bearer compactor-key"]
        assert main.requests == []


@on_loop
async def test_the_same_for_a_recogniser() -> None:
    async with (
        stub_upstream() as main,
        stub_upstream() as side,
        running_proxy(settings_for(main, "auto", side)) as running,
    ):
        response = await running.fetch(body=PI_SUMMARY, headers=MAIN_KEY)
        (got,) = side.requests
        assert got.body == PI_SUMMARY
        assert b"main-key" not in secrets(got)
        assert got.get_all(b"authorization") == [b"Bearer compactor-key"]
        assert response.get(b"X-Slotpin-Reason") == b"endpoints_differ"


@on_loop
async def test_a_key_that_came_with_the_compactors_path_is_kept() -> None:
    async with (
        stub_upstream() as main,
        stub_upstream() as side,
        running_proxy(settings_for(main, "auto", side)) as running,
    ):
        await running.fetch(SIDE, headers=[b"Authorization: Bearer own-key"])
        assert side.requests[0].get_all(b"authorization") == [b"Bearer own-key"]


@on_loop
async def test_one_server_keeps_the_clients_key() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(headers=MAIN_KEY)
        await running.fetch(CHAT, b"{}", [b"X-Slotpin-Role: compactor", *MAIN_KEY])
        assert [got.get_all(b"authorization") for got in stub.requests] == [[b"Bearer main-key"]] * 2
        assert stub.probes[0].get_all(b"authorization") == [b"Bearer compactor-key"]


# The log


@on_loop
async def test_one_event_for_each_decision() -> None:
    async with stub_upstream(slots=3) as stub, running_proxy(settings_for(stub)) as running:
        responses = [
            await running.fetch(),
            await running.fetch(SIDE),
            await running.fetch(body=b'{"id_slot":5}'),
            await running.fetch(SIDE, b'{"id_slot":-1}'),
            await running.fetch(body=b"[]"),
            await running.fetch("/v1/models", None),
        ]
        expected = [
            ("main", "default", "pin", 0, 3, "pinned"),
            ("compactor", "path", "pin", 1, 3, "pinned"),
            ("main", "default", "leave", 2, 3, "explicit"),
            ("compactor", "path", "refuse", None, 3, "explicit_unpredictable"),
            ("main", "default", "leave", None, None, "not_json_object"),
        ]
        fields = ("role", "found_by", "action", "slot", "slots", "reason")
        events = running.logged("exchange")
        assert [tuple(event.get(name) for name in fields) for event in events] == expected
        assert {event["generation"] for event in events} == {1}
        ids = [event["request"] for event in events]
        assert len(set(ids)) == len(ids)
        assert [response.get(b"X-Slotpin-Request") for response in responses[:-1]] == [id_.encode() for id_ in ids]
        assert [event["request"] for event in running.logged("exchange")] == ids


@on_loop
async def test_neither_prompt_nor_key_is_logged_or_shown() -> None:
    rule = {"name": "mine", "apiKey": "rule-key"}
    prompt = b'{"messages":[{"role":"user","content":"PROMPT-TEXT"}],"id_slot":-1}'
    async with stub_upstream() as stub, running_proxy(settings_for(stub, recognisers={"custom": [rule]})) as running:
        for target in (CHAT, SIDE, "/tokenize?secret=PROMPT-TEXT"):
            await running.fetch(target, prompt, [b"Authorization: Bearer main-key", b"X-Session-Affinity: SESSION"])
        shown = json.dumps(await running.status())
        logged = repr(running.events)
        for secret in ("PROMPT-TEXT", "main-key", "compactor-key", "rule-key"):
            assert secret not in shown + logged


@on_loop
async def test_a_cause_is_warned_of_once() -> None:
    async with stub_upstream(slots=1) as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(20):
            await running.fetch()
            await running.fetch(SIDE)
        (warning,) = running.logged("warning")
        assert (warning["level"], warning["cause"]) == ("warning", "too_few_slots")
        assert "--parallel 2" in warning["message"]
        (shown,) = (await running.status())["warnings"]
        assert (shown["cause"], shown["count"]) == ("too_few_slots", 40)
        await running.fetch(body=b'{"cache_prompt":false}')
        assert [event["cause"] for event in running.logged("warning")] == ["too_few_slots", "cache_prompt_off"]


def test_a_cause_is_warned_of_again_after_a_minute() -> None:
    clock = Clock()
    log, events = capturing_log()
    warner = Warner(log, clock)
    for clock.now in (0.0, 1.0, 59.9):
        warner.warn("a", "text", request="r")
        warner.warn("b", "other")
    assert [event["cause"] for event in events] == ["a", "b"]
    assert warner.recent()["a"].count == 3
    for clock.now in (60.1, 61.0, 119.0):
        warner.warn("a", "text")
    assert [event["cause"] for event in events] == ["a", "b", "a"]
    clock.now = 200.0
    assert warner.recent() == {}


@on_loop
async def test_concurrent_requests_share_a_probe() -> None:
    async def script(connection: Connection, got: Request) -> None:
        if got.target == b"/slots":
            await asyncio.sleep(0.1)
            await connection.send(answer(b'[{"id":0},{"id":1}]'))
        else:
            await connection.send(answer())

    async with stub_upstream(script, slots=None) as stub, running_proxy(settings_for(stub)) as running:
        responses = await asyncio.gather(*(running.fetch() for _ in range(20)))
        assert {response.get(b"X-Slotpin-Slot") for response in responses} == {b"0"}
        assert [got.target for got in stub.requests].count(b"/slots") == 1


@on_loop
async def test_a_server_whose_slots_hang_costs_one_wait() -> None:
    """And main goes on without a pin."""

    async def script(connection: Connection, got: Request) -> None:
        if got.target == b"/slots":
            await connection.gone()
        else:
            await connection.send(answer())

    async with stub_upstream(script, slots=None) as stub, running_proxy(settings_for(stub)) as running:
        state: Any = running.proxy.state
        await state.probe.close()
        state.probe = Probe(state.clock, seconds=0.3)
        responses = await asyncio.gather(*(running.fetch() for _ in range(10)), running.fetch(SIDE))
        assert {response.get(b"X-Slotpin-Reason") for response in responses} == {b"probe_failed"}
        assert [response.status for response in responses] == [200] * 10 + [503]
        assert [got.target for got in stub.requests].count(b"/slots") == 1
