"""What a refusal says, in words that send no client into a retry that can't help."""

from __future__ import annotations

import re

import pytest

from slotpin.pinning.bindings import Binding
from slotpin.pinning.decision import Action, Decision, PinSettings, Unverified, decide_compactor, decide_main
from slotpin.pinning.reasons import EXPLANATIONS, Reason, explain
from slotpin.pinning.request import Request
from slotpin.pinning.topology import Slot, Topology, TopologyError, parse_topology

# HTTP 409: what only a person can change. HTTP 503 with Retry-After: what passes.
FOR_A_PERSON = {Reason.TOO_FEW_SLOTS, Reason.IDS_COLLIDE, Reason.EXPLICIT_CONFLICT, Reason.EXPLICIT_UNPREDICTABLE}
PASSING = {
    Reason.PROBE_FAILED,
    Reason.TOPOLOGY_INVALID,
    Reason.NO_BINDING,
    Reason.SETTINGS_CHANGED,
    Reason.TOPOLOGY_CHANGED,
    Reason.AMBIGUOUS_OVERLAP,
}

# Words on which Pi retries, and their like in other clients.
RETRY = re.compile(
    r"overloaded|server.?busy|currently busy|high demand|at capacity|rate.?limit|too many requests"
    r"|(?<![a-z0-9])(?:429|500|502|503|504|520|524)(?![a-z0-9])"
    r"|service.?(?:is.?)?(?:temporarily.?)?unavailable|server.?error|internal.?error|network.?error|connection"
    r"|socket hang up|fetch failed|timed? ?out|terminated|ended without|upstream|retry|unavailable|ECONN|ETIMEDOUT",
    re.IGNORECASE,
)


@pytest.mark.parametrize("reason", sorted(FOR_A_PERSON | PASSING))
def test_every_refusal_is_explained(reason: Reason) -> None:
    explanation = EXPLANATIONS[reason]
    assert explanation.cause and explanation.remedy
    assert explanation.passes == (reason in PASSING)
    assert explain(reason).count("\n") == 0
    assert explanation.cause in explain(reason) and explanation.remedy in explain(reason)
    assert "a detail" in explain(reason, "a detail")


@pytest.mark.parametrize("reason", sorted(EXPLANATIONS))
def test_no_explanation_makes_a_client_retry(reason: Reason) -> None:
    assert RETRY.search(explain(reason)) is None


def test_the_pattern_knows_the_words() -> None:
    for text in ("HTTP 503", "read timeout", "Timed out", "Connection refused", "a server error", "rate-limit"):
        assert RETRY.search(text), text
    for text in ("5030 slots", "a busy slot", "slot 5"):
        assert RETRY.search(text) is None, text


@pytest.mark.parametrize("reason", sorted(Reason))
def test_codes_are_plain_words(reason: Reason) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason)
    assert RETRY.search(reason) is None


@pytest.mark.parametrize("number", [429, 502])
@pytest.mark.parametrize("kind", ["where the text breaks off", "which element is wrong"])
def test_details_of_a_bad_topology_bear_no_status_number(number: int, kind: str) -> None:
    good = b'{"id":0},' * number
    body = b"[" + (b" " * (number - 1) + b"x" if kind == "where the text breaks off" else good + b'{"id":"x"}]')
    with pytest.raises(TopologyError) as caught:
        parse_topology(body)
    assert RETRY.search(explain(Reason.TOPOLOGY_INVALID, str(caught.value))) is None


def test_details_of_colliding_ids_bear_no_status_number() -> None:
    settings = PinSettings("auto", 500, 502, same_endpoint=True)
    decision = decide_main(settings, Topology((Slot(0, None), Slot(1, None))), Request())
    assert decision.reason is Reason.IDS_COLLIDE
    assert RETRY.search(explain(decision.reason, decision.detail)) is None


def test_every_refusal_that_is_decided_has_an_explanation() -> None:
    settings = PinSettings("auto", 0, 1, same_endpoint=True, generation=1)
    two = Topology((Slot(0, None), Slot(1, None)))
    safe = decide_main(settings, two, Request())
    stale = Binding("r", "c", safe, generation=0, slot_ids=two.ids)
    moved = Binding("r", "c", safe, generation=1, slot_ids=(0, 1, 2))
    refusals: list[Decision] = [
        decide_compactor(settings, Unverified(Reason.PROBE_FAILED), Request(), ()),
        decide_compactor(settings, Unverified(Reason.TOPOLOGY_INVALID), Request(), ()),
        decide_compactor(settings, Topology(()), Request(), ()),
        decide_compactor(PinSettings("auto", 0, 2, same_endpoint=True), two, Request(), ()),
        decide_compactor(settings, two, Request(), ()),
        decide_compactor(settings, two, Request(), (stale,)),
        decide_compactor(settings, two, Request(), (moved,)),
        decide_compactor(settings, two, Request(), (stale, moved)),
    ]
    assert {refusal.action for refusal in refusals} == {Action.REFUSE}
    assert [refusal.reason for refusal in refusals] == [
        Reason.PROBE_FAILED,
        Reason.TOPOLOGY_INVALID,
        Reason.TOO_FEW_SLOTS,
        Reason.IDS_COLLIDE,
        Reason.NO_BINDING,
        Reason.SETTINGS_CHANGED,
        Reason.TOPOLOGY_CHANGED,
        Reason.AMBIGUOUS_OVERLAP,
    ]
    assert {refusal.reason for refusal in refusals} <= EXPLANATIONS.keys()
