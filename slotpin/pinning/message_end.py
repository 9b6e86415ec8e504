"""Find the moment at which an answer is complete, in bytes that come in pieces of any size."""

from __future__ import annotations

import enum
import re


class Shape(enum.Enum):
    """The five forms of answer of llama-server (tools/server/server-task.cpp)."""

    CHAT = "chat"  # chat and OpenAI completions: `data: [DONE]`
    NATIVE = "native"  # /completion and /infill: the last object has `"stop": true`
    ANTHROPIC = "anthropic"  # `event: message_stop`
    RESPONSES = "responses"  # `event: response.completed | failed | incomplete`


# Each pattern is looked for after the one before it; the last one's match is the message end. In JSON text a quote or a
# line break inside a string is escaped, so generated text can't imitate any of them.
_BLANK_LINE = re.compile(rb"\r?\n\r?\n|\r\r")
_MARKS: dict[Shape, tuple[re.Pattern[bytes], ...]] = {
    Shape.CHAT: (re.compile(rb"[\r\n]data: ?\[DONE\]"),),
    Shape.NATIVE: (re.compile(rb'"stop" ?: ?true'), _BLANK_LINE),
    Shape.ANTHROPIC: (re.compile(rb"[\r\n]event: ?message_stop(?=[\r\n])"), _BLANK_LINE),
    Shape.RESPONSES: (
        re.compile(rb"[\r\n]event: ?response\.(?:completed|failed|incomplete)(?=[\r\n])"),
        _BLANK_LINE,
    ),
}
# What the first pattern's match has in it: to look for that alone is faster.
_HINTS: dict[Shape, bytes] = {Shape.CHAT: b"[DONE]", Shape.NATIVE: b"true", Shape.ANTHROPIC: b"message_stop"}
_LINE_START = b"\n"
# One byte less than the longest mark, with the line break on either side of it.
_KEEP = len(b"\nevent: response.incomplete\n") - 1


class MessageEndScanner:
    """Watches a streamed answer beside the relay. Holds at most `_KEEP` bytes between two pieces.

    `completions` is how many native answers share the stream (more than one prompt, or `n_cmpl`).
    """

    __slots__ = ("_hint", "_left", "_marks", "_step", "_tail", "ended")

    def __init__(self, shape: Shape, completions: int = 1) -> None:
        self._marks = _MARKS[shape]
        self._hint = _HINTS.get(shape, b"")
        self._left = completions if shape is Shape.NATIVE else 1
        self._step = 0
        self._tail = _LINE_START  # a stream begins at the beginning of a line
        self.ended = False

    def feed(self, piece: bytes) -> bool:
        """Take the next bytes of the body; True once the message end has been seen."""
        if self.ended:
            return True
        if self._tail is _LINE_START and piece[-1:] == b"\n" and piece.find(self._hint) < 0:
            return False  # whole lines, and none of a first mark
        window = self._tail + piece
        position = 0
        while match := self._marks[self._step].search(window, position):
            position = match.end()
            self._step += 1
            if self._step < len(self._marks):
                continue
            self._step = 0
            self._left -= 1
            if self._left == 0:
                self.ended = True
                self._tail = b""
                return True
        if self._step == 0 and window[-1:] == b"\n":
            self._tail = _LINE_START  # no first mark goes on over the end of a line
        else:
            # What a finished step has matched must not be seen again.
            self._tail = window[max(position, len(window) - _KEEP) :]
        return False
