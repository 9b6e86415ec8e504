"""A second slotpin that shares nothing is noticed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotpin.pinning.topology import Slot, Topology
from slotpin.proxy.gates import Gates
from slotpin.proxy.neighbours import TWICE_SECONDS, Strangers
from tests.real.servers import Llama, Slotpin, llama
from tests.sharing.pair import sharing, slotpins, warned
from tests.sharing.redis import redis_server
from tests.support.clock import Clock
from tests.support.processes import wait_until
from tests.support.program import run


@pytest.fixture(scope="module")
def server() -> Iterator[Llama]:
    with llama() as running:
        yield running


def port_of(proxy: Slotpin) -> int:
    return int(proxy.url.rpartition(":")[2])


def strangers(proxy: Slotpin) -> list[int]:
    found: list[int] = sharing(proxy)["strangers"]
    return found


def test_on_the_same_machine_by_its_lock(tmp_path: Path, server: Llama) -> None:
    with slotpins(tmp_path, server.url) as (one, other):
        pids = [each.program.process.pid for each in (one, other)]
        (warning,) = [event for proxy in (one, other) for event in warned(proxy, "second_slotpin")]
        assert any(str(pid) in warning["message"] for pid in pids)
        ask = json.loads((tmp_path / "0" / "slotpin.json").read_text()) | {"listen": {"port": port_of(one)}}
        (tmp_path / "0" / "doctor.json").write_text(json.dumps(ask))
        assert (strangers(one), strangers(other)) == ([pids[1]], [pids[0]])
        doctor = run(tmp_path / "0", "doctor", "--config", "doctor.json")
        assert doctor.returncode == 2
        assert f"(process {pids[1]}) is in front of the same llama-server" in doctor.stdout
        one.program.process.send_signal(signal.SIGKILL)
        one.program.process.wait()
        wait_until(lambda: strangers(other) == [], "a killed one is no neighbour")


def test_not_where_both_share_the_slots(tmp_path: Path, server: Llama) -> None:
    with (
        redis_server(tmp_path / "redis") as redis,
        slotpins(tmp_path, server.url, redis=redis.url) as both,
    ):
        for proxy in both:
            assert strangers(proxy) == []
            assert warned(proxy, "second_slotpin") == []


def test_not_in_front_of_another_server(tmp_path: Path, server: Llama) -> None:
    with llama() as another, slotpins(tmp_path / "a", server.url, count=1) as (one,):
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "cache").symlink_to(tmp_path / "a" / "cache")
        with slotpins(tmp_path / "b", another.url, count=1) as (other,):
            assert strangers(one) == strangers(other) == []
            assert warned(other, "second_slotpin") == []


def test_elsewhere_by_requests_that_did_not_come_through_here() -> None:
    """Twice, a while apart; what slotpin itself passes on unread is none."""
    clock, told = Clock(), []
    found = Strangers(clock, lambda: told.append(clock.now))
    found.passed_on_at = clock.now
    found.seen()
    clock.now += TWICE_SECONDS
    found.seen()
    clock.now += 1
    found.seen()
    assert told == []
    clock.now += TWICE_SECONDS
    found.seen()
    found.seen()
    assert told == [clock.now]


def test_a_busy_slot_is_a_strangers_only_if_none_of_ours_can_be_there() -> None:
    async def no_look() -> Topology:
        raise AssertionError

    busy = Topology((Slot(0, 4096, busy=True), Slot(1, 4096)))
    gates = Gates(no_look, Clock(1000))
    assert gates.suspect(busy, 1000)
    assert not gates.suspect(busy, 1000), "it is closed already"
    assert not Gates(no_look, Clock(1000)).suspect(Topology((Slot(0, 4096), Slot(1, 4096))), 1000)
