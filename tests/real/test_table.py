"""The decision table on the real server: status, headers, body and log line of every row."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slotpin.llama.launch import free_port
from tests.real.client import Answer, OpenRequest, fetch
from tests.real.prompts import chat
from tests.real.servers import Llama, Slotpin, llama, slotpin, write_config
from tests.support.llama import HOST
from tests.support.processes import wait_until

MAIN = "/v1/chat/completions"
COMPACTOR = "/compactor/v1/chat/completions"
LONG = 20_000
"""Tokens of an answer that doesn't end while a test looks at it."""

PERMANENT = {"too_few_slots", "ids_collide", "explicit_conflict", "explicit_unpredictable"}
# Pi takes an error with one of these words for one that may pass, and tries again.
RETRIED = (
    "timeout",
    "timed out",
    "overloaded",
    "rate limit",
    "network error",
    "connection",
    "server error",
    "503",
    "500",
)


@pytest.fixture(scope="module")
def one() -> Iterator[Llama]:
    with llama("--parallel", "1") as server:
        yield server


@pytest.fixture(scope="module")
def two() -> Iterator[Llama]:
    with llama("--parallel", "2") as server:
        yield server


@pytest.fixture(scope="module")
def three() -> Iterator[Llama]:
    with llama("--parallel", "3") as server:
        yield server


@dataclass(frozen=True, slots=True)
class Row:
    """What is expected of a decision. `slot` None: the server chooses."""

    action: str
    reason: str
    slot: int | None = None
    warning: str | None = None
    """Part of X-Slotpin-Warning; None for no such header."""


def check(proxy: Slotpin, answer: Answer, role: str, row: Row, slots: int | None) -> None:
    """The answer's status, headers and body, and the log's line are those of `row`."""
    assert (answer.role, answer.reason, answer.slot) == (role, row.reason, row.slot), answer
    if row.warning is None:
        assert answer.warning == ""
    else:
        assert row.warning in answer.warning
    event = proxy.decision(answer.request)
    shown = {key: event.get(key) for key in ("role", "action", "slot", "slots", "reason", "level")}
    expected = {"role": role, "action": row.action, "slot": row.slot, "slots": slots, "reason": row.reason}
    assert shown == expected | {"level": "info"}
    assert event["found_by"] == ("path" if role == "compactor" else "default")
    assert isinstance(event["generation"], int)
    if row.action != "refuse":
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"].count(" ") == 4
        assert proxy.outcome(answer.request) == "completed"
        return
    assert proxy.outcome(answer.request) == "refused"
    assert answer.status == (409 if row.reason in PERMANENT else 503)
    assert ("retry-after" in answer.headers) == (answer.status == 503)
    assert answer.error["code"] == row.reason
    assert answer.error["message"].startswith("slotpin: ")
    assert not [word for word in RETRIED if word in answer.error["message"].lower()]
    if row.warning is not None:
        warned = proxy.program.events("warning", cause=row.reason)[0]
        assert row.warning in f"{row.reason}: {warned['message']}"


@dataclass(frozen=True, slots=True)
class Case:
    """A main request and then a compactor request, under these settings."""

    name: str
    settings: dict[str, Any]
    main: Row
    compactor: Row
    ran_on: tuple[int, ...] | None = None
    """The slots that the server chose by an id, in order; None where it was free to choose."""
    main_id: object = ...
    """id_slot in the main request's body."""
    compactor_id: object = ...


IDS_02: dict[str, Any] = {"mainIdSlot": 0, "compactorIdSlot": 2}
PINNED_0 = Row("pin", "pinned", 0)

TOO_FEW = "fewer than two slots; start it with --parallel 2 or more"
ONE = [
    Case(
        "one slot", {}, Row("leave", "too_few_slots", warning=TOO_FEW), Row("refuse", "too_few_slots", warning=TOO_FEW)
    ),
]

