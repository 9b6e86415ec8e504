"""Take the server's own counters out of an answer, in bytes that come in pieces of any size."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec.structs import replace

from slotpin.pinning.message_end import Shape


class Counters(msgspec.Struct, frozen=True):
    """Tokens and time of one answer (llama.cpp tools/server/server-common.cpp, server_slot_stats::to_json)."""

    evaluated: int  # prompt tokens that were evaluated
    cached: int  # prompt tokens that were re-used
    generated: int | None
    prompt_ms: float | None = None  # what the evaluation took


# Which objects of an answer have them (server-task.cpp). A chat stream has `usage` only on request, a whole Responses
# answer no `timings`. An Anthropic stream gives the prompt's part of `usage` at its start, the rest at its end.
_NAMES: dict[Shape, tuple[bytes, ...]] = {
    Shape.CHAT: (b"timings", b"usage"),
    Shape.NATIVE: (b"timings",),
    Shape.ANTHROPIC: (b"usage",),
    Shape.RESPONSES: (b"timings", b"usage"),
}
# What every such object has in it, so that one search is enough for a piece that has none: the number of re-used tokens
# (`cache_n`, `cached_tokens`); the end of an Anthropic stream lacks it.
_RE_USED, _USAGE_NAME = b'"cache', b'"usage"'
# In JSON text a quote inside a string is escaped, so generated text can't imitate a name with a colon after it. A whole
# Anthropic answer has a tool's input as JSON of its own, but `usage` comes after it, and the last one counts.
_OBJECT = re.compile(rb'"(timings|usage)"\s*+:\s*+(\{(?:[^][{}]++|\{[^][{}]*+\})*+\})')
_BEGINNING = re.compile(rb'"(?:timings|usage)"')
# At least from the beginning of such an object to the number of re-used tokens.
_KEEP = 256
# No such object is longer: `timings` has up to 11 numbers, about 350 bytes.
_LONGEST = 2048

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Timings(msgspec.Struct):
    prompt_n: _Count
    cache_n: _Count
    predicted_n: _Count | None = None
    prompt_ms: float | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None


class CounterScanner:
    """Watches an answer, streamed or not, beside the relay. Holds at most `_LONGEST` bytes between two pieces."""

    __slots__ = ("_mark", "_shape", "_tail", "_timings", "_usage")

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._mark = _USAGE_NAME if shape is Shape.ANTHROPIC else _RE_USED
        self._tail = b""
        self._timings: Counters | None = None
        self._usage: Counters | None = None

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the body."""
        if self._tail:
            piece = self._tail + piece
        if piece.find(self._mark) >= 0:  # faster than `in` for bytes
            self._scan(piece)
        elif piece[-1:] == b"\n":  # no object goes on after a line
            self._tail = b""
        else:
            self._tail = piece[-_KEEP:]

    def result(self) -> Counters | None:
        """What the server said last; None where it said nothing."""
        return self._timings or self._usage

    def _scan(self, window: bytes) -> None:
        end = 0
        for match in _OBJECT.finditer(window):
            end = match.end()
            self._read(match[1], match[2])
        beginning = _BEGINNING.search(window, max(end, len(window) - _LONGEST))
        self._tail = window[beginning.start() if beginning else max(end, len(window) - _KEEP) :]

    def _read(self, name: bytes, text: bytes) -> None:
        if name not in _NAMES[self._shape]:
            return
        try:
            if name == b"timings":
                said = _TIMINGS.decode(text)
                self._timings = Counters(said.prompt_n, said.cache_n, said.predicted_n, said.prompt_ms)
            else:
                self._read_usage(_USAGE.decode(text))
        except msgspec.DecodeError:
            return  # something else of that name

    def _read_usage(self, said: _Usage) -> None:
        if self._shape is Shape.ANTHROPIC:
            self._read_anthropic(said)
        elif self._shape is Shape.RESPONSES:
            self._take_sum(said.input_tokens, said.input_tokens_details, said.output_tokens)
        else:
            self._take_sum(said.prompt_tokens, said.prompt_tokens_details, said.completion_tokens)

    def _read_anthropic(self, said: _Usage) -> None:
        """A stream's first `usage` is about the prompt (0 generated: not known yet), its last one about the answer."""
        if said.input_tokens is not None and said.cache_read_input_tokens is not None:
            self._usage = Counters(said.input_tokens, said.cache_read_input_tokens, said.output_tokens or None)
        elif self._usage is not None and said.output_tokens is not None:
            self._usage = replace(self._usage, generated=said.output_tokens)

    def _take_sum(self, prompt: int | None, details: _Details | None, generated: int | None) -> None:
        """Without the re-used tokens' own number the sum says nothing."""
        if prompt is not None and details is not None:
            self._usage = Counters(max(0, prompt - details.cached_tokens), details.cached_tokens, generated)


_TIMINGS = msgspec.json.Decoder(_Timings)
_USAGE = msgspec.json.Decoder(_Usage)
