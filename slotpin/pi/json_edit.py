"""Changes to single members of a JSON text that leave every other byte as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Path = Sequence[str]

MISSING: Any = object()


class BadJsonError(Exception):
    """The message says where and why."""


@dataclass(frozen=True, slots=True)
class Document:
    """`plain` is the text as strict JSON: extras are blanks there, so that both have the same offsets."""

    text: str
    plain: str
    lenient: bool

    @property
    def value(self) -> Any:
        return json.loads(self.plain)


@dataclass(frozen=True, slots=True)
class _Member:
    key: str
    key_start: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Object:
    """`start` and `end` are the offsets of its two braces."""

    start: int
    end: int
    members: Sequence[_Member]

    def index(self, key: str) -> int | None:
        """Of a key that comes twice the last counts, as in JSON.parse."""
        found = [index for index, member in enumerate(self.members) if member.key == key]
        return found[-1] if found else None


def read(text: str, *, lenient: bool) -> Document:
    """`lenient`: with what Pi allows in models.json (its utils/json.ts): `//` comments and commas before a closing
    bracket. Raises BadJsonError, also when the outermost value is no object.
    """
    plain = text.replace("\ufeff", " ", 1) if text.startswith("\ufeff") else text
    if lenient:
        plain = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, plain))
    try:
        value = json.loads(plain, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadJsonError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise BadJsonError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadJsonError("is not a JSON object")
    return Document(text, plain, lenient)


_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*")
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def _blank(found: re.Match[str]) -> str:
    return found[1] or " " * len(found[0])


def _no_constant(name: str) -> Any:
    raise BadJsonError(f"{name} is not JSON")


def find(document: Document, path: Path) -> Any:
    """The value at `path`, or MISSING."""
    value = document.value
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def put(document: Document, path: Path, value: Any) -> Document:
    """With `value` at `path`; objects on the way are made. Raises BadJsonError where something else is in the way."""
    at = _root(document)
    for depth, key in enumerate(path):
        index = at.index(key)
        if index is None:
            for name in reversed(path[depth + 1 :]):
                value = {name: value}
            return _again(document, _insert(document, at, key, value))
        member = at.members[index]
        if depth == len(path) - 1:
            indent = _indent(document.text, member.key_start)
            text = document.text[: member.start] + _written(document, value, indent) + document.text[member.end :]
            return _again(document, text)
        at = _object(document, member.start, path[: depth + 1])
    return document


def put_back(document: Document, path: Path, original: Document) -> Document:
    """With what `original` has at `path`, character by character; objects that this leaves empty go with it unless the
    original has them."""
    if find(document, path) is MISSING:
        return document
    *parents, key = path
    at, member = _member(document, parents, key)
    if find(original, path) is not MISSING:
        _, before = _member(original, parents, key)
        text = document.text[: member.start] + original.text[before.start : before.end] + document.text[member.end :]
        return _again(document, text)
    document = _again(document, _without(document, at, at.index(key) or 0))
    if parents and find(document, parents) == {} and find(original, parents) is MISSING:
        return put_back(document, parents, original)
    return document


def _again(document: Document, text: str) -> Document:
    return read(text, lenient=document.lenient)


def _root(document: Document) -> _Object:
    return _object(document, _skip(document.plain, 0), ())


def _member(document: Document, parents: Path, key: str) -> tuple[_Object, _Member]:
    """One that is there."""
    at = _root(document)
    for depth, name in enumerate(parents):
        at = _object(document, at.members[at.index(name) or 0].start, parents[: depth + 1])
    return at, at.members[at.index(key) or 0]


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(plain: str, at: int) -> int:
    found = _SPACE.match(plain, at)
    return found.end() if found else at


def _object(document: Document, start: int, path: Path) -> _Object:
    plain = document.plain
    if plain[start] != "{":
        raise BadJsonError(f"$.{'.'.join(path)} is not an object")
    members = []
    at = _skip(plain, start + 1)
    while plain[at] != "}":
        key, key_end = _DECODER.raw_decode(plain, at)
        value_start = _skip(plain, _skip(plain, key_end) + 1)
        _, value_end = _DECODER.raw_decode(plain, value_start)
        members.append(_Member(key, at, value_start, value_end))
        at = _skip(plain, value_end)
        if plain[at] == ",":
            at = _skip(plain, at + 1)
    return _Object(start, at, members)


def _insert(document: Document, at: _Object, key: str, value: Any) -> str:
    """The text with one more member at the object's end."""
    text, newline = document.text, _newline(document.text)
    outer = _indent(text, at.start)
    if at.members:
        last = at.members[-1]
        own_line = text[: last.key_start].rstrip(" \t").endswith("\n")
        indent = _indent(text, last.key_start) if own_line else outer + _unit(document)
        written = f"{json.dumps(key)}: {_written(document, value, indent)}"
        return f"{text[: last.end]},{newline}{indent}{written}{text[last.end :]}"
    indent = outer + _unit(document)
    written = f"{json.dumps(key)}: {_written(document, value, indent)}"
    head, inner, tail = text[: at.start + 1], text[at.start + 1 : at.end], text[at.end :]
    if inner.strip():  # a comment
        return f"{head}{newline}{indent}{written}{inner}{tail}"
    return f"{head}{newline}{indent}{written}{newline}{outer}{tail}"


def _without(document: Document, at: _Object, index: int) -> str:
    """The text without a member and its comma; comments stay."""
    text = document.text
    member = at.members[index]
    if index + 1 < len(at.members):
        gap = _without_comma(document, member.end, at.members[index + 1].key_start).lstrip()
        return text[: member.key_start] + gap + text[at.members[index + 1].key_start :]
    if index > 0:
        before = at.members[index - 1].end
        gap = _without_comma(document, before, member.key_start).rstrip()
        return text[:before] + gap + text[member.end :]
    rest = text[at.start + 1 : member.key_start].rstrip() + _without_comma(document, member.end, at.end)
    return text[: at.start + 1] + (rest if rest.strip() else "") + text[at.end :]


def _without_comma(document: Document, start: int, end: int) -> str:
    """What stands between two members, or after the last, without the comma there."""
    text = document.text[start:end]
    comma = document.plain.find(",", start, end)
    if comma < 0:
        found = re.match(r"(?:\s|//[^\n]*)*(,)", text)
        comma = start + found.start(1) if found else -1
    return text if comma < 0 else text[: comma - start] + text[comma - start + 1 :]


def _written(document: Document, value: Any, indent: str) -> str:
    text = json.dumps(value, indent=_unit(document), ensure_ascii=False)
    return text.replace("\n", _newline(document.text) + indent)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _indent(text: str, at: int) -> str:
    """How the line with this offset is indented."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(document: Document) -> str:
    """What one level is indented by."""
    members = _root(document).members
    return (_indent(document.text, members[0].key_start) if members else "") or "  "