COLLIDE = "ids_collide: mainIdSlot and compactorIdSlot are the same slot on this server"
CONFLICT = "explicit_conflict: the client's own id_slot"
UNPREDICTABLE = "explicit_unpredictable: the client's own id_slot"
UNPREDICTABLE_IDS: tuple[object, ...] = (-1, -2, "0", 0.5, True, {}, [], 2**31)
TWO = [
    Case("two slots", {}, PINNED_0, Row("pin", "pinned", 1), (0, 1)),
    Case(
        "main 1, compactor 0",
        {"mainIdSlot": 1, "compactorIdSlot": 0},
        Row("pin", "pinned", 1),
        Row("pin", "pinned", 0),
        (1, 0),
    ),
    Case(
        "ids 0 and 2 collide",
        IDS_02,
        Row("leave", "ids_collide", warning=COLLIDE),
        Row("refuse", "ids_collide", warning=COLLIDE),
    ),
    Case("null is no id", {}, PINNED_0, Row("pin", "pinned", 1), (0, 1), main_id=None, compactor_id=None),
    Case(
        "an id on the compactor slot",
        {},
        Row("leave", "explicit_conflict", 1, CONFLICT),
        Row("refuse", "explicit_conflict", warning=CONFLICT),
        (1,),
        main_id=1,
    ),
    Case("an id on the main slot", {}, Row("leave", "explicit", 0), Row("pin", "pinned", 1), (0, 1), main_id=2.0),
    Case(
        "the compactor's id on the main slot",
        {},
        PINNED_0,
        Row("refuse", "explicit_conflict", warning=CONFLICT),
        (0,),
        compactor_id=4,
    ),
    Case("the compactor's own id", {}, PINNED_0, Row("leave", "explicit", 1), (0, 1), compactor_id=3),
    Case("enabled: true", {"enabled": True}, Row("pin", "vouched", 0), Row("pin", "vouched", 1), (0, 1)),
    Case(
        "enabled: true, equal ids",
        {"enabled": True, "mainIdSlot": 1},
        Row("pin", "vouched", 1, "ids_collide"),
        Row("pin", "vouched", 1, "ids_collide"),
        (1, 1),
    ),
    Case(
        "enabled: true, main's id on the compactor slot",
        {"enabled": True},
        Row("leave", "explicit", 1, CONFLICT),
        Row("pin", "vouched", 1),
        (1, 1),
        main_id=1,
    ),
    Case("enabled: false", {"enabled": False}, Row("leave", "disabled"), Row("leave", "disabled")),
    *(
        Case(
            f"main's id is {value!r}",
            {},
            Row("leave", "explicit_unpredictable", warning=UNPREDICTABLE),
            Row("refuse", "explicit_unpredictable", warning=UNPREDICTABLE),
            main_id=value,
        )
        for value in UNPREDICTABLE_IDS
    ),
    Case(
        "the compactor's id is unpredictable",
        {},
        PINNED_0,
        Row("refuse", "explicit_unpredictable", warning=UNPREDICTABLE),
        (0,),
        compactor_id="1",
    ),
]

THREE = [
    Case("three slots", IDS_02, PINNED_0, Row("pin", "pinned", 2), (0, 2)),
    Case("ids wrap", {"mainIdSlot": 3, "compactorIdSlot": 5}, PINNED_0, Row("pin", "pinned", 2), (0, 2)),
    Case(
        "5 on three slots is the compactor's 2",
        IDS_02,
        Row("leave", "explicit_conflict", 2, CONFLICT),
        Row("refuse", "explicit_conflict", warning=CONFLICT),
        (2,),
        main_id=5,
    ),
    Case("main's id elsewhere", IDS_02, Row("leave", "explicit", 1), Row("pin", "pinned", 2), (1, 2), main_id=1),
    Case(
        "main's id elsewhere, wrapped", IDS_02, Row("leave", "explicit", 1), Row("pin", "pinned", 2), (1, 2), main_id=4
    ),
    Case("the compactor's id elsewhere", IDS_02, PINNED_0, Row("leave", "explicit", 1), (0, 1), compactor_id=1),
    Case(
        "the compactor's id where main's own id is",
        IDS_02,
        Row("leave", "explicit", 1),
        Row("refuse", "explicit_conflict", warning=CONFLICT),
        (1,),
        main_id=1,
        compactor_id=1,
    ),
]


def body(own_id: object) -> dict[str, Any]:
    return chat() if own_id is ... else chat(id_slot=own_id)


def walk(home: Path, server: Llama, case: Case, slots: int) -> None:
    known = None if "enabled" in case.settings else slots
    with slotpin(home, server.url, **case.settings) as proxy:
        before = len(server.selections)
        main = proxy.post(MAIN, body(case.main_id))
        check(proxy, main, "main", case.main, known)
        compactor = proxy.post(COMPACTOR, body(case.compactor_id))
        check(proxy, compactor, "compactor", case.compactor, known)
        ran = 1 + (case.compactor.action != "refuse")
        chosen = server.chosen_since(before, ran)
        assert len(chosen) == ran
        if case.ran_on is not None:
            assert chosen == [(slot, "id") for slot in case.ran_on]


