"""The counters of a real llama-server's answers, against its own tokenizer and a request that comes again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from slotpin.pinning.counters import Counters, CounterScanner
from slotpin.pinning.route import read_route
from tests.real.client import fetch
from tests.real.conftest import INFILL
from tests.real.prompts import prose
from tests.real.servers import Llama, llama

TOKENS = 3
CHAT = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
TEXT = ("/v1/completions", "/completion")
seeds = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Llama]:
    """One slot: the Anthropic route would not let us choose."""
    with llama("--parallel", "1", "--override-kv", INFILL) as running:
        yield running


def request(path: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any]
    match path:
        case "/v1/responses":
            body = {"input": messages, "max_output_tokens": TOKENS}
        case "/infill":
            body = {"input_prefix": text, "input_suffix": "", "n_predict": TOKENS}
        case "/completion":
            body = {"prompt": text, "n_predict": TOKENS}
        case "/v1/completions":
            body = {"prompt": text, "max_tokens": TOKENS}
        case _:
            body = {"messages": messages, "max_tokens": TOKENS}
    return body | {"temperature": 0}


def counters(server: Llama, path: str, body: dict[str, Any], size: int = 100) -> Counters:
    answer = fetch(server.url + path, body)
    assert answer.status == 200, answer
    shape = read_route("POST", path.encode()).shape
    assert shape is not None
    scanner = CounterScanner(shape)
    for at in range(0, len(answer.body), size):
        scanner.feed(answer.body[at : at + size])
    found = scanner.result()
    assert found is not None, answer.body
    return found


def prompt_tokens(server: Llama, path: str, text: str) -> int:
    """What the server's tokenizer makes of it."""
    if path in CHAT:
        messages = [{"role": "user", "content": text}]
        text = fetch(f"{server.url}/apply-template", {"messages": messages}).json["prompt"]
    tokens = fetch(f"{server.url}/tokenize", {"content": text, "add_special": True, "parse_special": True}).json
    return len(tokens["tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [*CHAT, *TEXT, "/infill"])
def test_every_shape_tells_its_counters(server: Llama, path: str, stream: bool) -> None:
    text = prose(100, seed=next(seeds))
    body = request(path, text) | {"stream": stream}
    first, again = counters(server, path, body), counters(server, path, body)
    prompt = first.evaluated + first.cached
    if path != "/infill":  # puts tokens of its own around the text
        assert prompt == prompt_tokens(server, path, text)
    assert prompt > 100
    assert first.evaluated > 90  # the opening is the last test's
    # Everything is re-used but for the last token, whose evaluation gives the first new one.
    assert replace(again, prompt_ms=None) == Counters(1, prompt - 1, TOKENS)
    has_timings = path != "/v1/messages" and (stream or path != "/v1/responses")
    for found in (first, again):
        assert found.generated == TOKENS
        assert (found.prompt_ms is not None) == has_timings
        assert not has_timings or (found.prompt_ms or 0) > 0


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {"include_usage": True}},
        {"timings_per_token": True},
        {"return_progress": True},
        {"logprobs": True, "top_logprobs": 5},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("size", [1, 33, 100_000])
def test_what_else_a_chat_asks_for_changes_nothing(server: Llama, more: dict[str, Any], size: int) -> None:
    path = "/v1/chat/completions"
    text = prose(100, seed=next(seeds))
    body = request(path, text) | {"stream": True}
    first, again = counters(server, path, body), counters(server, path, body | more, size)
    assert replace(again, prompt_ms=None) == Counters(1, first.evaluated + first.cached - 1, TOKENS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [*CHAT, "/completion"])
def test_text_that_looks_like_counters_is_not_taken_for_them(server: Llama, path: str, stream: bool) -> None:
    """The native route repeats its prompt."""
    fake = '"timings":{"prompt_n":90001,"cache_n":90002,"predicted_n":90003}'
    text = f'{prose(20, seed=next(seeds))} "usage":{{"input_tokens":90001,"cache_read_input_tokens":90002}},{fake}'
    found = counters(server, path, request(path, text) | {"stream": stream})
    assert found.evaluated + found.cached == prompt_tokens(server, path, text)
    assert found.generated == TOKENS
