"""What a request says, as digests: enough to recognise its conversation, nothing of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from slotpin.pinning.message_end import Shape
from slotpin.pinning.request import Body, read_role

_SYSTEM = ("system", "developer")
# Names that may be shown: a role is the client's own text, and could be anything.
_ROLES = frozenset({*_SYSTEM, "user", "assistant", "tool", "function"})
_ITEM_TYPES = frozenset({"reasoning", "item_reference", "function_call", "function_call_output"})

# A prompt without messages is cut into blocks of so many bytes of its JSON text.
_BLOCK = 1024
# All fill-in-the-middle requests of a model are one conversation: each is about another place of the same files.
_INFILL = xxh3_64_intdigest(b"infill")
_NOTHING = xxh3_64_intdigest(b"")

# Anthropic's marks for its own cache wander from message to message; llama-server doesn't read them.
_MARK = re.compile(rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,\s*')
_NAME = b'"cache_control"'
_END = 200  # a mark further from its message's end than this doesn't wander
# A client that marks a message whose content is a string makes a list of one part of it, and later a string again.
# How such messages begin and end, and a seed for each role; in the spellings of JavaScript and of Python.
_FORMS = tuple(
    (f'{{"role":{space}"{role}",{space}"content":{space}{opens}"'.encode(), closes, seed)
    for space in ("", " ")
    for seed, role in ((1, "user"), (2, "assistant"))
    for opens, closes in ((f'[{{"type":{space}"text",{space}"text":{space}', b"}]}"), ("", b"}"))
)
# Claude Code stamps each request; the server blanks the stamp (server-chat.cpp, normalize_anthropic_billing_header).
_BILLING = re.compile(rb'("x-anthropic-billing-header:[^"]*?cch=)[^;"]{5}(?=;)')
# Its version ends with digits of the first message, which a compaction replaces. The prompt begins anew then, but the
# conversation is the same.
_VERSION = re.compile(rb'("x-anthropic-billing-header: cc_version=)[^;"]*(?=;)')

# What stands before such a summary: Pi (its core/messages.js). And how soon it comes in the message's JSON, in bytes.
_SUMMARY_FOLLOWS = b"The conversation history before this point was compacted into the following summary:"
_SOON = 200

_Text = bytes | msgspec.Raw


class Turn(msgspec.Struct, frozen=True):
    """Digests of 64 bits of one request.

    `messages`: in order, without the system messages at the front, of which there were `offset`. `opening`: of system
    texts and tools in their order, which is the prompt's; 0 where there are none. `compacted`: the client's summary of
    what it has cut off stands first.
    """

    messages: tuple[int, ...]
    opening: int
    offset: int
    compacted: bool = False


class Difference(msgspec.Struct, frozen=True):
    """Where a turn stops being an append of the one before: `index` as the client counts messages, `what` is its role.

    `index` is None for what isn't a message; `what` never holds text of the client's. `compacted`: the client has put a
    summary in the place of what was said there.
    """

    index: int | None
    what: str
    compacted: bool = False


def read_turn(body: Body, shape: Shape) -> Turn:
    """Read any of the request shapes. Those without anything that can be read are all of one conversation."""
    turn = _read(body, shape)
    return turn if turn.messages else msgspec.structs.replace(turn, messages=(_NOTHING,))


def _read(body: Body, shape: Shape) -> Turn:
    fields = body.fields
    if shape is Shape.NATIVE:
        return Turn((_INFILL,) if _fills(body) else _prompt(fields.prompt), 0, 0)
    if shape is Shape.CHAT and not body.messages and fields.prompt:  # OpenAI completions
        return Turn(_prompt(fields.prompt), 0, 0)
    elements = body.items if shape is Shape.RESPONSES else body.messages
    if shape is Shape.RESPONSES and not elements:
        return Turn(_prompt(body.input_text), _digest_of(_head(body, shape)), 0)
    offset = _offset(elements)
    digests = tuple(map(_digest_without_marks if shape is Shape.ANTHROPIC else xxh3_64_intdigest, elements[offset:]))
    compacted = bool(digests) and _SUMMARY_FOLLOWS in bytes(memoryview(elements[offset])[:_SOON])
    return Turn(digests, _digest_of((*_head(body, shape), *elements[:offset])), offset, compacted)


def role_at(body: Body, index: int) -> str:
    """The role of the message at the client's own index, or the type of an item without one; empty if unknown."""
    elements = body.messages or body.items
    return _role(elements[index]) if 0 <= index < len(elements) else ""