def by_name(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@by_name(ONE)
def test_one_slot(tmp_path: Path, one: Llama, case: Case) -> None:
    walk(tmp_path, one, case, 1)


@by_name(TWO)
def test_two_slots(tmp_path: Path, two: Llama, case: Case) -> None:
    walk(tmp_path, two, case, 2)


@by_name(THREE)
def test_three_slots(tmp_path: Path, three: Llama, case: Case) -> None:
    walk(tmp_path, three, case, 3)


def test_no_main_request_before_the_compactor_s(tmp_path: Path, two: Llama) -> None:
    with slotpin(tmp_path, two.url) as proxy:
        before = two.selections
        refused = proxy.post(COMPACTOR, chat())
        check(proxy, refused, "compactor", Row("refuse", "no_binding", warning="no main request"), 2)
        assert two.selections == before
        proxy.post(MAIN, chat())
        for _ in range(3):  # one main request is the ticket of many compactor calls
            check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", 1), 2)


def test_a_summary_that_its_client_needs_passes_unpinned(tmp_path: Path, one: Llama) -> None:
    system = {"role": "system", "content": "You are a context summarization assistant. Read on."}
    with slotpin(tmp_path, one.url) as proxy:
        answer = proxy.post(MAIN, chat() | {"messages": [system, {"role": "user", "content": "text"}]})
        assert (answer.status, answer.role, answer.reason, answer.slot) == (200, "compactor", "too_few_slots", None)
        assert TOO_FEW in answer.warning
        assert proxy.decision(answer.request)["action"] == "leave"


def test_another_compactor_server(tmp_path: Path, one: Llama, two: Llama) -> None:
    """Nothing to keep apart: both untouched, each to its own server."""
    with slotpin(tmp_path, two.url, compactor=one.url) as proxy:
        on_one, on_two = len(one.selections), len(two.selections)
        check(proxy, proxy.post(MAIN, chat()), "main", Row("leave", "endpoints_differ"), None)
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("leave", "endpoints_differ"), None)
        wait_until(lambda: len(one.selections) > on_one and len(two.selections) > on_two, "each has run one")
        assert [by for _, by in one.selections[on_one:] + two.selections[on_two:]].count("id") == 0
        assert len(one.selections) + len(two.selections) == on_one + on_two + 2


def test_a_wrong_api_key(tmp_path: Path) -> None:
    client = {"Authorization": "Bearer sk-right"}
    with llama(api_key="sk-right") as server, slotpin(tmp_path, server.url, api_key="sk-wrong") as proxy:
        warning = "set compactor.apiKey to the server's --api-key"
        main = fetch(proxy.url + MAIN, chat(), client)
        check(proxy, main, "main", Row("leave", "probe_failed", warning=warning), None)
        compactor = fetch(proxy.url + COMPACTOR, chat(), client)
        check(proxy, compactor, "compactor", Row("refuse", "probe_failed", warning=warning), None)
        # Mended while it runs: the failure is not kept.
        write_config(tmp_path, server.url, api_key="sk-right")
        proxy.program.signal(signal.SIGHUP)
        wait_until(lambda: bool(proxy.program.events("config_reloaded")), "the configuration is read again")
        check(proxy, fetch(proxy.url + MAIN, chat(), client), "main", PINNED_0, 2)
        check(proxy, fetch(proxy.url + COMPACTOR, chat(), client), "compactor", Row("pin", "pinned", 1), 2)
        # The client's own key still counts, and slotpin's is not lent to it.
        assert fetch(proxy.url + MAIN, chat(), {"Authorization": "Bearer sk-wrong"}).status == 401
        assert fetch(proxy.url + MAIN, chat()).status == 401
        assert "sk-right" not in proxy.program.err + proxy.program.out
        assert "sk-wrong" not in proxy.program.err + proxy.program.out


def test_no_slots_endpoint(tmp_path: Path) -> None:
    with llama("--no-slots") as server, slotpin(tmp_path, server.url) as proxy:
        warning = "start llama-server with --slots"
        check(proxy, proxy.post(MAIN, chat()), "main", Row("leave", "probe_failed", warning=warning), None)
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("refuse", "probe_failed", warning=warning), None)


@pytest.mark.parametrize(
    ("settings", "slot", "reason"),
    [({}, 1, "topology_changed"), (IDS_02, 2, "ids_collide")],
    ids=["0 and 1", "0 and 2"],
)
def test_a_server_that_comes_back_with_fewer_slots(
    tmp_path: Path, settings: dict[str, Any], slot: int, reason: str
) -> None:
    """Asked at once: what was known of the slots must not outlive the server that said so."""
    port = free_port(HOST, 0)
    with slotpin(tmp_path, f"http://{HOST}:{port}", **settings) as proxy:
        with llama("--parallel", "3", port=port):
            check(proxy, proxy.post(MAIN, chat()), "main", PINNED_0, 3)
            check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", slot), 3)
        with llama("--parallel", "2", port=port) as server:
            refused = proxy.post(COMPACTOR, chat())
            check(proxy, refused, "compactor", Row("refuse", reason, warning=f"{reason}: "), 2)
            assert server.selections == []
            if reason == "topology_changed":  # the next main request is the way out
                check(proxy, proxy.post(MAIN, chat()), "main", PINNED_0, 2)
                check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", slot), 2)


