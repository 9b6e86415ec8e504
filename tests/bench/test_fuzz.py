"""Damaged requests against the real proxy, and that `bench.fuzz` sees what it is there to see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.fuzz import Met, Report, fuzz
from bench.fuzz_cases import SEEDS, Case, make_case
from bench.fuzz_upstream import running_upstream

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CASE = Case(7, b"", "damaged anywhere")
COMPLETE = Case(7, b"", "odd byte in the body", complete=True)


def test_damaged_requests_do_no_harm(tmp_path: Path) -> None:
    report = asyncio.run(fuzz(3000, 3, tmp_path))
    assert report.faults == []
    for kind, outcomes in report.outcomes.items():
        assert outcomes["2xx"] > 50, (kind, outcomes)  # they get through to the server too
    assert report.outcomes["odd byte in the head"]["4xx"] > 50


def test_cases_repeat_and_cover_every_byte_of_every_seed() -> None:
    assert [make_case(number, 1) for number in range(200)] == [make_case(number, 1) for number in range(200)]
    assert make_case(4, 1) != make_case(4, 2)
    first = SEEDS[0]
    swept = {make_case(2 * len(SEEDS) * round + 1, 1).raw for round in range(len(first.raw))}
    assert len(swept) >= 0.9 * len(first.raw)  # now and then an odd byte is the one that was there


@pytest.mark.parametrize(
    ("case", "met", "fault"),
    [
        (CASE, Met(OK, closed=True), ""),
        (CASE, Met(b"", closed=True), ""),
        (COMPLETE, Met(b"", closed=True), "complete, but not answered"),
        (COMPLETE, Met(b"HTTP/1.1 100 Continue\r\n\r\n", closed=True), "complete, but not answered"),
        (CASE, Met(OK, closed=False), "still open"),
        (CASE, Met(OK + b"HTTP/1.1 500 Internal Server Error\r\n\r\n", closed=True), "answered with 500"),
        (CASE, Met(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", closed=True), "answered with 503"),
        (
            CASE,
            Met(b"HTTP/1.1 503 No\r\nX-Slotpin-Role: compactor\r\nX-Slotpin-Reason: no_binding\r\n\r\n", closed=True),
            "",
        ),
    ],
)
def test_what_is_a_fault(case: Case, met: Met, fault: str) -> None:
    report = Report()
    report.note(case, met)
    assert len(report.faults) == bool(fault)
    assert fault in "".join(report.faults)


@pytest.mark.parametrize(
    ("raw", "in_order"),
    [
        (b"POST /x?case=5 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"POST /x?case=5 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n", False),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: +2\r\n\r\n{}", False),
        (b"GET /x HTTP/1.1\r\nHost: a\r\nX: a\nY: b\r\n\r\n", False),
        (b"GET /x y HTTP/1.1\r\nHost: a\r\n\r\n", False),
        (b"GET /x HTTP/1.1\r\nHost : a\r\n\r\n", False),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;a\r\n{}\r\n0\r\n\r\n", False),
    ],
)
def test_the_server_behind_takes_only_what_is_in_order(raw: bytes, in_order: bool) -> None:
    async def send() -> tuple[bytes, list[str], int]:
        async with running_upstream() as upstream:
            reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
            writer.write(raw)
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError):
                answer = b""
            writer.close()
            return answer, upstream.faults, upstream.seen[5]

    answer, faults, seen = asyncio.run(send())
    assert (answer[:15] == b"HTTP/1.1 200 OK", len(faults)) == (in_order, 0 if in_order else 1)
    assert seen == in_order
