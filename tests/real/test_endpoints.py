"""Every route that generates in a slot, streamed and not, on two slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.real.client import Answer, fetch
from tests.real.prompts import chat
from tests.real.servers import Llama, Slotpin, slotpin


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    body: dict[str, Any]
    text: str
    """Where a whole answer has its text, dotted."""
    end: str
    """What the last event of a stream has in it."""


_COMPLETION = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
_NATIVE = {"prompt": "hello", "n_predict": 4, "temperature": 0}
_INFILL = {"input_prefix": "one", "input_suffix": "two", "n_predict": 4, "temperature": 0}
_RESPONSES = {"input": "hello", "max_output_tokens": 4, "temperature": 0}

ROUTES = [
    Route("/v1/chat/completions", chat(), "choices.0.message.content", "[DONE]"),
    Route("/chat/completions", chat(), "choices.0.message.content", "[DONE]"),
    Route("/v1/completions", _COMPLETION, "choices.0.text", "[DONE]"),
    Route("/completions", _NATIVE, "content", "'stop': True"),
    Route("/completion", _NATIVE, "content", "'stop': True"),
    Route("/infill", _INFILL, "content", "'stop': True"),
    Route("/v1/responses", _RESPONSES, "output.0.content.0.text", "response.completed"),
    Route("/responses", _RESPONSES, "output.0.content.0.text", "response.completed"),
]
MESSAGES = Route("/v1/messages", chat(), "content.0.text", "message_stop")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, two_slots: Llama) -> Iterator[Slotpin]:
    with slotpin(tmp_path_factory.mktemp("slotpin"), two_slots.url) as running:
        yield running


def text_of(answer: Answer, route: Route) -> str:
    found = answer.json
    for step in route.text.split("."):
        found = found[int(step)] if step.isdigit() else found[step]
    assert isinstance(found, str)
    return found


def assert_complete(answer: Answer, route: Route, stream: bool) -> None:
    assert answer.status == 200, answer
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(answer.events) > 1
        assert route.end in str(answer.events[-1])
    else:
        assert text_of(answer, route).count(" ") == 4  # each of the tiny model's tokens is a space and a word


# The routes take turns in one conversation, which has the main slot.
ONE_SESSION = {"X_Slotpin_Session": "one"}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_main_runs_on_slot_0_and_the_compactor_on_slot_1(
    shared: Slotpin, two_slots: Llama, route: Route, stream: bool
) -> None:
    for prefix, role, slot in (("", "main", 0), ("/main", "main", 0), ("/compactor", "compactor", 1)):
        before = len(two_slots.selections)
        answer = shared.post(prefix + route.path, route.body | {"stream": stream}, **ONE_SESSION)
        assert_complete(answer, route, stream)
        assert (answer.role, answer.slot, answer.reason, answer.warning) == (role, slot, "pinned", "")
        # llama-server's own view
        assert two_slots.last_slot == slot
        assert two_slots.chosen_since(before) == [(slot, "id")]
        # the message end was found
        assert shared.outcome(answer.request) == "completed"
        assert shared.bindings == (0, 1)


@STREAM
def test_no_slot_is_claimed_for_messages(shared: Slotpin, two_slots: Llama, stream: bool) -> None:
    """llama-server converts a body for /v1/messages and leaves id_slot behind: it takes the slot that it likes."""
    before = len(two_slots.selections)
    answer = shared.post("/v1/messages", MESSAGES.body | {"stream": stream})
    assert_complete(answer, MESSAGES, stream)
    assert (answer.role, answer.slot, answer.reason) == ("main", None, "route_ignores_slot")
    assert [by for _, by in two_slots.chosen_since(before)] != ["id"]
    assert shared.outcome(answer.request) == "completed"


def test_a_compactor_request_to_messages_is_refused(shared: Slotpin, two_slots: Llama) -> None:
    """Isolation can't be had on this route, and the main slot would be the likeliest."""
    prompt = chat("one two three four five six seven eight nine ten")
    shared.post("/v1/chat/completions", prompt)
    before = len(two_slots.selections)
    answer = shared.post("/compactor/v1/messages", prompt)
    assert (answer.status, answer.reason) == (409, "route_ignores_slot")
    assert len(two_slots.selections) == before


@pytest.mark.parametrize("path", ["/main/chat/completions", "/compactor/chat/completions"])
def test_a_role_without_v1(shared: Slotpin, path: str) -> None:
    shared.post("/v1/chat/completions", chat())
    answer = shared.post(path, chat())
    assert (answer.status, answer.role) == (200, path.split("/")[1])


def test_a_role_by_header(shared: Slotpin) -> None:
    shared.post("/v1/chat/completions", chat())
    answer = shared.post("/v1/chat/completions", chat(), X_Slotpin_Role="compactor")
    assert (answer.status, answer.role, answer.slot) == (200, "compactor", 1)
    assert shared.decision(answer.request)["found_by"] == "header"


def test_a_recognised_summary(shared: Slotpin) -> None:
    shared.post("/v1/chat/completions", chat())
    system = {"role": "system", "content": "You are a context summarization assistant. Read on."}
    body = chat() | {"messages": [system, {"role": "user", "content": "text"}]}
    answer = shared.post("/v1/chat/completions", body)
    assert (answer.status, answer.role, answer.slot) == (200, "compactor", 1)
    assert shared.decision(answer.request)["found_by"] == "pi-summary"


def test_an_error_of_the_server_comes_through_and_drops_the_binding(shared: Slotpin, two_slots: Llama) -> None:
    shared.post("/v1/chat/completions", chat(), **ONE_SESSION)
    body = chat("many words " * 40_000)
    answer = shared.post("/v1/chat/completions", body, **ONE_SESSION)
    direct = fetch(f"{two_slots.url}/v1/chat/completions", body)
    assert (answer.status, answer.body) == (direct.status, direct.body)
    assert answer.status == 400
    assert answer.error["type"] == "exceed_context_size_error"
    assert shared.bindings[0] == 0
    assert shared.post("/compactor/v1/chat/completions", chat(), **ONE_SESSION).error["code"] == "no_binding"


@pytest.mark.parametrize("path", ["/health", "/props", "/v1/models", "/models", "/no/such/route", "/lora-adapters"])
def test_other_routes_answer_as_the_server_does(shared: Slotpin, two_slots: Llama, path: str) -> None:
    through, direct = fetch(shared.url + path), fetch(two_slots.url + path)
    assert through.status == direct.status
    unlike = dict.fromkeys(("connection", "keep-alive", "date"), "")
    assert {**through.headers, **unlike} == {**direct.headers, **unlike}
    if path not in ("/v1/models", "/models"):  # those have the time in them
        assert through.body == direct.body
    for role in ("main", "compactor"):
        assert fetch(f"{shared.url}/{role}{path}").status == direct.status


def test_tokenize_is_not_touched(shared: Slotpin, two_slots: Llama) -> None:
    before = len(two_slots.selections)
    answer = shared.post("/tokenize", {"content": "hello"})
    assert answer.json == fetch(f"{two_slots.url}/tokenize", {"content": "hello"}).json
    assert answer.role is None
    assert len(two_slots.selections) == before