def difference(old: Turn, new: Turn, body: Body) -> Difference | None:
    """Where `new`, read from `body`, is no append of `old`; None where it is one."""
    if new.messages == (_INFILL,):
        return Difference(None, "code around the cursor")
    if old.opening != new.opening:
        return Difference(None, "system text or tools")
    if new.messages[: len(old.messages)] == old.messages:
        return None
    if not (body.messages or body.items):
        return Difference(None, "prompt text")
    common = common_prefix(old.messages, new.messages)
    index = new.offset + common
    return Difference(index, role_at(body, index), compacted=new.compacted and common == 0)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many digests two lists have in common from the front."""
    shorter = min(len(one), len(other))
    return next((index for index in range(shorter) if one[index] != other[index]), shorter)


def _offset(elements: Sequence[msgspec.Raw]) -> int:
    """How many system messages stand at the front; where there is nothing else, they are what the request says: 0."""
    for index, element in enumerate(elements):
        if _role(element) not in _SYSTEM:
            return index
    return 0


class _Item(msgspec.Struct):
    type: str = ""


_item_decoder = msgspec.json.Decoder(_Item)


def _role(element: msgspec.Raw) -> str:
    if role := read_role(element):
        return role if role in _ROLES else ""
    try:
        kind = _item_decoder.decode(element).type
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return kind if kind in _ITEM_TYPES else ""


def _fills(body: Body) -> bool:
    """/infill asks for both of these; /completion doesn't read them (server-context.cpp)."""
    return bool(body.fields.input_prefix and body.fields.input_suffix)


def _prompt(raw: msgspec.Raw) -> tuple[int, ...]:
    """Blocks of a prompt's JSON text stand for messages. The last, incomplete one grows with the next turn and so tells
    nothing, unless there is no other."""
    text = memoryview(raw)[:-1]  # without the closing quote or bracket, which moves
    if text.nbytes <= 1:
        return ()
    whole = text.nbytes // _BLOCK * _BLOCK
    return tuple(xxh3_64_intdigest(text[at : at + _BLOCK]) for at in range(0, whole or 1, _BLOCK))


def _head(body: Body, shape: Shape) -> tuple[_Text, ...]:
    """What stands before the messages in the rendered prompt."""
    fields = body.fields
    if shape is Shape.ANTHROPIC:
        system = _VERSION.sub(rb"\1", _BILLING.sub(rb"\1", bytes(fields.system)))
        return _MARK.sub(b"", system), _MARK.sub(b"", bytes(fields.tools))
    return (fields.instructions if shape is Shape.RESPONSES else b""), fields.tools


def _digest_of(texts: Iterable[_Text]) -> int:
    digests = [0 if _is_empty(text) else xxh3_64_intdigest(text) for text in texts]
    return xxh3_64_intdigest(repr(digests).encode()) if any(digests) else 0


def _is_empty(text: _Text) -> bool:
    return not text or (memoryview(text).nbytes <= 4 and bytes(text) in (b"null", b"[]"))


def _digest_without_marks(message: msgspec.Raw) -> int:
    """The same for all spellings between which a wandering mark makes a message change."""
    data = bytes(message)
    if data.find(_NAME, -_END) >= 0:
        data = _MARK.sub(b"", data)
    for opens, closes, seed in _FORMS:
        if data.startswith(opens):
            # What lies between the two ends may be several parts: it needs no understanding to be different.
            return xxh3_64_intdigest(data[len(opens) :].removesuffix(closes), seed)
    return xxh3_64_intdigest(data)
