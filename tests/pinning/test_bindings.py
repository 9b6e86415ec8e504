"""A binding lives from its main request's arrival to the next one of its conversation."""

from __future__ import annotations

from slotpin.pinning.bindings import Binding, Bindings
from slotpin.pinning.decision import Action, Decision
from slotpin.pinning.reasons import Reason

PINNED = Decision(Action.PIN, Reason.PINNED, slot=0, add_id=True, add_cache_prompt=True)


def main(request_id: str, conversation: str = "c") -> Binding:
    return Binding(request_id, conversation, PINNED, generation=0, slot_ids=(0, 1))


def names(bindings: Bindings, conversation: str = "c") -> list[str]:
    return [binding.request_id for binding in bindings.candidates(conversation)]


def test_an_open_binding_is_a_candidate() -> None:
    bindings = Bindings()
    assert names(bindings) == []
    bindings.open(main("1"))
    assert names(bindings) == ["1"]
    assert (bindings.open_count, bindings.ended_count) == (1, 0)


def test_an_ended_binding_serves_any_number_of_calls() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.end("1")
    for _ in range(10):
        (ticket,) = bindings.candidates("c")
        assert ticket.ended and ticket.request_id == "1" and ticket.decision == PINNED
    assert (bindings.open_count, bindings.ended_count) == (0, 1)


def test_the_next_main_request_of_the_conversation_takes_its_place() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.end("1")
    bindings.open(main("2"))
    assert names(bindings) == ["2"]
    bindings.end("2")
    assert names(bindings) == ["2"]


def test_an_abort_drops_the_binding() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.abort("1")
    assert names(bindings) == []
    bindings.open(main("2"))
    bindings.end("2")
    bindings.open(main("3"))
    bindings.abort("3")
    assert names(bindings) == []
    assert (bindings.open_count, bindings.ended_count) == (0, 0)


def test_ends_that_nobody_waits_for_do_nothing() -> None:
    bindings = Bindings()
    bindings.end("never opened")
    bindings.abort("never opened")
    bindings.open(main("1"))
    bindings.end("1")
    bindings.abort("1")  # a client that closes after the message end is success
    bindings.end("1")
    assert names(bindings) == ["1"]


def test_conversations_do_not_meet() -> None:
    bindings = Bindings()
    bindings.open(main("1", "a"))
    bindings.end("1")
    bindings.open(main("2", "b"))
    assert names(bindings, "a") == ["1"]
    assert names(bindings, "b") == ["2"]
    assert names(bindings, "other") == []


def test_overlapping_main_requests_are_all_candidates() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.open(main("2"))
    assert sorted(names(bindings)) == ["1", "2"]
    bindings.abort("2")
    assert names(bindings) == ["1"]


def test_the_earlier_of_two_that_ends_first_leaves_no_ticket() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.open(main("2"))
    bindings.end("1")
    assert names(bindings) == ["2"]
    bindings.end("2")
    assert names(bindings) == ["2"]


def test_the_later_of_two_that_ends_first_is_the_ticket() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.open(main("2"))
    bindings.end("2")
    assert sorted(names(bindings)) == ["1", "2"]
    bindings.end("1")
    assert names(bindings) == ["2"]


def test_the_later_of_two_stays_the_ticket_when_the_earlier_is_aborted() -> None:
    bindings = Bindings()
    bindings.open(main("1"))
    bindings.open(main("2"))
    bindings.end("2")
    bindings.abort("1")
    assert names(bindings) == ["2"]


def test_a_turn_that_was_overtaken_leaves_no_ticket_once_that_one_is_gone() -> None:
    """The later turn has ended, and the one after it has taken its ticket away: whoever ends now is not the latest."""
    bindings = Bindings()
    for request_id in ("1", "2"):
        bindings.open(main(request_id))
    bindings.end("2")
    bindings.open(main("3"))
    bindings.abort("3")
    assert names(bindings) == ["1"]  # still running, so still in the way
    bindings.end("1")
    assert names(bindings) == []
    assert (bindings.open_count, bindings.ended_count) == (0, 0)


def test_without_a_name_every_open_binding_and_the_last_ticket_are_candidates() -> None:
    bindings = Bindings()
    bindings.open(main("1", "a"))
    bindings.end("1")
    assert names(bindings, "") == ["1"]
    bindings.open(main("2", "b"))
    bindings.open(main("3", "c"))
    assert {"1", "2", "3"} == set(names(bindings, ""))


def test_tickets_are_bounded_and_the_oldest_goes_first() -> None:
    bindings = Bindings(max_ended=2)
    for name in "abc":
        bindings.open(main(name, name))
        bindings.end(name)
    assert names(bindings, "a") == []
    assert names(bindings, "b") == ["b"]
    assert names(bindings, "c") == ["c"]
    assert bindings.ended_count == 2
