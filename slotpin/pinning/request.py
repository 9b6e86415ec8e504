"""The few fields of a request body that a decision reads; the body itself is never rebuilt from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from slotpin.pinning.ids import ABSENT, ClientId, read_id

_BOM = b"\xef\xbb\xbf"


class _Fields(msgspec.Struct):
    """Raw values, so that no type of value makes reading fail. The last of equal names wins, as in llama-server."""

    id_slot: msgspec.Raw = msgspec.Raw(b"")
    cache_prompt: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    model: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    n_cmpl: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class Request:
    """What a decision and the splice read of a request.

    `client_id` is its own `id_slot`. A null member counts as missing, as it does for the server: `has_cache_prompt` is
    False then. `nulls` names those of our two members that stand there as null. `route_pins`: the server heeds
    `id_slot` on this route.
    """

    client_id: ClientId = ABSENT
    has_cache_prompt: bool = False
    keeps_cache: bool = True
    nulls: frozenset[str] = frozenset()
    route_pins: bool = True


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object body, read once. `completions` is how many answers it asks for."""

    request: Request
    model: str | None
    fields: _Fields

    @property
    def streams(self) -> bool:
        return bytes(self.fields.stream) == b"true"

    @property
    def completions(self) -> int:
        """Prompts times completions each; 1 where that can't be read."""
        each = _value(self.fields.n_cmpl) or _value(self.fields.n)
        prompts = _value(self.fields.prompt)
        # A list of strings or lists is several prompts; a list with a bare token id in it is one (server-common.cpp).
        several = isinstance(prompts, list) and not any(type(prompt) is int for prompt in prompts)
        return (each if isinstance(each, int) and each > 0 else 1) * (len(prompts) if several and prompts else 1)


def read_body(body: bytes | bytearray) -> Body | None:
    """Read the fields of a request body; None when it isn't a JSON object (it is then relayed as it is)."""
    try:
        fields = _decoder.decode(memoryview(body)[3:] if body.startswith(_BOM) else body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    id_slot, cache_prompt = bytes(fields.id_slot), bytes(fields.cache_prompt)
    request = Request(
        client_id=read_id(id_slot),
        has_cache_prompt=cache_prompt not in (b"", b"null"),
        keeps_cache=cache_prompt != b"false",
        nulls=frozenset(name for name, raw in (("id_slot", id_slot), ("cache_prompt", cache_prompt)) if raw == b"null"),
    )
    model = _value(fields.model)
    return Body(request, model if isinstance(model, str) else None, fields)


@dataclass(frozen=True, slots=True)
class Opening:
    """The first system text and the first user text of a request, as far as they can be found."""

    system: str = ""
    user: str = ""


def read_opening(body: Body) -> Opening:
    """Find the opening texts in any of the five request shapes; what can't be read is empty."""
    fields = body.fields
    system = _content(_value(fields.system)) or _content(_value(fields.instructions))
    user = ""
    for raw in (fields.messages, fields.input, fields.prompt):
        value = _value(raw)
        if isinstance(value, str):
            user = user or value
        elif isinstance(value, list):
            for message in value:
                if not isinstance(message, dict):
                    continue
                role = message.get("role")
                if role in ("system", "developer"):
                    system = system or _content(message.get("content"))
                elif role == "user" and not user:
                    user = _content(message.get("content"))
                if user and system:
                    break
    return Opening(system, user)


def _content(value: object) -> str:
    """Text of a message: a string, or the first text part of a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                return text
    return ""


def _value(raw: msgspec.Raw) -> Any:
    data = bytes(raw)
    if not data:
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
