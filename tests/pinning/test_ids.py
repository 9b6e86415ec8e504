"""Slot ids in the spellings of JSON (design: integers and integral floats are explicit, null is absent)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning.ids import ABSENT, UNPREDICTABLE, Explicit, normalise, read_id

from .json_text import VALUES


@pytest.mark.parametrize("text", [b"", b"null"])
def test_missing_and_null_are_absent(text: bytes) -> None:
    assert read_id(text) == ABSENT


@pytest.mark.parametrize(
    ("text", "slot"),
    [("0", 0), ("1", 1), ("17", 17), ("1.0", 1), ("3.000", 3), ("-0", 0), ("-0.0", 0), ("2147483647", 2**31 - 1)],
)
def test_integers_and_integral_floats_are_explicit(text: str, slot: int) -> None:
    assert read_id(text.encode()) == Explicit(slot)


# llama-server runs each of these on slot 1, like 1.0.
@pytest.mark.parametrize("text", [b"1e0", b"1E+0", b"10e-1", b"0.1e1"])
def test_an_integral_float_may_have_an_exponent(text: bytes) -> None:
    assert read_id(text) == Explicit(1)


@pytest.mark.parametrize(
    "text",
    ["-1", "-2", "-1.0", "-2e0", "0.5", "1.5", "1.0001", "1e-1", '"1"', '""', "true", "false", "[]", "[1]", "{}"],
)
def test_what_lets_the_server_choose_is_unpredictable(text: str) -> None:
    assert read_id(text.encode()) == UNPREDICTABLE


# The server cuts numbers to 32 bits before it wraps them, so that "modulo n" does not say where they end up.
@pytest.mark.parametrize("text", [b"2147483648", b"4294967297", b"9" * 40, b"9" * 1_000_000, b"1e10", b"1e400"])
def test_what_does_not_fit_the_servers_integer_is_unpredictable(text: bytes) -> None:
    assert read_id(text) == UNPREDICTABLE


@given(VALUES)
def test_every_json_value_is_read_and_an_explicit_id_has_its_numeric_value(text: str) -> None:
    client_id = read_id(text.encode())
    if isinstance(client_id, Explicit):
        assert client_id.id == float(text)
    if client_id == ABSENT:
        assert text == "null"


@given(st.integers(0, 2**31 - 1), st.integers(1, 64))
def test_ids_wrap_modulo_the_slot_count(slot_id: int, count: int) -> None:
    slot = normalise(slot_id, count)
    assert 0 <= slot < count
    assert (slot_id - slot) % count == 0
