"""The server's counters in each shape of answer, however its bytes are cut.

`answers/` holds whole answers of llama-server itself (a tiny model, November 2026), recorded on the wire; each request
was sent for the second time, or after another with the same beginning. `streams/` is described in test_message_end.py.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotpin.pinning.counters import Counters, CounterScanner
from slotpin.pinning.message_end import Shape

HERE = Path(__file__).parent

RECORDED: dict[str, tuple[Shape, Counters]] = {
    "answers/chat.json": (Shape.CHAT, Counters(13, 50, 4, 1.683)),
    "answers/chat_two.json": (Shape.CHAT, Counters(13, 50, 3, 1.787)),  # n: 2; the first one's counters
    "answers/chat_stream.txt": (Shape.CHAT, Counters(13, 50, 3, 2.05)),  # timings alone
    "answers/chat_usage.txt": (Shape.CHAT, Counters(13, 50, 3, 6.177)),  # include_usage
    "answers/chat_every_token.txt": (Shape.CHAT, Counters(13, 50, 3, 4.195)),  # timings_per_token, return_progress
    "answers/completions.json": (Shape.CHAT, Counters(4, 19, 4, 0.807)),
    "answers/completions_stream.txt": (Shape.CHAT, Counters(4, 19, 3, 4.819)),
    "answers/native.json": (Shape.NATIVE, Counters(4, 19, 4, 0.765)),
    "answers/native_probabilities.json": (Shape.NATIVE, Counters(4, 19, 2, 0.921)),  # which come after the timings
    "answers/native_stream.txt": (Shape.NATIVE, Counters(4, 19, 3, 0.844)),
    "answers/infill.json": (Shape.NATIVE, Counters(7, 20, 3, 4.475)),
    "answers/infill_stream.txt": (Shape.NATIVE, Counters(7, 20, 3, 1.035)),
    "answers/anthropic.json": (Shape.ANTHROPIC, Counters(13, 50, 4)),
    "answers/anthropic_stream.txt": (Shape.ANTHROPIC, Counters(13, 50, 3)),
    "answers/responses.json": (Shape.RESPONSES, Counters(13, 50, 4)),
    "answers/responses_stream.txt": (Shape.RESPONSES, Counters(13, 50, 3, 1.503)),
    "streams/chat.txt": (Shape.CHAT, Counters(41, 0, 12, 189.395)),
    "streams/completions.txt": (Shape.CHAT, Counters(13, 0, 6, 80.722)),
    "streams/native.txt": (Shape.NATIVE, Counters(12, 1, 6, 90.479)),
    "streams/native_two.txt": (Shape.NATIVE, Counters(6, 0, 4, 129.819)),
    "streams/anthropic.txt": (Shape.ANTHROPIC, Counters(54, 0, 12)),
    "streams/responses.txt": (Shape.RESPONSES, Counters(34, 0, 12, 150.606)),
}
every_answer = pytest.mark.parametrize("name", RECORDED)


def recorded(name: str) -> tuple[Shape, bytes, Counters]:
    shape, counters = RECORDED[name]
    return shape, (HERE / name).read_bytes(), counters


def scanned(shape: Shape, *pieces: bytes) -> Counters | None:
    scanner = CounterScanner(shape)
    for piece in pieces:
        scanner.feed(piece)
    return scanner.result()


@every_answer
def test_every_cut_in_two_finds_the_same(name: str) -> None:
    shape, answer, counters = recorded(name)
    assert scanned(shape, answer) == counters
    for cut in range(len(answer) + 1):
        assert scanned(shape, answer[:cut], answer[cut:]) == counters, cut


@every_answer
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_pieces_of_one_size_find_the_same(name: str, size: int) -> None:
    shape, answer, counters = recorded(name)
    assert scanned(shape, *(answer[at : at + size] for at in range(0, len(answer), size))) == counters


@every_answer
@settings(max_examples=10)
@given(data=st.data())
def test_any_cuts_find_the_same(name: str, data: st.DataObject) -> None:
    shape, answer, counters = recorded(name)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    assert scanned(shape, *(answer[start:stop] for start, stop in pairwise([0, *cuts, len(answer)]))) == counters


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - {"streams/native_two.txt"}))  # has two prompts
def test_what_has_not_come_is_not_known(name: str) -> None:
    """A truncated answer gives what it has said: nothing, or counters of a prompt that is not done yet."""
    shape, answer, counters = recorded(name)
    seen = [scanned(shape, answer[:cut]) for cut in range(len(answer))]
    assert seen[0] is None
    assert all(found.evaluated <= counters.evaluated and found.cached <= counters.cached for found in seen if found)


@every_answer
def test_what_is_held_between_pieces_is_bounded(name: str) -> None:
    shape, answer, _ = recorded(name)
    scanner = CounterScanner(shape)
    for at in range(0, len(answer), 7):
        scanner.feed(answer[at : at + 7])
        assert held(scanner) <= 2200
    for endless in (b"x" * 1_000_000, b'"timings":{"usage":{' + b"x" * 1_000_000, b'"usage":{"timings"' * 50_000):
        scanner.feed(endless)
        assert held(scanner) <= 2200
        for _ in range(3000):
            scanner.feed(b"1")
            assert held(scanner) <= 2200
    scanner.feed(answer)
    assert scanner.result() == recorded(name)[2]


def held(scanner: CounterScanner) -> int:
    values = (getattr(scanner, name) for name in type(scanner).__slots__)
    return sum(len(value) for value in values if isinstance(value, bytes | bytearray | str))


TIMINGS = '"timings":{"cache_n":7,"prompt_n":3,"prompt_ms":1.5,"predicted_n":2}'
CHAT_USAGE = '"usage":{"completion_tokens":2,"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":7}}'
RESPONSES_USAGE = '"usage":{"input_tokens":10,"output_tokens":2,"input_tokens_details":{"cached_tokens":7}}'
ANTHROPIC_USAGE = '"usage":{"cache_read_input_tokens":7,"input_tokens":3,"output_tokens":2}'
TOLD = {
    Shape.CHAT: CHAT_USAGE,
    Shape.NATIVE: TIMINGS,
    Shape.RESPONSES: RESPONSES_USAGE,
    Shape.ANTHROPIC: ANTHROPIC_USAGE,
}


@pytest.mark.parametrize("shape", Shape)
def test_usage_where_there_are_no_timings(shape: Shape) -> None:
    ms = 1.5 if shape is Shape.NATIVE else None
    assert scanned(shape, f"{{{TOLD[shape]}}}".encode()) == Counters(3, 7, 2, ms)


@pytest.mark.parametrize("shape", [Shape.CHAT, Shape.RESPONSES])
@pytest.mark.parametrize("order", [1, -1])
def test_timings_win_over_usage(shape: Shape, order: int) -> None:
    usage = TOLD[shape].replace("10", "90").replace("7", "70")
    assert scanned(shape, ",".join([usage, TIMINGS][::order]).encode()) == Counters(3, 7, 2, 1.5)


def test_the_last_timings_win() -> None:
    first = TIMINGS.replace('"predicted_n":2', '"predicted_n":1')
    assert scanned(Shape.CHAT, f"{first},{TIMINGS}".encode()) == Counters(3, 7, 2, 1.5)
    assert scanned(Shape.CHAT, TIMINGS.encode(), first.encode()) == Counters(3, 7, 1, 1.5)


def test_an_anthropic_stream_tells_in_two_parts() -> None:
    start = b'data: {"message":{"usage":{"cache_read_input_tokens":7,"input_tokens":3,"output_tokens":0}}}\n\n'
    end = b'data: {"delta":{},"usage":{"output_tokens":5}}\n\n'
    assert scanned(Shape.ANTHROPIC, start) == Counters(3, 7, None)
    assert scanned(Shape.ANTHROPIC, start, end) == Counters(3, 7, 5)
    assert scanned(Shape.ANTHROPIC, end) is None


@pytest.mark.parametrize("shape", Shape)
def test_white_space_between_the_tokens_changes_nothing(shape: Shape) -> None:
    spread = TOLD[shape].replace(":", " : ").replace(",", ",\n  ").replace("{", "{ ").replace("}", "\n}")
    assert scanned(shape, spread.encode()) == scanned(shape, TOLD[shape].encode()) is not None


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape.CHAT, ""),
        (Shape.CHAT, '"timings"'),
        (Shape.CHAT, '"timings":null,"usage":null'),
        (Shape.CHAT, '"timings":{},"usage":{}'),
        (Shape.CHAT, '"timings":{"prompt_n":3},"usage":{"prompt_tokens":10}'),  # nothing about re-use
        (Shape.CHAT, '"timings":{"prompt_n":-3,"cache_n":7}'),
        (Shape.CHAT, '"timings":{"prompt_n":"3","cache_n":7}'),
        (Shape.CHAT, '"timings":{"prompt_n":3,"cache_n":7'),
        (Shape.CHAT, '"timings":{prompt_n:3,"cache_n":7}'),
        (Shape.CHAT, '"timings":{"prompt_n":3,"cache_n":7,"x":"\\ud800"}'),
        (Shape.CHAT, '"timings":[{"prompt_n":3,"cache_n":7}]'),
        (Shape.CHAT, '"timings":{"prompt_n":3,"cache_n":7,"x":' + "[" * 2000 + "]" * 2000 + "}"),
        (Shape.CHAT, '"timing":{"prompt_n":3,"cache_n":7}'),
        (Shape.CHAT, '"content":"timings","x":{"prompt_n":3,"cache_n":7}'),
        (Shape.CHAT, json.dumps({"content": f"{{{TIMINGS},{CHAT_USAGE}}}"})),
        (Shape.CHAT, json.dumps({"arguments": json.dumps(f"{{{TIMINGS},{CHAT_USAGE}}}")})),
        (Shape.NATIVE, json.dumps({"prompt": f"x{TIMINGS}", "content": f'"{TIMINGS}'})),
        (Shape.RESPONSES, json.dumps({"delta": f"{{{TIMINGS},{RESPONSES_USAGE}}}"})),
        (Shape.ANTHROPIC, json.dumps({"partial_json": f"{{{ANTHROPIC_USAGE}}}"})),
        # Another shape's.
        (Shape.CHAT, ANTHROPIC_USAGE),
        (Shape.CHAT, RESPONSES_USAGE),
        (Shape.NATIVE, CHAT_USAGE),
        (Shape.ANTHROPIC, f"{CHAT_USAGE},{TIMINGS}"),
        (Shape.RESPONSES, CHAT_USAGE),
        # A failure.
        (Shape.CHAT, 'data: {"error":{"code":500,"message":"x","type":"server_error"}}\n\n'),
    ],
)
def test_where_the_server_said_nothing(shape: Shape, text: str) -> None:
    answer = text.encode()
    assert scanned(shape, answer) is None
    assert scanned(shape, *(answer[at : at + 1] for at in range(len(answer)))) is None


def test_a_tools_input_in_an_anthropic_answer_is_not_its_usage() -> None:
    """The server puts it in as JSON, not as text (to_json_anthropic), and `usage` after it."""
    answer = {
        "content": [{"type": "tool_use", "input": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 1}}}],
        "usage": {"cache_read_input_tokens": 7, "input_tokens": 3, "output_tokens": 2},
    }
    assert scanned(Shape.ANTHROPIC, json.dumps(answer).encode()) == Counters(3, 7, 2)


@given(st.text(max_size=30), st.sampled_from(["timings", "usage", '"timings":', '"usage":{', "\\", '"']), st.booleans())
def test_generated_text_does_not_fool_it(text: str, mark: str, ascii_only: bool) -> None:
    said = json.dumps({"content": text + mark, mark + text: mark}, ensure_ascii=ascii_only)
    for shape in Shape:
        told = f"{said},{TOLD[shape]},{said}".encode()
        assert scanned(shape, said.encode()) is None
        assert scanned(shape, told) == scanned(shape, TOLD[shape].encode())
