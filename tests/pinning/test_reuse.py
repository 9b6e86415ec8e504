"""Expected, got, lost, and the cause: one test a row, and what holds for all evidence."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slotpin.pinning.counters import Counters
from slotpin.pinning.reuse import ENDING, REMEDIES, Cause, Evidence, Left, Reuse, advise, assess
from slotpin.pinning.turn import Difference
from tests.pinning.test_reasons import RETRY

LEFT = Left(prompt=4000, generated=300, slot=0, epoch=1, n_ctx=16384)
# All that can be known of a good turn: same server, same slot, looked at, nothing in between.
GOOD = Evidence(epoch=1, slot=0, emptied=False, other_ran=False, held=True, difference=None)
CHANGED = Difference(3, "assistant")
ALL_LOST = Counters(evaluated=4400, cached=0, generated=10)


def counted(evaluated: int, cached: int) -> Counters:
    return Counters(evaluated, cached, generated=10)


def changed(evidence: Evidence, **fields: object) -> Evidence:
    return replace(evidence, **fields)


@pytest.mark.parametrize(
    ("left", "counters", "expected", "got", "lost"),
    [
        pytest.param(None, counted(4000, 0), 0, 0, 0, id="a first turn expects nothing"),
        pytest.param(None, counted(100, 900), 0, 900, 0, id="and may find another conversation's beginning"),
        pytest.param(LEFT, counted(20, 4300), 4000, 4300, 0, id="prompt and answer came back"),
        pytest.param(LEFT, counted(320, 4000), 4000, 4000, 0, id="the answer did not: no loss"),
        pytest.param(LEFT, counted(1, 3999), 3999, 3999, 0, id="the same prompt again: its last token is evaluated"),
        pytest.param(LEFT, counted(1, 1499), 1499, 1499, 0, id="a shorter prompt can't have more than itself"),
        pytest.param(LEFT, counted(4400, 0), 4000, 0, 4000, id="all lost"),
        pytest.param(LEFT, counted(3400, 1000), 4000, 1000, 3000, id="partly lost"),
        pytest.param(LEFT, counted(0, 0), 0, 0, 0, id="an empty prompt"),
    ],
)
def test_the_figures(left: Left | None, counters: Counters, expected: int, got: int, lost: int) -> None:
    reuse = assess(left, counters, GOOD)
    assert (reuse.expected, reuse.got, reuse.lost) == (expected, got, lost)
    assert (reuse.cause is None) == (lost == 0)


@pytest.mark.parametrize(
    ("left", "evidence", "cause", "detail"),
    [
        pytest.param(LEFT, changed(GOOD, epoch=2), Cause.SERVER_RESTARTED, "", id="restarted"),
        pytest.param(LEFT, changed(GOOD, emptied=True, held=False), Cause.SLOTS_CLEARED, "slot 0", id="cleared"),
        pytest.param(
            LEFT,
            changed(GOOD, emptied=True, held=False, slot=None),
            Cause.SLOTS_CLEARED,
            "slot 0",
            id="cleared, and so not pinned",
        ),
        pytest.param(LEFT, changed(GOOD, other_ran=True), Cause.OTHER_REQUEST, "slot 0", id="other request"),
        pytest.param(
            LEFT, changed(GOOD, difference=CHANGED), Cause.PROMPT_CHANGED, "message 3 (assistant)", id="a message"
        ),
        pytest.param(
            LEFT,
            changed(GOOD, difference=Difference(None, "system text or tools")),
            Cause.PROMPT_CHANGED,
            "system text or tools",
            id="no message",
        ),
        pytest.param(
            LEFT,
            changed(GOOD, difference=Difference(0, "system")),
            Cause.PROMPT_CHANGED,
            "message 0 (system)",
            id="the first message",
        ),
        pytest.param(replace(LEFT, n_ctx=4300), GOOD, Cause.CONTEXT_FULL, "slot 0", id="context full"),
        pytest.param(
            replace(LEFT, n_ctx=4000, generated=None), GOOD, Cause.CONTEXT_FULL, "slot 0", id="full of the prompt alone"
        ),
        pytest.param(replace(LEFT, n_ctx=4301), GOOD, Cause.WINDOW, "slot 0", id="one token less than full"),
        pytest.param(replace(LEFT, n_ctx=None), GOOD, Cause.WINDOW, "slot 0", id="window"),
        pytest.param(LEFT, changed(GOOD, held=None), Cause.UNKNOWN, "slot 0", id="nobody looked"),
        pytest.param(LEFT, changed(GOOD, held=False), Cause.UNKNOWN, "slot 0", id="looked: empty, and that is no news"),
        pytest.param(
            LEFT,
            changed(GOOD, slot=2),
            Cause.OTHER_REQUEST,
            "last turn on slot 0, this one on slot 2",
            id="another slot",
        ),
        pytest.param(
            replace(LEFT, slot=None),
            GOOD,
            Cause.UNKNOWN,
            "last turn on a slot of the server's choice, this one on slot 0",
            id="newly pinned",
        ),
    ],
)
def test_the_cause_of_a_total_loss(left: Left, evidence: Evidence, cause: Cause, detail: str) -> None:
    assert assess(left, ALL_LOST, evidence) == Reuse(4000, 0, 4000, cause, detail)


def test_a_part_found_again_is_no_sign_of_a_window() -> None:
    """A model that can't go back begins at token 0; a template that leaves something out keeps what is before it."""
    assert assess(LEFT, counted(4399, 1), GOOD).cause is Cause.UNKNOWN
    assert assess(LEFT, counted(4400, 0), GOOD).cause is Cause.WINDOW