def test_a_server_that_dies_under_way(tmp_path: Path) -> None:
    port = free_port(HOST, 0)
    with slotpin(tmp_path, f"http://{HOST}:{port}") as proxy:
        with llama("--parallel", "3", port=port) as server:
            request = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True))
            request.read_until(b"data: ")
            assert proxy.bindings == (1, 0)
            server.kill()
            received = request.read_to_end()
        # Broken off, not ended politely: no last chunk, no [DONE].
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
        assert proxy.outcome(request.header("x-slotpin-request")) == "upstream_broke"
        assert proxy.bindings == (0, 0)
        with llama("--parallel", "2", port=port):
            check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("refuse", "no_binding", warning="no main"), 2)


def test_a_configuration_that_changes_in_mid_generation(tmp_path: Path, three: Llama) -> None:
    with slotpin(tmp_path, three.url) as proxy:
        request = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True))
        request.read_until(b"data: ")
        write_config(tmp_path, three.url, **IDS_02)
        proxy.program.signal(signal.SIGHUP)
        wait_until(lambda: bool(proxy.program.events("config_reloaded", generation=2)), "the configuration is read")
        changed = Row("refuse", "settings_changed", warning="settings changed after the main request")
        refused = proxy.post(COMPACTOR, chat())
        check(proxy, refused, "compactor", changed, 3)
        assert proxy.decision(refused.request)["generation"] == 2
        # The answer under way goes on with the settings that it began with.
        assert [slot["id"] for slot in three.slots if slot["is_processing"]] == [0]
        request.close()
        assert proxy.decision(request.header("x-slotpin-request"))["generation"] == 1
        wait_until(lambda: proxy.bindings == (0, 0), "the main request is gone")
        # A turn that ended before the change is no ticket after it either.
        check(proxy, proxy.post(MAIN, chat()), "main", PINNED_0, 3)
        write_config(tmp_path, three.url, mainIdSlot=1, compactorIdSlot=2)
        proxy.program.signal(signal.SIGHUP)
        wait_until(lambda: bool(proxy.program.events("config_reloaded", generation=3)), "the configuration is read")
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", changed, 3)
        check(proxy, proxy.post(MAIN, chat()), "main", Row("pin", "pinned", 1), 3)
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", 2), 3)


def test_a_configuration_that_is_wrong_changes_nothing(tmp_path: Path, three: Llama) -> None:
    with slotpin(tmp_path, three.url) as proxy:
        check(proxy, proxy.post(MAIN, chat()), "main", PINNED_0, 3)
        write_config(tmp_path, three.url, compactorIdSlot=-1)  # found without a signal
        wait_until(lambda: bool(proxy.program.events("config_rejected")), "the configuration is rejected")
        (event,) = proxy.program.events("config_rejected")
        assert "compactorIdSlot: -1 is not allowed" in event["problem"]
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", 1), 3)


def test_main_requests_that_disagree(tmp_path: Path, three: Llama) -> None:
    with slotpin(tmp_path, three.url) as proxy:
        pinned = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True))
        pinned.read_until(b"data: ")
        conflicting = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True, id_slot=1))
        conflicting.read_until(b"data: ")
        refused = proxy.post(COMPACTOR, chat())
        check(proxy, refused, "compactor", Row("refuse", "ambiguous_overlap", warning="their slot decisions differ"), 3)
        conflicting.close()
        wait_until(lambda: proxy.bindings == (1, 0), "one of them is left")
        wait_until(lambda: not three.slots[1]["is_processing"], "llama-server has freed slot 1")
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", 1), 3)
        pinned.close()
        wait_until(lambda: proxy.bindings == (0, 0), "none is left")


def test_main_requests_that_agree(tmp_path: Path, three: Llama) -> None:
    """The second waits in the server for slot 0; both decisions are the same, so the compactor's slot is sure."""
    with slotpin(tmp_path, three.url) as proxy:
        first = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True))
        first.read_until(b"data: ")
        second = OpenRequest(proxy.url + MAIN, chat(tokens=LONG, stream=True))
        wait_until(lambda: proxy.bindings == (2, 0), "both are open")
        check(proxy, proxy.post(COMPACTOR, chat()), "compactor", Row("pin", "pinned", 1), 3)
        second.close()
        wait_until(lambda: proxy.bindings == (1, 0), "the one that waited has given up its place")
        first.close()
        wait_until(lambda: proxy.bindings == (0, 0) and three.idle, "llama-server is idle")
