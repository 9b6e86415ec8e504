"""What is read of a request's body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning.ids import ABSENT, UNPREDICTABLE, Explicit
from slotpin.pinning.request import Body, Opening, read_body, read_opening

from .json_text import BODIES, REQUESTS
from .wire import read


def body_of(value: object) -> Body:
    body = read_body(json.dumps(value).encode())
    assert body is not None
    return body


@pytest.mark.parametrize(
    ("text", "client_id"),
    [
        (b"{}", ABSENT),
        (b'{"id_slot":null}', ABSENT),
        (b'{"id_slot":2}', Explicit(2)),
        (b'{"id_slot" :\t2.0 }', Explicit(2)),
        (b'{"id\\u005fslot":2}', Explicit(2)),
        (b'\xef\xbb\xbf{"id_slot":2}', Explicit(2)),
        # The last of equal members wins, as it does in llama-server.
        (b'{"id_slot":1,"id_slot":2}', Explicit(2)),
        (b'{"id_slot":"x","id\\u005fslot":2}', Explicit(2)),
        (b'{"id_slot":1,"id_slot":null}', ABSENT),
        (b'{"id_slot":null,"id_slot":-1}', UNPREDICTABLE),
        # Only the outermost object counts.
        (b'{"x":{"id_slot":2},"messages":[{"id_slot":2}],"s":"\\"id_slot\\":2","id_slot ":2,"ID_SLOT":2}', ABSENT),
    ],
)
def test_the_clients_own_id(text: bytes, client_id: object) -> None:
    assert read(text).client_id == client_id


@pytest.mark.parametrize(
    ("text", "has", "keeps"),
    [
        (b"{}", False, True),
        (b'{"cache_prompt":null}', False, True),
        (b'{"cache_prompt":true}', True, True),
        (b'{"cache_prompt":false}', True, False),
        (b'{"cache_prompt":1}', True, True),  # the server answers 400, and the client shall see that
        (b'{"cache_prompt":true,"cache_prompt":false}', True, False),
        (b'{"cache_prompt":false,"cache_prompt":null}', False, True),
    ],
)
def test_the_clients_own_cache_prompt(text: bytes, has: bool, keeps: bool) -> None:
    request = read(text)
    assert (request.has_cache_prompt, request.keeps_cache) == (has, keeps)


@given(BODIES | REQUESTS)
def test_the_reading_agrees_with_a_plain_json_parser(body: bytes) -> None:
    value = json.loads(body.decode("utf-8-sig"))
    request = read(body)
    assert (request.client_id == ABSENT) == (value.get("id_slot") is None)
    assert request.has_cache_prompt == (value.get("cache_prompt") is not None)
    assert request.keeps_cache == (value.get("cache_prompt") is not False)
    assert request.nulls == {name for name in ("id_slot", "cache_prompt") if value.get(name, "") is None}
    if isinstance(request.client_id, Explicit):
        assert value["id_slot"] == request.client_id.id


@pytest.mark.parametrize(
    ("value", "completions"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": ["a", [1, 2], "c"]}, 3),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", 1, "b"]}, 1),
        ({"prompt": "x", "n_cmpl": 2}, 2),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n_cmpl": 2, "n": 5}, 4),
        ({"prompt": "x", "n_cmpl": None, "n": "x"}, 1),
        ({}, 1),
    ],
)
def test_how_many_answers_a_native_request_asks_for(value: dict[str, Any], completions: int) -> None:
    assert body_of(value).completions == completions


def test_prompts_may_be_objects() -> None:
    """server-common.cpp, tokenize_input_prompts: a list without an integer in it is a list of prompts."""
    assert body_of({"prompt": [{"prompt_string": "a"}, {"prompt_string": "b"}]}).completions == 2
    assert body_of({"prompt": ["a", {"prompt_string": "b"}]}).completions == 2


@pytest.mark.parametrize(("stream", "streams"), [(True, True), (False, False), (None, False)])
def test_whether_the_answer_is_streamed(stream: object, streams: bool) -> None:
    assert body_of({"stream": stream}).streams is streams
    assert body_of({}).streams is False


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("value", "system", "user"),
    [
        # OpenAI chat: strings and parts.
        ({"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"}]}, "Be", "Hello"),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be"},
                    {"role": "user", "content": [IMAGE, text("Hello"), text("No")]},
                ]
            },
            "Be",
            "Hello",
        ),
        ({"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": "No"}]}, "", "Hello"),
        ({"messages": [{"role": "assistant", "content": "No"}, {"role": "system", "content": [text("Be")]}]}, "Be", ""),
        # Anthropic: `system` beside the messages, as a string or a list.
        ({"system": "Be", "messages": [{"role": "user", "content": "Hello"}]}, "Be", "Hello"),
        ({"system": [text("Be"), text("No")], "messages": []}, "Be", ""),
        # Responses: `instructions`, and `input` as a string or a list.
        ({"instructions": "Be", "input": "Hello"}, "Be", "Hello"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}, "", "Hello"),
        ({"input": [{"type": "message", "role": "developer", "content": "Be"}]}, "Be", ""),
        # Completions.
        ({"prompt": "Hello"}, "", "Hello"),
        ({}, "", ""),
    ],
)
def test_the_opening_texts(value: dict[str, Any], system: str, user: str) -> None:
    opening = read_opening(body_of(value))
    assert (opening.system[:1], opening.user[:1]) == ((system,) if system else (), (user,) if user else ())


@pytest.mark.parametrize(
    "message",
    [
        '{"role":"system","content":"Be"}',
        '{ "role" : "system", "content": "Be" }',
        '{"content":"Be","role":"system"}',
        '{"name":"n","role":"s\\u0079stem","content":"Be"}',
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_system_text_is_found_wherever_it_stands(message: str, place: int) -> None:
    others = ['{"role":"assistant","content":"No"}', '{"content":"Hello","role":"user"}', "7"]
    body = read_body(f'{{"messages":[{",".join([*others[:place], message, *others[place:]])}]}}'.encode())
    assert body is not None
    assert read_opening(body) == Opening(("Be",), ("Hello",), ())


def test_all_parts_of_a_message_are_texts() -> None:
    opening = read_opening(
        body_of(
            {
                "system": [text("You are C."), text("Be")],
                "messages": [
                    {"role": "user", "content": [text("Reminder"), IMAGE, text("Hello")]},
                    {"role": "assistant", "content": "Yes"},
                    {"role": "user", "content": [{"type": "tool_result", "content": "No"}, text("Summarise")]},
                ],
            }
        )
    )
    assert opening == Opening(("You are C.", "Be"), ("Reminder", "Hello"), ("Summarise",))


@pytest.mark.parametrize(
    ("value", "last"),
    [
        ({"messages": [{"role": "user", "content": "Hello"}]}, ("Hello",)),
        ({"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "No"}]}, ()),
        ({"messages": [{"role": "user", "content": "Hello"}, {"role": "tool", "content": "No"}]}, ()),
        ({"input": [{"role": "user", "content": "No"}, {"role": "user", "content": "Hello"}]}, ("Hello",)),
        ({"input": "Hello"}, ("Hello",)),
        ({"prompt": "Hello"}, ("Hello",)),
        ({"messages": [7]}, ()),
        ({}, ()),
    ],
)
def test_the_last_text_is_the_users(value: dict[str, Any], last: tuple[str, ...]) -> None:
    assert read_opening(body_of(value)).last == last


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
roles = st.sampled_from(["system", "developer", "user", "assistant"])
messages = st.lists(st.fixed_dictionaries({"role": roles | any_json, "content": any_json}) | any_json, max_size=4)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "instructions", "input", "prompt", "model", "stream", "n", "n_cmpl"]),
        any_json | messages,
    )
)
def test_odd_types_never_raise(value: dict[str, Any]) -> None:
    body = body_of(value)
    opening = read_opening(body)
    assert all(isinstance(found, str) for found in (*opening.system, *opening.user, *opening.last))
    assert body.model is None or body.model == value["model"]
    assert body.completions >= 1
    assert body.streams in (True, False)


@given(st.binary(max_size=60))
def test_garbage_is_no_body(garbage: bytes) -> None:
    body = read_body(garbage)
    if body is not None:
        assert garbage.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
        read_opening(body)


def test_lone_surrogates_and_bad_numbers_deep_inside_do_not_raise() -> None:
    for text in (b'{"messages":1e400}', b'{"messages":[1e400]}', b'{"model":"\xff"}', b'{"prompt":"\xff","n":1e999}'):
        body = read_body(text)
        assert body is not None
        assert read_opening(body) is not None
        assert body.completions == 1
    assert read_body(b'{"messages":"\\ud800"}') is None  # the server refuses it as well
    assert read_body(b"[" * 100_000) is None
    assert read_body(b'{"a":' * 100_000) is None
