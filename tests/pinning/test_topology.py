"""A valid topology is a JSON array of objects with distinct integer ids; other fields don't matter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpin.pinning.topology import Topology, TopologyError, parse_topology

from .json_text import VALUES

# One idle slot as the server of October 2026 lists it, shortened.
RECORDED = (
    b'[{"id":0,"n_ctx":1024,"speculative":false,"is_processing":false,"id_task":106,"n_prompt_tokens":2,'
    b'"params":{"seed":4294967295,"samplers":["penalties"]},"next_token":[{"has_next_token":true}]},'
    b'{"id":1,"n_ctx":1024,"speculative":false,"is_processing":true}]'
)


def test_a_recorded_answer() -> None:
    topology = parse_topology(RECORDED)
    assert topology.ids == (0, 1)
    assert topology.count == 2
    assert [slot.n_ctx for slot in topology.slots] == [1024, 1024]


def test_an_empty_array_is_a_topology_without_slots() -> None:
    assert parse_topology(b"[]") == Topology(())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
other_fields = st.dictionaries(st.text().filter(lambda name: name not in ("id", "n_ctx")), json_values, max_size=3)


@given(st.lists(st.integers(-(2**40), 2**40), max_size=64, unique=True), st.data())
def test_extra_and_missing_fields_do_not_matter(ids: list[int], data: st.DataObject) -> None:
    elements: list[dict[str, Any]] = [{**data.draw(other_fields), "id": slot_id} for slot_id in ids]
    for element in elements:
        if data.draw(st.booleans()):
            element["n_ctx"] = data.draw(json_values)
    assert parse_topology(json.dumps(elements).encode()).ids == tuple(ids)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=64), st.integers(0, 63))
def test_ids_must_be_distinct(ids: list[int], position: int) -> None:
    ids.insert(position, ids[0])
    with pytest.raises(TopologyError, match="same id"):
        parse_topology(json.dumps([{"id": slot_id} for slot_id in ids]).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b'{"error":{"code":501,"message":"This server does not support slots endpoint."}}',
        b"<html><body>It works!</body></html>",
        b"[0, 1]",
        b"[[0], [1]]",
        b"[null]",
        b"[{}]",
        b'[{"n_ctx":1024}]',
        b'[{"id":null}]',
        b'[{"id":"0"}]',
        b'[{"id":true}]',
        b'[{"id":0.5}]',
        b'[{"id":[0]}]',
        b'[{"id":0},{}]',
        b'[{"id":0}',
        b'[{"id":0}] [{"id":1}]',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_anything_else_is_not_a_topology(body: bytes) -> None:
    with pytest.raises(TopologyError):
        parse_topology(body)


@given(st.binary(max_size=40) | VALUES.map(str.encode) | json_values.map(lambda value: json.dumps(value).encode()))
def test_garbage_raises_nothing_else(body: bytes) -> None:
    try:
        topology = parse_topology(body)
    except TopologyError:
        return
    assert len(set(topology.ids)) == topology.count
