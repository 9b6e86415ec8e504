"""The few fields of a request body that a decision reads; the body itself is never rebuilt from them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Any

import msgspec

from slotpin.pinning.ids import ABSENT, ClientId, read_id

# What msgspec raises on text that is no JSON, no UTF-8, or nested too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BOM = b"\xef\xbb\xbf"


class Fields(msgspec.Struct):
    """Raw text, so that no type of value makes reading fail; empty where the member is missing.

    The last of equal names wins, as in llama-server.
    """

    id_slot: msgspec.Raw = msgspec.Raw(b"")
    cache_prompt: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    model: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    n_cmpl: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input_prefix: msgspec.Raw = msgspec.Raw(b"")
    input_suffix: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")
    session_id: msgspec.Raw = msgspec.Raw(b"")
    metadata: msgspec.Raw = msgspec.Raw(b"")


_MEMBERS = frozenset(Fields.__struct_fields__)


class _Usual(Fields):
    """Messages are told apart in the same pass: that costs no more than to skip them."""

    messages: list[msgspec.Raw] | None = None
    input: list[msgspec.Raw] | None = None


class _Odd(Fields):
    """For bodies in which one of the two is something else, such as the string that `input` may be."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_usual_decoder = msgspec.json.Decoder(_Usual)
_odd_decoder = msgspec.json.Decoder(_Odd)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_NOTHING = msgspec.Raw(b"")


# Values that are made for each request are structs: these take a fifth of a frozen dataclass's time to make.
class Request(msgspec.Struct, frozen=True):
    """What a decision and the splice read of a request.

    `client_id` is its own `id_slot`. A null member counts as missing, as it does for the server: `has_cache_prompt` is
    False then. `nulls` names those of our two members that stand there as null. `route_pins`: the server heeds
    `id_slot` on this route. `fans_out`: it asks for several completions.
    """

    client_id: ClientId = ABSENT
    has_cache_prompt: bool = False
    keeps_cache: bool = True
    nulls: frozenset[str] = frozenset()
    route_pins: bool = True
    fans_out: bool = False


class Body(msgspec.Struct, frozen=True):
    """A JSON object body, read once. `completions` is how many answers it asks for.

    `messages` and `items` are the elements of `messages` and `input`, empty where that is no list; `input_text` is an
    `input` of another type. `text` is the whole body.
    """

    request: Request
    model: str | None
    fields: Fields
    messages: Sequence[msgspec.Raw]
    items: Sequence[msgspec.Raw]
    input_text: msgspec.Raw
    text: bytes | bytearray | memoryview
    completions: int

    @property
    def streams(self) -> bool:
        return bytes(self.fields.stream) == b"true"


def read_body(body: bytes | bytearray) -> Body | None:
    """Read the fields of a request body; None when it isn't a JSON object (it is then relayed as it is)."""
    text: bytes | bytearray | memoryview = memoryview(body)[3:] if body.startswith(_BOM) else body
    found = _read_or_none(text)
    if found is None and b"\0" in body:
        text = bytes(text).partition(b"\0")[0]  # where the server's parser stops (nlohmann::json)
        found = _read_or_none(text)
    if found is None:
        return None
    fields, messages, items, input_text = found
    completions = _completions(fields)
    model = read_value(fields.model)
    return Body(
        _request(fields, completions),
        model if isinstance(model, str) else None,
        fields,
        messages,
        items,
        input_text,
        text,
        completions,
    )


def _request(fields: Fields, completions: int) -> Request:
    if not fields.id_slot and not fields.cache_prompt and completions == 1:
        return _USUAL
    id_slot, cache_prompt = bytes(fields.id_slot), bytes(fields.cache_prompt)
    return Request(
        client_id=read_id(id_slot),
        has_cache_prompt=cache_prompt not in (b"", b"null"),
        keeps_cache=cache_prompt != b"false",
        nulls=frozenset(name for name, raw in (("id_slot", id_slot), ("cache_prompt", cache_prompt)) if raw == b"null"),
        fans_out=completions > 1,
    )


_USUAL = Request()


def _completions(fields: Fields) -> int:
    """Prompts times completions each; 1 where that can't be read."""
    if not (fields.n_cmpl or fields.n or fields.prompt):
        return 1
    each = read_value(fields.n_cmpl) or read_value(fields.n)
    count = int(each) if isinstance(each, int | float) and each >= 1 else 1  # the server cuts a fraction
    if bytes(memoryview(fields.prompt)[:1]) != b"[":
        return count
    prompts = read_value(fields.prompt)
    # A list of strings or lists is several prompts; a list with a bare token id in it is one (server-common.cpp).
    several = isinstance(prompts, list) and not any(type(prompt) is int for prompt in prompts)
    return count * (len(prompts) if several and prompts else 1)


