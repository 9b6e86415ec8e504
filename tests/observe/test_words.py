"""What `slotpin explain` says."""

from __future__ import annotations

import pytest

from slotpin.observe.records import OUTCOMES, UNDER_WAY, WAITING
from slotpin.observe.words import explained
from slotpin.pinning.reasons import Reason
from slotpin.pinning.reuse import REMEDIES, Cause
from tests.observe.made import record
from tests.test_docs import outcomes


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_words(reason: Reason) -> None:
    words = dict(explained(record(reason=reason, warnings=(reason,))))
    assert f"({reason}): " in words["Slot"]
    assert len(words["Slot"].split(": ", 1)[1]) > 20
    assert "Warning" not in words  # it is said already


@pytest.mark.parametrize("outcome", [*OUTCOMES, UNDER_WAY, WAITING])
def test_each_outcome_has_words(outcome: str) -> None:
    assert dict(explained(record(outcome=outcome)))["Outcome"].startswith(f"{outcome}: ")


def test_the_outcomes_are_those_of_an_exchange() -> None:
    assert set(OUTCOMES) == set(outcomes())


@pytest.mark.parametrize("cause", Cause)
def test_a_lost_cache_is_explained_with_its_remedy(cause: Cause) -> None:
    said = dict(explained(record(evaluated=700, cached=112, expected=812, lost=700, cause=cause)))["Cache"]
    assert "700 of 812 were lost" in said
    assert REMEDIES[cause].remedy in said


def test_a_cache_that_was_kept() -> None:
    said = dict(explained(record()))["Cache"]
    assert said == (
        "812 of 846 prompt tokens were re-used, 34 evaluated in 0.04 s; "
        "all that the last turn left (812) was found again"
    )


def test_a_pinned_request_is_in_the_slot_kept_for_its_kind() -> None:
    assert dict(explained(record()))["Slot"].endswith("in the slot that is kept for this conversation")
    assert dict(explained(record(conversation=None)))["Slot"].endswith("in the slot that is kept for main requests")
    assert dict(explained(record(role="compactor")))["Slot"].endswith("in the slot that is kept for side requests")


def test_large_numbers_are_written_as_in_the_status() -> None:
    said = dict(explained(record(cached=81_200, evaluated=3_400, expected=81_200)))["Cache"]
    assert said.startswith("81,200 of 84,600 prompt tokens were re-used, 3,400 evaluated ")


def test_a_refusal() -> None:
    refused = record(
        role="compactor",
        found_by="header",
        action="refuse",
        reason="too_few_slots",
        slot=None,
        outcome="refused",
        evaluated=None,
        cached=None,
        waited=None,
        conversation=None,
    )
    words = dict(explained(refused))
    assert words["Role"] == "compactor: its X-Slotpin-Role header says so"
    assert words["Slot"].startswith("none (too_few_slots): llama-server has fewer than two slots; start it with")
    assert words["Cache"] == "nothing was evaluated"
    assert not {"Gate", "Conversation"} & words.keys()


def test_a_recogniser_is_named_and_so_is_a_wait() -> None:
    words = dict(explained(record(found_by="pi-summary", waited=2.5)))
    assert "pi-summary" in words["Role"]
    assert words["Gate"] == "it waited 2.50 s for its slot"


def test_a_warning_that_is_not_the_reason_is_said() -> None:
    assert dict(explained(record(warnings=("cache_prompt_off",))))["Warning"].startswith("cache_prompt_off: the client")
