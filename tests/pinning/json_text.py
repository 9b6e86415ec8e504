"""Generators of JSON *text*: the same value in all the spellings that a client may send."""

from __future__ import annotations

from hypothesis import strategies as st

SPACE = st.text(" \t\r\n", max_size=2)

# Structure and our own names inside strings, text beyond ASCII, and every kind of escape.
_PLAIN = ["a", "é", "😀", "{", "}", "[", "]", ",", ":", "id_slot", "null", "\u2028", "/", " "]
_ESCAPES = [r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u005f", r"\u0022", r"\u0000", r"\ud83d\ude00"]
STRINGS = st.lists(st.sampled_from(_PLAIN + _ESCAPES), max_size=5).map(lambda pieces: '"' + "".join(pieces) + '"')

_INTEGERS = st.integers(-(10**42), 10**42).map(str)
_DIGITS = "1234567890123456789012345678901234567890"
_ODD_INTEGERS = ["0", "-0", "2147483648", "4294967297", _DIGITS]
_ODD_FLOATS = ["-0.0", "1.0", "2.00", "1e0", "1E+2", "10e-1", "1e400", "-1e400", "1e-400", "0.1", f"0.{_DIGITS}"]
_ODD_NUMBERS = st.sampled_from(_ODD_INTEGERS + _ODD_FLOATS)
NUMBERS = st.one_of(st.integers(-3, 200).map(str), _INTEGERS, _ODD_NUMBERS)
SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from(["null", "true", "false"]))

KEYS = st.one_of(
    st.sampled_from(['"id_slot"', r'"id\u005fslot"', r'"\u0069d_slot"', r'"id\u005Fslot"']),
    st.sampled_from(['"cache_prompt"', r'"cache\u005fprompt"', '"ID_SLOT"', '"id_slot "', '"messages"', '""']),
    STRINGS,
)


@st.composite
def _array(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    elements = draw(st.lists(st.tuples(SPACE, values, SPACE), max_size=3))
    return "[" + (",".join("".join(element) for element in elements) or draw(SPACE)) + "]"


@st.composite
def _object(
    draw: st.DrawFn, values: st.SearchStrategy[str], keys: st.SearchStrategy[str] = KEYS, max_size: int = 3
) -> str:
    members = draw(st.lists(st.tuples(SPACE, keys, SPACE, st.just(":"), SPACE, values, SPACE), max_size=max_size))
    return "{" + (",".join("".join(member) for member in members) or draw(SPACE)) + "}"


VALUES = st.recursive(SCALARS, lambda inner: st.one_of(_array(inner), _object(inner)), max_leaves=6)

# Whole request bodies: duplicate keys are likely, because most keys come from a short list.
BODIES = st.tuples(st.sampled_from(["", "\ufeff"]), SPACE, _object(VALUES, max_size=6), SPACE).map(
    lambda parts: "".join(parts).encode()
)


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    own = st.one_of(st.just("null"), VALUES)
    members = draw(st.lists(st.tuples(KEYS, own).map(":".join), max_size=2))
    for name in ('"id_slot"', r'"id\u005fslot"', '"cache_prompt"'):
        if draw(st.booleans()):
            members.append(f"{name}:{draw(own)}")
    return ("{" + ",".join(draw(st.permutations(members))) + "}").encode()


# Bodies in which our own members are there more often than not.
REQUESTS = _request()