_Parts = tuple[Fields, list[msgspec.Raw], list[msgspec.Raw], msgspec.Raw]


def _read_or_none(text: bytes | bytearray | memoryview) -> _Parts | None:
    try:
        return _read(text)
    except UNREADABLE:
        return None


def _read(text: bytes | bytearray | memoryview) -> _Parts:
    try:
        usual = _usual_decoder.decode(text)
    except msgspec.ValidationError:
        odd = _odd_decoder.decode(text)
        items = _elements(odd.input)
        return odd, _elements(odd.messages), items, _NOTHING if items else odd.input
    return usual, usual.messages or [], usual.input or [], _NOTHING


def _elements(raw: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _list_decoder.decode(raw)
    except msgspec.DecodeError:  # a missing member is empty text
        return []


def read_member(body: Body, name: str) -> Any:
    """The value of a member of the outermost object; None where there is none.

    A member that `Fields` has not costs a second pass over the body.
    """
    if name in _MEMBERS:
        return read_value(getattr(body.fields, name))
    try:
        return read_value(_member_decoder(name).decode(body.text).value)
    except UNREADABLE:
        return None


@functools.lru_cache(maxsize=64)
def _member_decoder(name: str) -> msgspec.json.Decoder[Any]:
    member = msgspec.defstruct("Member", [("value", msgspec.Raw, _NOTHING)], rename={"value": name})
    return msgspec.json.Decoder(member)


class Opening(msgspec.Struct, frozen=True):
    """Texts of a request's first system message, first user message, and last message where that is the user's.

    Several where a message has several parts: Claude Code puts its name before each system text, and reminders before
    the user's words. Empty where there is none.
    """

    system: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


def read_opening(body: Body) -> Opening:
    """Find these texts in any of the five request shapes; what can't be read is empty."""
    fields = body.fields
    system = _texts(read_value(fields.system)) or _texts(read_value(fields.instructions))
    messages = (*body.messages, *body.items) if body.items else body.messages
    if not messages:
        prompt = _texts(read_value(body.input_text)) or _texts(read_value(fields.prompt))
        return Opening(system, prompt, prompt)
    last = _first_text(messages[-1:], ("user",))
    user = _first_text(messages[:-1], ("user",)) or last
    return Opening(system or _first_text(filterfalse(_NO_SYSTEM.match, messages), ("system", "developer")), user, last)


def _first_text(messages: Iterable[msgspec.Raw], roles: tuple[str, ...]) -> tuple[str, ...]:
    for each in messages:
        if read_role(each) in roles and (texts := _content(each)):
            return texts
    return ()


def read_role(element: msgspec.Raw) -> str:
    """The role of a message; empty where that is no text."""
    if found := _ROLE_IN_FRONT.match(element):
        return found[1].decode()
    try:
        role = _role_decoder.decode(element).role
    except UNREADABLE:
        return ""
    return role if isinstance(role, str) else ""


def _content(message: msgspec.Raw) -> tuple[str, ...]:
    try:
        return _texts(_content_decoder.decode(message).content)
    except UNREADABLE:
        return ()


class _WithRole(msgspec.Struct):
    role: Any = None


class _WithContent(msgspec.Struct):
    content: Any = None


# Where clients write it: that spares a pass over the message. Where a body has its system text beside the messages, or
# none, all messages but these are looked at.
_NO_SYSTEM = re.compile(rb'\{\s*"role"\s*:\s*"(?:user|assistant|tool)"')
_ROLE_IN_FRONT = re.compile(rb'\{\s*"role"\s*:\s*"([a-z]+)"')
_role_decoder = msgspec.json.Decoder(_WithRole)
_content_decoder = msgspec.json.Decoder(_WithContent)


def _texts(value: object) -> tuple[str, ...]:
    """Texts of a message: a string, or the text parts of a list."""
    if isinstance(value, str):
        return (value,) if value else ()
    parts = value if isinstance(value, list) else ()
    return tuple(text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str))


def read_value(raw: msgspec.Raw) -> Any:
    """The value of a member or an element; None where it is missing or can't be read."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return None
