"""The message end of each shape of answer, however its bytes are cut.

`streams/` holds answers of llama-server itself (Gemma 3 270M, October 2026), recorded on the wire. Their prompts ask
for the very marks that end a stream.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotpin.pinning.message_end import MessageEndScanner, Shape

STREAMS = Path(__file__).parent / "streams"

# What the server sends in the places of a stream where it may: a ping, and fields of the event-stream format.
PINGS = b":\n\n"

RECORDED = {
    "chat": (Shape.CHAT, 1),
    "completions": (Shape.CHAT, 1),
    "native": (Shape.NATIVE, 1),
    "native_two": (Shape.NATIVE, 2),  # two prompts
    "native_four": (Shape.NATIVE, 4),  # two prompts, n_cmpl 2: finals of one prompt and partials of the next are mixed
    "anthropic": (Shape.ANTHROPIC, 1),
    "responses": (Shape.RESPONSES, 1),
}


def recorded(name: str) -> bytes:
    return (STREAMS / f"{name}.txt").read_bytes()


def crlf(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r\n")


def with_pings(stream: bytes) -> bytes:
    return PINGS + stream.replace(b"\n\n", b"\n\n: ping\n\n" + PINGS)


VARIANTS = [
    pytest.param(shape, completions, change(recorded(name)), id=f"{name}-{label}")
    for name, (shape, completions) in RECORDED.items()
    for label, change in (("as recorded", bytes), ("CRLF", crlf), ("pings", with_pings))
]
every_stream = pytest.mark.parametrize(("shape", "completions", "stream"), VARIANTS)


def end_of(shape: Shape, completions: int, stream: bytes) -> int:
    """How many bytes it takes to find the end, fed one by one."""
    scanner = MessageEndScanner(shape, completions)
    for position in range(len(stream)):
        if scanner.feed(stream[position : position + 1]):
            return position + 1
    raise AssertionError("no message end")


def last_mark(shape: Shape, stream: bytes) -> int:
    """Where the last line of the stream that says something ends: no scanner may be done before that."""
    marks = {Shape.CHAT: b"[DONE]", Shape.NATIVE: b"}", Shape.ANTHROPIC: b"}", Shape.RESPONSES: b"}"}
    return stream.rindex(marks[shape]) + len(marks[shape])


@every_stream
def test_the_end_lies_between_the_complete_mark_and_the_end_of_the_stream(
    shape: Shape, completions: int, stream: bytes
) -> None:
    assert last_mark(shape, stream) <= end_of(shape, completions, stream) <= len(stream)


@every_stream
def test_every_cut_in_two_finds_the_same_end(shape: Shape, completions: int, stream: bytes) -> None:
    end = end_of(shape, completions, stream)
    for cut in range(len(stream) + 1):
        scanner = MessageEndScanner(shape, completions)
        # This is also every truncated stream: one that lacks a byte of its mark has not ended.
        assert scanner.feed(stream[:cut]) == scanner.ended == (cut >= end), cut
        assert scanner.feed(stream[cut:]) and scanner.ended, cut


@every_stream
@settings(max_examples=10)
@given(data=st.data())
def test_any_cuts_find_the_same_end(shape: Shape, completions: int, stream: bytes, data: st.DataObject) -> None:
    end = end_of(shape, completions, stream)
    near_the_end = st.integers(max(0, end - 60), len(stream))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)) | near_the_end, max_size=12)))
    scanner = MessageEndScanner(shape, completions)
    for start, stop in pairwise([0, *cuts, len(stream)]):
        assert scanner.feed(stream[start:stop]) == (stop >= end)
    assert scanner.feed(b"") and scanner.feed(b"data: more\n\n")


@every_stream
def test_what_is_held_between_pieces_is_bounded(shape: Shape, completions: int, stream: bytes) -> None:
    scanner = MessageEndScanner(shape, completions)
    for position in range(0, len(stream), 7):
        scanner.feed(stream[position : position + 7])
        assert held(scanner) <= 64
    unended = MessageEndScanner(shape, completions)
    unended.feed(b"data: " + b"x" * 1_000_000)
    assert not unended.ended
    assert held(unended) <= 64


def held(scanner: MessageEndScanner) -> int:
    values = (getattr(scanner, name) for name in type(scanner).__slots__)
    return sum(len(value) for value in values if isinstance(value, bytes | bytearray | str))


@pytest.mark.parametrize("completions", [1, 3])
def test_only_native_answers_share_a_stream(completions: int) -> None:
    assert MessageEndScanner(Shape.CHAT, completions).feed(b"data: {}\n\ndata: [DONE]\n\n")
    assert MessageEndScanner(Shape.RESPONSES, completions).feed(b"event: response.completed\ndata: {}\n\n")


@pytest.mark.parametrize("completions", [1, 2, 3, 5])
def test_native_completions_end_with_the_last_of_them(completions: int) -> None:
    scanner = MessageEndScanner(Shape.NATIVE, completions)
    final = b'data: {"index":0,"content":"","stop":true,"model":"m"}\n\n'
    for _ in range(completions - 1):
        assert not scanner.feed(b'data: {"index":0,"content":"x","stop":false}\n\n' + final)
    assert scanner.feed(final)


@pytest.mark.parametrize("event", ["response.completed", "response.failed", "response.incomplete"])
@pytest.mark.parametrize("space", [" ", ""])
def test_each_end_of_a_response(event: str, space: str) -> None:
    first, last = f"event:{space}response.created\ndata: {{}}\n\n", f"event:{space}{event}\ndata: {{}}\n\n"
    stream = (first + last).encode()
    assert last_mark(Shape.RESPONSES, stream) <= end_of(Shape.RESPONSES, 1, stream) <= len(stream)


@pytest.mark.parametrize(
    ("shape", "stream"),
    [
        # A late failure, after which the server ends the stream without a mark.
        (Shape.CHAT, b'data: {"choices":[]}\n\ndata: {"error":{"code":500,"message":"data: [DONE]"}}\n\n'),
        (Shape.NATIVE, b'data: {"stop":false}\n\ndata: {"error":{"code":500,"message":"x"}}\n\n'),
        (Shape.ANTHROPIC, b'event: message_start\ndata: {}\n\nevent: error\ndata: {"code":500}\n\n'),
        (Shape.RESPONSES, b'event: response.created\ndata: {}\n\ndata: {"error":{"code":500}}\n\n'),
        # Near misses.
        (Shape.CHAT, b"data: [DONE\n\ndata: DONE]\n\n: data: [DONE]\n\nevent: data: [DONE]\n\n"),
        (Shape.NATIVE, b'data: {"stop":false,"stopped":true,"stop_type":"eos","stopping_word":"stop"}\n\n'),
        (Shape.NATIVE, b'data: {"stop":true}'),
        (Shape.ANTHROPIC, b'event: message_stopped\ndata: {}\n\ndata: {"type":"message_stop"}\n\n'),
        (Shape.ANTHROPIC, b'event: message_stop\ndata: {"type":"message_stop"}\n'),
        (Shape.RESPONSES, b"event: response.completed.soon\ndata: {}\n\nevent: response.output_text.done\n\n"),
        (Shape.RESPONSES, b": event: response.completed\n\nevent: response.complete\ndata: {}\n\n"),
        # Another shape's end.
        (Shape.CHAT, b'event: message_stop\ndata: {"stop":true}\n\n'),
        (Shape.ANTHROPIC, b'data: {"stop":true}\n\ndata: [DONE]\n\n'),
        (Shape.RESPONSES, b"event: message_stop\ndata: {}\n\ndata: [DONE]\n\n"),
        (Shape.NATIVE, b"event: message_stop\ndata: {}\n\ndata: [DONE]\n\n"),
    ],
)
@pytest.mark.parametrize("change", [bytes, crlf])
def test_what_is_no_message_end(shape: Shape, stream: bytes, change: type[bytes]) -> None:
    stream = change(stream)
    whole = MessageEndScanner(shape)
    assert not whole.feed(stream)
    piecewise = MessageEndScanner(shape)
    assert not any(piecewise.feed(stream[position : position + 1]) for position in range(len(stream)))


_MARKS = ["data: [DONE]", '"stop":true', '{"stop":true}', "event: message_stop", "event: response.completed"]
_BETWEEN = ["\n", "\r\n", "\n\n", '"', "\\", "\\\\", "\u2028", "é", "}", "x"]
texts = st.lists(st.sampled_from(_MARKS + _BETWEEN), max_size=8).map("".join)


def event(name: str, data: object, ascii_only: bool) -> bytes:
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {json.dumps(data, ensure_ascii=ascii_only, separators=(',', ':'))}\n\n".encode()


def answer(shape: Shape, said: list[str], ascii_only: bool) -> tuple[list[bytes], list[bytes]]:
    """Generated text as each shape carries it, and the events that end it."""
    echo = "".join(said)
    match shape:
        case Shape.CHAT:
            body = [event("", {"choices": [{"delta": {"content": text, text: text}}]}, ascii_only) for text in said]
            return body, [b"data: [DONE]\n\n"]
        case Shape.NATIVE:
            body = [event("", {"content": text, "stop": False, "prompt": text}, ascii_only) for text in said]
            return body, [event("", {"content": echo, "stop": True, "prompt": echo, "stopping_word": echo}, ascii_only)]
        case Shape.ANTHROPIC:
            body = [event("content_block_delta", {"delta": {"text": text}}, ascii_only) for text in said]
            return body, [event("message_stop", {"type": "message_stop"}, ascii_only)]
        case Shape.RESPONSES:
            body = [event("response.output_text.delta", {"delta": text}, ascii_only) for text in said]
            return body, [event("response.completed", {"output": echo, "item": {"stop": True}}, ascii_only)]


@settings(max_examples=200)
@given(st.sampled_from(Shape), st.lists(texts, max_size=5), st.booleans(), st.integers(1, 40), st.booleans())
def test_generated_text_does_not_fool_it(shape: Shape, said: list[str], ascii_only: bool, size: int, dos: bool) -> None:
    body, end = (b"".join(part) for part in answer(shape, said, ascii_only))
    if dos:
        body, end = crlf(body), crlf(end)
    scanner = MessageEndScanner(shape)
    assert not any(scanner.feed(body[position : position + size]) for position in range(0, len(body), size))
    assert not scanner.feed(end[: last_mark(shape, end) - 1])
    assert scanner.feed(end[last_mark(shape, end) - 1 :])
