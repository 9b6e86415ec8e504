"""Put members into the client's own JSON text; a changed byte changes the prompt, so nothing else is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}]+")
# Inside a nested value only brackets and strings matter.
_NESTED = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]|[^"\[\]{}]+', re.DOTALL)


Text = bytes | bytearray
Pieces = tuple[bytes | bytearray | memoryview, ...]


def splice(body: Text, members: Mapping[str, bytes], present: frozenset[str] = frozenset()) -> Pieces:
    """Insert `members` (name to JSON text) into `body`, the text of a JSON object that has been decoded once.

    The result comes in pieces, to be sent one after the other: a body of megabytes is not copied.

    A name in `present` already stands at the top level (as null): its last value is replaced in place, because the
    server keeps the last of two equal names, so that one put in front would lose.
    """
    replaced = {name: text for name, text in members.items() if name in present}
    if replaced:
        body = _replace_last(body, replaced)
    new = (name for name in members if name not in present)
    inserted = b",".join(b'"%s":%s' % (name.encode(), members[name]) for name in new)
    if not inserted:
        return (body,)
    brace = body.index(b"{") + 1
    first = _SPACE.match(body, brace)
    assert first is not None
    separator = b"" if body[first.end() : first.end() + 1] == b"}" else b","
    return bytes(memoryview(body)[:brace]) + inserted + separator, memoryview(body)[brace:]


def _replace_last(body: Text, members: Mapping[str, bytes]) -> Text:
    last: dict[str, tuple[int, int]] = {}
    for name, start, end in _top_level(body):
        if name in members:
            last[name] = (start, end)
    for name, (start, end) in sorted(last.items(), key=lambda item: item[1], reverse=True):
        body = body[:start] + members[name] + body[end:]
    return body


def _top_level(body: Text) -> list[tuple[str, int, int]]:
    """Name, start and end of the value of each member of the outermost object."""
    spans: list[tuple[str, int, int]] = []
    position = _skip_space(body, body.index(b"{") + 1)
    while body[position] != ord("}"):
        name_end = _end(_STRING, body, position)
        name = msgspec.json.decode(body[position:name_end], type=str)
        start = _skip_space(body, _skip_space(body, name_end) + 1)  # over the colon
        end = _value_end(body, start)
        spans.append((name, start, end))
        position = _skip_space(body, end)
        if body[position] == ord(","):
            position = _skip_space(body, position + 1)
    return spans


def _value_end(body: Text, start: int) -> int:
    if body[start] == ord('"'):
        return _end(_STRING, body, start)
    if body[start] not in b"[{":
        return _end(_SCALAR, body, start)
    depth = 0
    position = start
    while True:
        if body[position] in b"[{":
            depth += 1
        elif body[position] in b"]}":
            depth -= 1
        position = _end(_NESTED, body, position)
        if depth == 0:
            return position


def _skip_space(body: Text, position: int) -> int:
    return _end(_SPACE, body, position)


def _end(pattern: re.Pattern[bytes], body: Text, position: int) -> int:
    match = pattern.match(body, position)
    if match is None:  # the caller decoded this text, so it is well-formed
        raise ValueError(f"not JSON at byte {position}")
    return match.end()
