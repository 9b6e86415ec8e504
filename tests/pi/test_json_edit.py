from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pi.json_edit import MISSING, BadJsonError, find, put, put_back, read

VALUE = {"baseUrl": "http://127.0.0.1:8484/v1", "models": [{"id": "a"}]}

TEXTS = [
    "{}",
    '{\n  "providers": {}\n}\n',
    '{"providers":{"other":{"apiKey":"k"}}}',
    '{\n\t"providers": {\n\t\t"other": {"apiKey": "k"}\n\t}\n}',
    '{\r\n    "providers": {\r\n        "other": {}\r\n    }\r\n}\r\n',
    '\ufeff{"$schema": "https://x//y", "providers": {"a": {}, "b": {}}}',
    '{\n  // mine\n  "providers": {\n    "other": {"apiKey": "a//b,}"}, // the last\n  },\n}\n',
    '{\n  "providers": { // none yet\n  }\n}\n',
    '{"a": {"providers": {}}, "providers": {"x": [1, {"y": "}"}]}, "z": "\\"}"}',
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_put_in_comes_out_again_without_a_trace(text: str) -> None:
    before = read(text, lenient=True)
    after = put(before, ("providers", "slotpin"), VALUE)
    assert find(after, ("providers", "slotpin")) == VALUE
    expected = before.value
    expected.setdefault("providers", {})["slotpin"] = VALUE
    assert after.value == expected
    gone = put_back(after, ("providers", "slotpin"), before)
    assert gone.text == text


def common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_one_insertion(text: str) -> None:
    after = put(read(text, lenient=True), ("providers", "slotpin"), VALUE).text
    front, back = common(text, after), common(text[::-1], after[::-1])
    assert front + back >= len(text)


def test_new_lines_are_indented_like_the_others() -> None:
    after = put(read(TEXTS[3], lenient=True), ("providers", "slotpin"), {"a": 1}).text
    assert after == (
        '{\n\t"providers": {\n\t\t"other": {"apiKey": "k"},\n\t\t"slotpin": {\n\t\t\t"a": 1\n\t\t}\n\t}\n}'
    )
    windows = put(read(TEXTS[4], lenient=True), ("providers", "slotpin"), VALUE).text
    assert windows.count("\n") == windows.count("\r\n") > TEXTS[4].count("\n")


def test_a_value_that_was_there_comes_back_as_it_was_written() -> None:
    text = '{"providers": {"slotpin": {"baseUrl" : "x" /**/}}}'.replace(" /**/", "   ")
    before = read(text, lenient=True)
    after = put(before, ("providers", "slotpin"), VALUE)
    assert after.value["providers"]["slotpin"] == VALUE
    assert put_back(after, ("providers", "slotpin"), before).text == text


def test_objects_that_were_made_go_with_their_last_member() -> None:
    path = ("compaction", "modelOverrides", "slotpin/m")
    before = read('{"theme": "dark"}', lenient=False)
    after = put(put(before, (*path, "reserveTokens"), 1), (*path, "keepRecentTokens"), 2)
    assert after.value["compaction"] == {"modelOverrides": {"slotpin/m": {"reserveTokens": 1, "keepRecentTokens": 2}}}
    gone = put_back(put_back(after, (*path, "reserveTokens"), before), (*path, "keepRecentTokens"), before)
    assert gone.text == before.text


def test_comments_stay_where_a_member_between_others_goes() -> None:
    text = '{\n  "a": 1, // one\n  "slotpin": 2, // two\n  // three\n  "b": 3,\n}'
    gone = put_back(read(text, lenient=True), ("slotpin",), read("{}", lenient=True))
    assert gone.value == {"a": 1, "b": 3}
    assert all(comment in gone.text for comment in ("// one", "// two", "// three"))
    last = put_back(gone, ("b",), read("{}", lenient=True))
    assert last.value == {"a": 1}
    assert "// three" in last.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "providers": {\n', "line 3, column 1: "),
        ('{"a": }', "line 1, column 7: "),
        ("[]", "is not a JSON object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": 1 /* no */}', "line 1, column 9: "),
    ],
)
def test_what_can_not_be_read(text: str, message: str) -> None:
    with pytest.raises(BadJsonError) as caught:
        read(text, lenient=True)
    assert str(caught.value).startswith(message)


def test_comments_are_an_error_where_pi_takes_none() -> None:
    with pytest.raises(BadJsonError, match="line 1, column 3"):
        read("{ // x\n}", lenient=False)


def test_something_else_in_the_way() -> None:
    with pytest.raises(BadJsonError, match=r"^\$\.providers is not an object$"):
        put(read('{"providers": []}', lenient=True), ("providers", "slotpin"), 1)


KEYS = st.text(alphabet='ab"/\\,}]\u00e9 ', max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), KEYS, KEYS, VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_any_object(
    content: dict[str, Any], outer: str, inner: str, value: Any, indent: int | str | None, ascii_only: bool
) -> None:
    text = json.dumps(content, indent=indent, ensure_ascii=ascii_only)
    before = read(text, lenient=True)
    assert before.value == content
    if not isinstance(content.get(outer, {}), dict):
        return
    after = put(before, (outer, inner), value)
    content.setdefault(outer, {})[inner] = value
    assert after.value == content
    gone = put_back(after, (outer, inner), before)
    assert gone.value == before.value
    assert find(gone, (outer, inner)) is MISSING or gone.text == text
