"""`bench.proxy`: that its programs measure what they say, and how it judges."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from bench.load import Wire, run_load, running_stub, wire
from bench.proxy import measure_all
from bench.proxy_measures import METRICS, chat
from bench.proxy_page import GOALS, Results, goals, shown, tables
from bench.proxy_targets import CHAT
from slotpin.errors import UserError
from tests.support.debian import debian_program


async def eventually(stub: Wire, path: str, at_first: str) -> str:
    """What the stub says once it says something else than at first."""
    for _ in range(500):
        if (said := await stub.get(path)) != at_first:
            return said
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} still says {at_first!r}")


def test_load_and_stub_agree_on_what_was_sent(tmp_path: Path) -> None:
    async def measure() -> None:
        (tmp_path / "small").write_bytes(chat("delay=20000"))
        (tmp_path / "stream").write_bytes(chat("chunks=5 gap=10000", stream=True))
        with running_stub(4, tmp_path) as port:
            small = await run_load(port, CHAT, tmp_path / "small", connections=2, seconds=60, requests=6)
            assert (small.answered, small.failed, small.delay.count) == (6, 0, 0)
            assert small.latency.p50 >= 20_000_000  # as late as was asked for
            stream = await run_load(port, CHAT, tmp_path / "stream", connections=3, seconds=0)
            assert (stream.answered, stream.delay.count, stream.first.count) == (3, 15, 3)
            assert stream.latency.p50 >= 30_000_000
            async with wire(port) as stub:
                assert await stub.get("/bench/tasks") == "9"
                assert len(json.loads(await stub.get("/slots"))) == 4

    asyncio.run(measure())


def test_a_target_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(chat(""))
    with pytest.raises(UserError, match="connect"):
        asyncio.run(run_load(1, CHAT, tmp_path / "body", connections=1, seconds=1))


def test_the_stub_tells_when_a_client_left(tmp_path: Path) -> None:
    async def leave() -> str:
        with running_stub(4, tmp_path) as port:
            async with wire(port) as stub:
                async with wire(port) as client:
                    client.post(CHAT, chat("chunks=2 delay=3600000000 id=17", stream=True), "leaver")
                    assert await eventually(stub, "/bench/tasks", "0") == "1"
                return await eventually(stub, "/bench/closed", "")

    assert asyncio.run(leave()).split()[0] == "17"


def test_each_session_says_something_of_its_own_in_a_body_of_any_size() -> None:
    for size in (600, 50_000, 5_000_000):
        body = chat("", size)
        assert body.index(b"#SESSION") < 1000
        assert 0.5 * size < len(body) < 1.01 * size
        assert json.loads(body)["messages"][0]["content"].startswith("@bench @")


def test_slotpin_is_measured_while_it_pins() -> None:
    results = Results()
    measures, targets = ["small", "streams", "abort"], ["direct", "slotpin"]
    asyncio.run(measure_all(measures, targets, 1, 0.02, results))
    assert (results.missing, results.failed) == ({}, {})
    assert results.series(METRICS["small"][0], "slotpin")[0] > 0
    assert results.median("abort.seen", "slotpin") == 100
    page = tables(results, measures, targets)
    assert all(metric.title in page for measure in measures for metric in METRICS[measure])
    # Each of its figures is there.
    assert "| - |" not in page


def test_a_figure_is_the_median_of_the_rounds_and_a_ratio_that_of_their_ratios() -> None:
    results = Results()
    for direct, slotpin, nginx in ((10, 110, 60), (20, 320, 120), (10, 1010, 110)):
        for target, figure in (("direct", direct), ("slotpin", slotpin), ("nginx", nginx)):
            results.add("small", target, {"p50.1": figure})
    assert results.median("small.p50.1", "slotpin") == 300  # of 100, 300, 1000 above direct
    assert results.ratio("small.p50.1", "slotpin", "nginx") == 3  # of 2, 3, 10
    assert "| added p50, 1 connection, to nginx | ≤ 3 x; further ≤ 2 | 3.00 x, yes | - |" in goals(results)


@pytest.mark.parametrize(("figure", "verdict"), [(0.2, "no"), (0.4, "yes"), (0.6, "further")])
def test_where_more_is_better_a_goal_bounds_from_below(figure: float, verdict: str) -> None:
    results = Results()
    results.add("small", "nginx", {"rate.64": 1000})
    results.add("small", "slotpin", {"rate.64": 1000 * figure})
    goal = next(goal for goal in GOALS if "requests a second" in goal.text)
    assert goal.verdict(results, "slotpin").strip("*").endswith(verdict)


def test_three_digits_are_shown() -> None:
    assert [shown(figure) for figure in (0.1234, 9.876, 12.345, 1234.5)] == ["0.12", "9.88", "12.3", "1,234"]


def test_a_program_of_a_debian_package_is_found_outside_of_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    debian_program.cache_clear()
    try:
        nginx = debian_program("nginx")
    finally:
        debian_program.cache_clear()
    done = subprocess.run([nginx.path, "-v"], env=dict(nginx.environment), capture_output=True, text=True)
    assert done.stderr.startswith("nginx version")
