"""A mapping that keeps what was set last."""

from __future__ import annotations

from slotpin.pinning.recent import Recent


def test_what_was_set_longest_ago_makes_room() -> None:
    recent: Recent[str, int] = Recent(2)
    for key in "abc":
        recent[key] = ord(key)
    assert dict(recent) == {"b": ord("b"), "c": ord("c")}


def test_setting_anew_counts_and_looking_does_not() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = recent["b"] = 1
    recent["a"] = 2
    assert recent["b"] == recent.get("b") == 1
    recent["c"] = 3
    assert dict(recent) == {"a": 2, "c": 3}


def test_many_at_once_are_bounded_too() -> None:
    recent: Recent[int, int] = Recent(3)
    recent.update({number: number for number in range(10)})
    assert list(recent) == [7, 8, 9]
