"""The splice adds members to the client's own bytes and changes nothing else."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings

from slotpin.pinning.ids import ABSENT
from slotpin.pinning.request import read_body
from slotpin.pinning.splice import splice

from .json_text import BODIES, REQUESTS
from .wire import read

Pairs = list[tuple[str, Any]]

# Texts that no generated body contains.
OURS = {"id_slot": b'"@@slot@@"', "cache_prompt": b'"@@cache@@"'}


def parse(body: bytes) -> Pairs:
    """The members as sent: order, duplicates and the text of every number."""
    pairs = json.loads(
        body.decode("utf-8-sig"),
        object_pairs_hook=lambda pairs: ("object", pairs),
        parse_int=lambda text: ("number", text),
        parse_float=lambda text: ("number", text),
    )
    assert pairs[0] == "object"
    return list(pairs[1])


def addable(body: bytes) -> dict[str, bytes]:
    """Those of our members that the client left to us."""
    request = read(body)
    absent = {"id_slot": request.client_id == ABSENT, "cache_prompt": not request.has_cache_prompt}
    return {name: text for name, text in OURS.items() if absent[name]}


def last(pairs: Pairs, name: str) -> int:
    return max(index for index, pair in enumerate(pairs) if pair[0] == name)


def without_insertion(result: bytes, body: bytes) -> bytes:
    """`result` without the one run of bytes that it has more than `body`, from the first difference on."""
    start = next((i for i, (a, b) in enumerate(zip(result, body, strict=False)) if a != b), min(len(result), len(body)))
    return result[:start] + result[start + len(result) - len(body) :]


def spliced(body: bytes, members: Mapping[str, bytes], nulls: frozenset[str]) -> bytes:
    return b"".join(splice(body, members, nulls))


@settings(max_examples=200)
@given(BODIES | REQUESTS)
@example(b"{}")
@example(b"\xef\xbb\xbf \r\n{ \t}\n")
@example(b'{"id\\u005fslot":null,"id_slot":null,"cache_prompt":null}')
@example(b'{"id_slot":1,"id_slot":null}')
@example(b'{"x":{"id_slot":null},"id_slot":null,"y":[{"cache_prompt":null}]}')
@example(b'{"id_slot" : null}')
@example(b'{"a":"}","b":"\\\\","id_slot":null,"c":"{\\"id_slot\\":null"}')
@example(b'{"n":[1e400,-0,-0.0,1234567890123456789012345678901234567890]}')
def test_the_result_is_the_input_and_our_members(body: bytes) -> None:
    members, nulls = addable(body), read(body).nulls
    result = spliced(body, members, nulls)

    before, after = parse(body), parse(result)
    ours = {name: json.loads(text) for name, text in members.items()}
    for name in nulls & members.keys():
        before[last(before, name)] = (name, ours[name])
    new = [(name, value) for name, value in ours.items() if name not in nulls]
    for pair in new:
        after.remove(pair)
    assert after == before
    # The server keeps the last of equal members, as dict() does.
    assert dict(parse(result)) == {**dict(before), **ours}


@settings(max_examples=200)
@given(BODIES | REQUESTS)
@example(b" {} ")
@example(b'\xef\xbb\xbf{"id_slot":null}')
@example(b'{"cache_prompt": null , "id_slot":\tnull\n}')
def test_every_other_byte_is_unchanged(body: bytes) -> None:
    members, nulls = addable(body), read(body).nulls
    result = spliced(body, members, nulls)

    for name in nulls & members.keys():
        assert result.count(members[name]) == 1
        result = result.replace(members[name], b"null")
    assert without_insertion(result, body) == body


@given(BODIES)
def test_without_members_the_body_is_the_same(body: bytes) -> None:
    assert spliced(body, {}, read(body).nulls) == body


@pytest.mark.parametrize("at_end", [b"", b',"id_slot":null', b', "id\\u005fslot" : null , "cache_prompt":null '])
def test_a_big_body_keeps_its_digest(at_end: bytes) -> None:
    text = json.dumps('line one\nsaid "yes" \\ {not: [json} é 😀 ' * 110_000, ensure_ascii=False).encode()
    assert len(text) > 5_000_000
    body = b'{"model":"m","messages":[{"role":"user","content":' + text + b'}],"n":1e400' + at_end + b"}"
    result = spliced(body, OURS, read(body).nulls)

    assert dict(parse(result))["id_slot"] == "@@slot@@"
    assert dict(parse(result))["cache_prompt"] == "@@cache@@"
    for name in read(body).nulls:
        result = result.replace(OURS[name], b"null")
    for name, value in OURS.items():
        result = result.replace(b'"%s":%s,' % (name.encode(), value), b"")
    assert hashlib.sha256(result).digest() == hashlib.sha256(body).digest()


def test_a_long_string_before_a_null_costs_no_multiple_of_its_memory() -> None:
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'","id_slot":null}'
    tracemalloc.start()
    try:
        splice(body, {"id_slot": b"0"}, frozenset({"id_slot"}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(body)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"{}"', b"1", b"{", b'{"a":}', b'{"a":1} x', b'{"a":01}', b"{'a':1}", b'{"a":1,}']
)
def test_what_is_not_a_json_object_is_never_spliced(body: bytes) -> None:
    assert read_body(body) is None