def test_what_the_client_compacted_is_not_worth_a_warning() -> None:
    for difference, worth in ((CHANGED, True), (replace(CHANGED, compacted=True), False)):
        assert assess(LEFT, ALL_LOST, changed(GOOD, difference=difference)).worth_a_warning is worth


def test_causes_are_looked_for_in_their_order() -> None:
    """Each piece of evidence wins over all that come after it."""
    left = replace(LEFT, n_ctx=4300)
    compacted = replace(CHANGED, compacted=True)
    evidence = Evidence(epoch=2, slot=0, emptied=True, other_ran=True, held=True, difference=compacted)
    found = [assess(left, ALL_LOST, evidence).cause]
    changes = ({"epoch": 1}, {"emptied": False}, {"other_ran": False}, {"difference": CHANGED}, {"difference": None})
    for without in changes:
        evidence = changed(evidence, **without)
        found.append(assess(left, ALL_LOST, evidence).cause)
    found.append(assess(LEFT, ALL_LOST, evidence).cause)
    found.append(assess(LEFT, ALL_LOST, changed(evidence, held=None)).cause)
    assert found == list(Cause)


@pytest.mark.parametrize(("lost", "cause"), [(1, None), (32, None), (33, Cause.OTHER_REQUEST)])
def test_the_end_of_a_prompt_is_no_loss_to_look_into(lost: int, cause: Cause | None) -> None:
    reuse = assess(LEFT, counted(400 + lost, 4000 - lost), changed(GOOD, other_ran=True))
    assert (reuse.lost, reuse.cause, bool(reuse.detail)) == (lost, cause, cause is not None)


@pytest.mark.parametrize(
    ("expected", "lost", "warned"),
    [
        (2000, 256, False),
        (2000, 257, True),
        (2570, 257, False),  # a tenth
        (2569, 257, True),
        (60000, 6000, False),
        (60000, 6001, True),
        (257, 257, True),
        (100, 100, False),
        (0, 0, False),
    ],
)
def test_what_is_worth_a_warning(expected: int, lost: int, warned: bool) -> None:
    assert Reuse(expected, expected - lost, lost, Cause.UNKNOWN).worth_a_warning is warned


tokens = st.integers(0, 100_000)
slots = st.none() | st.integers(0, 3)
lefts = st.none() | st.builds(Left, tokens, st.none() | tokens, slots, st.integers(0, 2), st.none() | tokens)
differences = st.none() | st.builds(Difference, st.none() | st.integers(0, 9), st.sampled_from(["user", "tool", ""]))
evidences = st.builds(
    Evidence, st.integers(0, 2), slots, st.booleans(), st.booleans(), st.none() | st.booleans(), differences
)


@given(lefts, tokens, tokens, evidences)
def test_what_holds_for_all(left: Left | None, evaluated: int, cached: int, evidence: Evidence) -> None:
    reuse = assess(left, counted(evaluated, cached), evidence)
    assert reuse.got == cached
    assert 0 <= reuse.lost <= reuse.expected <= (left.prompt if left else 0)
    assert reuse.lost == max(0, reuse.expected - cached)
    assert reuse.lost < evaluated or reuse.lost == 0  # what was lost was evaluated
    assert (reuse.cause is None) == (reuse.lost <= ENDING)
    assert reuse.cause is not None or not reuse.worth_a_warning
    assert reuse.cause is None or advise(reuse.cause, reuse.detail)


@pytest.mark.parametrize("cause", sorted(Cause))
def test_every_cause_has_a_remedy(cause: Cause) -> None:
    advice = REMEDIES[cause]
    assert advice.cause and advice.remedy
    assert not advice.cause.endswith(".") and not advice.remedy.endswith(".")
    assert advise(cause) == f"{advice.cause}; {advice.remedy}"
    assert advise(cause, "slot 7") == f"{advice.cause} (slot 7); {advice.remedy}"


@pytest.mark.parametrize("cause", sorted(Cause))
def test_no_cause_makes_a_client_try_again(cause: Cause) -> None:
    assert RETRY.search(advise(cause)) is None
    assert RETRY.search(cause) is None
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cause)


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        (Cause.SLOTS_CLEARED, "--no-cache-idle-slots"),
        (Cause.WINDOW, "--swa-full"),
        (Cause.CONTEXT_FULL, "--ctx-size"),
        (Cause.OTHER_REQUEST, "--parallel"),
        (Cause.SERVER_RESTARTED, "--sleep-idle-seconds"),
        (Cause.PROMPT_CHANGED, "client"),
    ],
)
def test_the_remedy_names_what_mends_it(cause: Cause, named: str) -> None:
    assert named in REMEDIES[cause].remedy or named in REMEDIES[cause].cause
