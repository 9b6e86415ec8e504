"""The verdict of `bench.reuse`, and how it reads an answer."""

from __future__ import annotations

import json

import pytest

from bench.reuse import Evaluated, Row, line, read_answer, summary

BEST = Evaluated(main=4000, side=1000)
EVERYTHING = Evaluated(main=12000, side=1000)


def row(direct: Evaluated, naive: Evaluated, slotpin: Evaluated) -> Row:
    return Row("full", "keep-ram0", "disjoint", direct, naive, slotpin)


@pytest.mark.parametrize(
    ("slotpin", "verdict"),
    [
        (Evaluated(main=4000, side=1000), "ok"),
        (Evaluated(main=4080, side=1420), "ok"),
        (Evaluated(main=4081, side=1000), "main +81 (1.02 times)"),
        (Evaluated(main=4000, side=1501), "main and side +501 (1.10 times)"),
        (Evaluated(main=8000, side=1000), "main +4,000 (2.00 times), main and side +4,000 (1.80 times)"),
        (Evaluated(main=4000, side=0, refused=2), "ok, 2 refused"),
    ],
)
def test_the_better_of_the_other_two_is_the_measure(slotpin: Evaluated, verdict: str) -> None:
    assert row(BEST, EVERYTHING, slotpin).verdict == row(EVERYTHING, BEST, slotpin).verdict == verdict


def test_main_tokens_and_the_sum_each_have_their_own_best_way() -> None:
    frugal = Evaluated(main=4500, side=100)
    assert row(BEST, frugal, Evaluated(main=4000, side=1000)).verdict == "ok"
    assert row(BEST, frugal, Evaluated(main=4000, side=1100)).verdict == "main and side +500 (1.11 times)"


def test_a_row_of_the_table_and_the_summary() -> None:
    fine, short = row(EVERYTHING, BEST, BEST), row(EVERYTHING, BEST, EVERYTHING)
    assert line(fine) == (
        "| `-np 2 -kvu --no-cache-idle-slots --cache-ram 0` | disjoint compactor "
        "| 12,000 + 1,000 | 4,000 + 1,000 | 4,000 + 1,000 | ok |"
    )
    assert summary([fine, short]) == (
        "1 of 2 rows ok, 0 side requests refused. Main tokens of all rows: 24,000 direct, 8,000 naive, "
        "16,000 slotpin; 8,000 if each row had the better of the first two."
    )


def test_an_answer_is_read_streamed_or_not() -> None:
    timings = {"prompt_n": 7, "cache_n": 5}
    whole = {"choices": [{"message": {"role": "assistant", "content": "so it is"}}], "timings": timings}
    pieces: list[dict[str, object]] = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "so it "}}]},
        {"choices": [{"delta": {"content": "is"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}], "timings": timings},
    ]
    streamed = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    assert read_answer(json.dumps(whole)) == read_answer(streamed) == ("so it is", 7, 5)
