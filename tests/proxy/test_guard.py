"""Who is served: the host that a request is for, and the key that it brings."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest

from slotpin.config import Listen
from slotpin.proxy.guard import Guard
from slotpin.proxy.headers import RequestHead
from tests.support.proxy import Running, on_loop, request, running_proxy, settings_for
from tests.support.stub_upstream import Stub, stub_upstream

CHAT = "/v1/chat/completions"
KEYS = {"apiKeys": ["sk-one", "sk-two"]}


# The host


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"LOCALHOST:8484",
        b"localhost.",
        b"slotpin.localhost:1",
        b"127.0.0.1:8484",
        b"127.1.2.3",
        b"[::1]:8484",
        b"[::1]",
        b"192.168.1.7:8484",
        b"host.docker.internal:8484",
        b"",
    ],
)
@on_loop
async def test_a_name_of_this_machine_is_served(host: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for _ in range(2):
            assert (await running.fetch(host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:8484",
        b"localhost.evil.example",
        b"evillocalhost",
        b"127.0.0.1.evil.example",
        b"evil.example@localhost",
        b"localhost:80@evil.example",
        b"localhost/evil.example",
        b"[::1].evil.example",
        b"[evil.example]",
        b"2130706433.evil.example",
        b"localhost, evil.example",
        b"\xff",
    ],
)
@on_loop
async def test_another_name_is_not_served_on_loopback(host: bytes) -> None:
    """A web page whose name was made to lead to 127.0.0.1 sends this name."""
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        for target in (CHAT, "/v1/models", "/slotpin/status"):
            response = await running.fetch(target, host=host)
            assert (response.status, response.error["code"]) == (403, "host_not_allowed")
            assert "listen.allowedHosts" in response.error["message"]
        assert stub.accepts == 0


@on_loop
async def test_names_that_are_allowed() -> None:
    async with stub_upstream() as stub:
        listen = {"allowedHosts": ["Box.example", ".lan"]}
        async with running_proxy(settings_for(stub, listen=listen)) as running:
            for host in (b"box.example", b"BOX.example.:80", b"lan", b"a.b.lan", b"localhost"):
                assert (await running.fetch(host=host)).status == 200
            for host in (b"a.box.example", b"evillan", b"evil.example"):
                assert (await running.fetch(host=host)).status == 403
            # Also without a restart.
            running.proxy.state.apply(settings_for(stub, listen={"allowedHosts": ["*"]}))
            assert (await running.fetch(host=b"evil.example")).status == 200
            running.proxy.state.apply(settings_for(stub))
            assert (await running.fetch(host=b"box.example")).status == 403


@on_loop
async def test_the_host_is_not_looked_at_where_others_can_connect_anyway() -> None:
    head = RequestHead("GET", b"/", [(b"Host", b"box.example")], False, True)
    assert Guard(Listen(host="0.0.0.0"), on_loopback=False).refusal(head) is None
    assert Guard(Listen(host="0.0.0.0", allowed_hosts=("other.example",)), on_loopback=False).refusal(head) is not None
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        # The address of the start counts, not that of a file which asks for a restart.
        running.proxy.state.apply(settings_for(stub, listen={"host": "0.0.0.0"}))
        assert (await running.fetch(host=b"box.example")).status == 403


def test_no_number_of_names_grows_the_memory() -> None:
    guard = Guard(Listen(), on_loopback=True)
    for number in range(10_000):
        head = RequestHead("GET", b"/", [(b"Host", b"%d.localhost" % number)], False, True)
        assert guard.refusal(head) is None
    assert len(guard._allowed) < 100


# The key


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b"Authorization: Bearer sk-three"],
        [b"Authorization: Bearer sk-on"],
        [b"Authorization: Bearer sk-one,sk-two"],
        [b"Authorization: Bearer "],
        [b"Authorization: sk-one"],
        [b"Authorization: Basic sk-one"],
        [b"x-api-key: sk-three"],
        [b"x-api-key: "],
        [b"Cookie: sk-one"],
        [b"Authorization: Bearer \xff"],
    ],
)
@pytest.mark.parametrize("enabled", [False, "auto"])
@on_loop
async def test_without_a_key_nothing_is_served(enabled: bool | str, headers: list[bytes]) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, enabled, listen=KEYS)) as running:
        for target in (CHAT, "/compactor/v1/models", "/", "/slotpin/status", "/slotpin/forget", "/slotpin/x"):
            response = await running.fetch(target, headers=headers)
            assert (response.status, response.phrase) == (401, b"Unauthorized")
            assert response.get(b"WWW-Authenticate") == b"Bearer"
            assert response.get(b"Content-Type") == b"application/json"
            assert response.error["message"].startswith("slotpin: ")
            assert response.error["code"] == "invalid_api_key"
            assert b"sk-" not in response.body
        assert stub.accepts == 0


@on_loop
async def test_health_and_preflight_need_no_key() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=KEYS)) as running:
        for host in (b"localhost", b"balancer.example"):
            for path in ("/slotpin/health", "/health"):
                assert (await running.fetch(path, None, host=host)).status == 200
            assert (await running.fetch("/health", b"{}", host=host)).status in (401, 403)  # a POST asks for no health
        preflight = [b"Origin: http://localhost:3000", b"Access-Control-Request-Method: POST"]
        assert (await running.fetch(CHAT, None, preflight, "OPTIONS")).status == 200


GOOD = [b"Authorization: Bearer sk-two"], [b"authorization: bearer  sk-one"], [b"X-Api-Key: sk-one"]


@pytest.mark.parametrize("headers", GOOD)
@on_loop
async def test_any_of_the_keys_is_enough_and_stays_here(headers: list[bytes]) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=KEYS)) as running:
        for target in (CHAT, "/v1/models", "/main/v1/models", "/compactor/v1/models"):
            assert (await running.fetch(target, headers=headers)).status == 200
            # One server: its key is known from the compactor's.
            assert stub.requests[-1].get_all(b"authorization") == [b"Bearer compactor-key"]
        assert (await running.fetch("/slotpin/status", None, headers)).status == 200
        await nothing_has_a_key_of_ours(stub, running, headers)


async def nothing_has_a_key_of_ours(stub: Stub, running: Running, headers: list[bytes]) -> None:
    for got in (*stub.requests, *stub.probes):
        assert b"sk-one" not in got.head
        assert b"sk-two" not in got.head
    shown = (await running.fetch("/slotpin/status", None, headers)).body.decode()
    assert "sk-" not in json.dumps(running.events, default=str) + shown


@on_loop
async def test_the_servers_own_key_takes_its_place() -> None:
    for listen in ({}, KEYS):
        sent = [b"Authorization: Bearer sk-one", b"x-api-key: sk-two"]
        async with stub_upstream() as stub, stub_upstream() as other:
            own = settings_for(stub, listen=listen, main={"apiKey": "main-key"})
            async with running_proxy(own) as running:
                assert (await running.fetch(headers=sent)).status == 200
                assert (await running.fetch("/tokenize", headers=sent)).status == 200
                for got in stub.requests:
                    assert got.get_all(b"authorization") == [b"Bearer main-key"]
                    assert got.get_all(b"x-api-key") == []
            two = settings_for(stub, compactor=other, listen=listen, main={"apiKey": "main-key"})
            async with running_proxy(two) as running:
                await running.fetch(headers=[*sent, b"X-Slotpin-Role: compactor"])
                assert other.requests[-1].get_all(b"authorization") == [b"Bearer compactor-key"]
                await running.fetch("/compactor/v1/models", headers=sent)
                by_path = other.requests[-1]
                # Whoever names the path may have a key for it; slotpin's own is none.
                assert by_path.get_all(b"authorization") == [b"Bearer compactor-key" if listen else sent[0][15:]]
                assert by_path.get_all(b"x-api-key") == ([] if listen else [b"sk-two"])


@on_loop
async def test_no_key_for_the_server_means_none() -> None:
    async with (
        stub_upstream() as stub,
        stub_upstream() as other,
        running_proxy(settings_for(stub, compactor=other, listen=KEYS)) as running,
    ):
        await running.fetch(headers=[b"Authorization: Bearer sk-one"])
        assert stub.requests[-1].get_all(b"authorization") == []


@on_loop
async def test_a_refused_upload_is_not_read() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=KEYS)) as running:
        client = await running.client()
        await client.send(request("POST", CHAT, None, [b"Content-Length: 100000000", b"Expect: 100-continue"]))
        response = await client.read_response()
        assert response.status == 401
        assert response.get(b"Connection") == b"close"
        client.leave()


@on_loop
async def test_keys_are_changed_without_a_restart() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        client = await running.client()
        for listen, status in (({}, 200), (KEYS, 401), ({"apiKeys": ["sk-three"]}, 200), ({}, 200)):
            running.proxy.state.apply(settings_for(stub, listen=listen))
            await client.send(request("POST", CHAT, b"{}", [b"Authorization: Bearer sk-three"]))
            assert (await client.read_response()).status == status
        await client.close()


# The page, for which a browser asks for a name and a password


def basic(text: bytes) -> list[bytes]:
    return [b"Authorization: Basic " + b64encode(text)]


@on_loop
async def test_the_page_takes_a_key_as_a_password() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=KEYS)) as running:
        asked = await running.fetch("/slotpin/", None)
        assert asked.status == 401
        assert (asked.get(b"WWW-Authenticate") or b"").startswith(b"Basic realm=")
        for right in (b"me:sk-one", b":sk-two"):
            assert (await running.fetch("/slotpin/", None, basic(right))).status == 200
        for wrong in (b"sk-one:", b"me:sk-three", b"sk-one", b"", b"\xff"):
            assert (await running.fetch("/slotpin/", None, basic(wrong))).status == 401
        assert (await running.fetch("/slotpin/", None, [b"Authorization: Basic !"])).status == 401


@on_loop
async def test_a_password_opens_nothing_else() -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub, listen=KEYS)) as running:
        right = basic(b"me:sk-one")
        for target, body in ((CHAT, b"{}"), ("/slotpin/status", None), ("/v1/models", None), ("/slotpin/forget", b"")):
            refused = await running.fetch(target, body, right)
            assert refused.status == 401
            assert refused.get(b"WWW-Authenticate") == b"Bearer"
        assert stub.requests == []
