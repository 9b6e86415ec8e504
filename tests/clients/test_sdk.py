"""The official `openai` and `anthropic` packages get the same objects through slotpin as directly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anthropic
import openai
import pytest

from tests.real.servers import Llama, Slotpin, llama, slotpin

FLAGS = ("--parallel", "2", "--kv-unified", "--no-cache-idle-slots")
MODEL = "any"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ASKED: list[Any] = MESSAGES[1:]
# What differs from one answer to the next of the same server.
PASSING = re.compile(
    r"^(id|.*_id|created.*|completed_at|.*_ms|.*_per_second|timings|cached_tokens|cache_read_input_tokens)$"
)
"""`input_tokens` of Anthropic's are without those from the cache: `alike` looks at their sum."""


Servers = tuple[Llama, Slotpin]
Client = TypeVar("Client", openai.OpenAI, anthropic.Anthropic)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with llama(*FLAGS) as server, slotpin(tmp_path_factory.mktemp("slotpin"), server.url) as proxy:
        yield server, proxy


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Honours `id_slot` on Anthropic's route too."""
    with llama(*FLAGS, patched=True) as server, slotpin(tmp_path_factory.mktemp("slotpin"), server.url) as proxy:
        yield server, proxy


def alike(value: object) -> object:
    """An object as plain data, without what passes."""
    if hasattr(value, "model_dump"):
        return type(value).__name__, alike(value.model_dump(warnings=False))
    if isinstance(value, dict):
        known = {key: alike(each) for key, each in value.items() if not PASSING.match(key)}
        if "cache_read_input_tokens" in value:
            known["input_tokens"] = (value["input_tokens"] or 0) + (value["cache_read_input_tokens"] or 0)
        return known
    return [alike(each) for each in value] if isinstance(value, list | tuple) else value


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def accumulated(client: anthropic.Anthropic) -> object:
    with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=6, extra_body={"temperature": 0}) as stream:
        return stream.get_final_message()


OPENAI: dict[str, Callable[[openai.OpenAI], object]] = {
    "chat": lambda client: client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, seed=1
    ),
    "chat, streamed": lambda client: list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    ),
    "completion": lambda client: client.completions.create(model=MODEL, prompt="Hello", max_tokens=6, temperature=0),
    "completion, streamed": lambda client: list(
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=6, temperature=0, stream=True)
    ),
    "responses": lambda client: client.responses.create(
        model=MODEL, instructions="Be brief.", input="Hello", max_output_tokens=6, temperature=0
    ),
    "responses, streamed": lambda client: list(
        client.responses.create(model=MODEL, input=ASKED, max_output_tokens=6, temperature=0, stream=True)
    ),
    "models": lambda client: client.models.list().data,
    "an error": lambda client: client.chat.completions.create(model=MODEL, messages=[], n=-1),
}
ANTHROPIC: dict[str, Callable[[anthropic.Anthropic], object]] = {
    "messages": lambda client: client.messages.create(
        model=MODEL, system="Be brief.", messages=ASKED, max_tokens=6, extra_body={"temperature": 0}
    ),
    "messages, streamed": lambda client: list(
        client.messages.create(model=MODEL, messages=ASKED, max_tokens=6, stream=True, extra_body={"temperature": 0})
    ),
    "messages, accumulated": accumulated,
    "an error": lambda client: client.messages.create(model=MODEL, messages=[], max_tokens=6),
    "count": lambda client: client.messages.count_tokens(model=MODEL, messages=ASKED),
}


def outcome(call: Callable[[Client], object], client: Client) -> object:
    """What a caller gets: an object, or an exception of a type with a body."""
    try:
        return alike(call(client))
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return type(error).__name__, error.status_code, alike(error.body)


@pytest.mark.parametrize("what", OPENAI)
def test_openai(stock: Servers, what: str) -> None:
    directly, through = (outcome(OPENAI[what], openai_client(each.url)) for each in stock)
    assert through == directly


@pytest.mark.parametrize("what", ANTHROPIC)
@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_anthropic(kind: str, what: str, request: pytest.FixtureRequest) -> None:
    servers: Servers = request.getfixturevalue(kind)
    directly, through = (outcome(ANTHROPIC[what], anthropic_client(each.url)) for each in servers)
    assert through == directly


def test_openai_is_pinned_and_a_refusal_is_an_exception(stock: Servers) -> None:
    client = openai_client(stock[1].url)
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert (answer.headers["x-slotpin-slot"], answer.headers["x-slotpin-reason"]) == ("0", "pinned")
    side = {"X-Slotpin-Role": "compactor"}
    before = len(stock[1].program.exchanges())
    with pytest.raises(openai.ConflictError) as refused:
        client.with_options(max_retries=2).chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_headers=side, extra_body={"id_slot": -2}
        )
    assert refused.value.code == "explicit_unpredictable"
    assert len(stock[1].program.exchanges()) == before + 1  # not tried again


def test_anthropic_tries_no_refusal_again(stock: Servers) -> None:
    client = anthropic.Anthropic(base_url=f"{stock[1].url}/compactor", api_key="none", max_retries=2)
    before = len(stock[1].program.exchanges())
    with pytest.raises(anthropic.ConflictError):
        client.messages.create(model=MODEL, messages=ASKED, max_tokens=2, extra_body={"n": 2})
    assert len(stock[1].program.exchanges()) == before + 1


def test_anthropic_is_pinned_where_the_server_heeds_it(stock: Servers, patched: Servers) -> None:
    """A stock llama-server ignores the slot there: then no pin is claimed, and the log says so once."""
    for _, proxy in (stock, patched):
        client = anthropic_client(proxy.url)
        for _ in range(2):
            answer = client.messages.with_raw_response.create(model=MODEL, messages=ASKED, max_tokens=2)
        pinned = proxy is patched[1]
        assert answer.headers["x-slotpin-reason"] == ("pinned" if pinned else "route_ignores_slot")
        assert answer.headers.get("x-slotpin-slot") == ("0" if pinned else None)
        warnings = proxy.program.events("warning", cause="route_ignores_slot")
        assert len(warnings) == (0 if pinned else 1)
    assert patched[0].last_slot == 0
