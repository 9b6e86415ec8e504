"""The decision table of the design, row by row, and the rules below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import pytest

from slotpin.pinning.bindings import Binding
from slotpin.pinning.decision import (
    Action,
    Decision,
    PinSettings,
    Probed,
    Unverified,
    decide_compactor,
    decide_main,
    let_pass,
)
from slotpin.pinning.reasons import Reason
from slotpin.pinning.topology import Slot, Topology

from .wire import forward, read

Mode = Literal[False, True, "auto"]


def listed(*ids: int) -> Topology:
    return Topology(tuple(Slot(slot_id, 4096) for slot_id in ids))


def slots(count: int) -> Topology:
    return listed(*range(count))


def settings(
    mode: Mode = "auto", main: int = 0, compactor: int = 1, same_endpoint: bool = True, generation: int = 0
) -> PinSettings:
    return PinSettings(mode, main, compactor, same_endpoint, generation)


def main_request(config: PinSettings, probed: Probed | None, body: bytes = b"{}") -> Decision:
    return decide_main(config, probed, read(body))


def bound(config: PinSettings, probed: Probed | None, body: bytes = b"{}", name: str = "m") -> Binding:
    ids = probed.ids if isinstance(probed, Topology) else None
    return Binding(name, "c", main_request(config, probed, body), config.generation, ids)


def side_request(
    config: PinSettings, probed: Probed | None, bindings: Sequence[Binding], body: bytes = b"{}"
) -> Decision:
    return decide_compactor(config, probed, read(body), bindings)


class Pinned(NamedTuple):
    slot: int
    reason: str = "pinned"


class Untouched(NamedTuple):
    reason: str
    unsafe: bool = False


class Refused(NamedTuple):
    reason: str


Verdict = Pinned | Untouched | Refused


def verdict(decision: Decision) -> Verdict:
    match decision.action:
        case Action.PIN:
            assert decision.slot is not None and decision.add_id and not decision.unsafe
            return Pinned(decision.slot, decision.reason)
        case Action.LEAVE:
            assert not decision.add_id and not decision.add_cache_prompt
            return Untouched(decision.reason, decision.unsafe)
        case Action.REFUSE:
            assert not decision.add_id and not decision.add_cache_prompt and decision.unsafe
            return Refused(decision.reason)


def unsafe(reason: str) -> tuple[Verdict, Verdict]:
    """The main request goes out untouched, its compactor request not at all."""
    return Untouched(reason, unsafe=True), Refused(reason)


FAILED = Unverified(Reason.PROBE_FAILED)
NO_TOPOLOGY = Unverified(Reason.TOPOLOGY_INVALID)
OFF, DIFFER = Untouched("disabled"), Untouched("endpoints_differ")
BOTH_PINNED = Pinned(0), Pinned(1)

# id, settings, probed, the main request's body, (main verdict, verdict of a compactor request without an own id)
TABLE = [
    ("1 disabled", settings(False), None, b"{}", (OFF, OFF)),
    ("1 disabled, ids equal", settings(False, 1, 1), slots(1), b"{}", (OFF, OFF)),
    ("1 disabled before endpoints", settings(False, same_endpoint=False), FAILED, b"{}", (OFF, OFF)),
    ("1 disabled, own id", settings(False), slots(2), b'{"id_slot":1}', (OFF, OFF)),
    ("2 endpoints differ", settings(same_endpoint=False), None, b"{}", (DIFFER, DIFFER)),
    ("2 before enabled: true", settings(True, same_endpoint=False), None, b"{}", (DIFFER, DIFFER)),
    ("2 endpoints differ, odd id", settings(same_endpoint=False), FAILED, b'{"id_slot":"x"}', (DIFFER, DIFFER)),
    ("3 vouched", settings(True, 0, 1), None, b"{}", (Pinned(0, "vouched"), Pinned(1, "vouched"))),
    ("3 vouched, other ids", settings(True, 7, 3), None, b"{}", (Pinned(7, "vouched"), Pinned(3, "vouched"))),
    ("3 before the probe", settings(True, 0, 1), FAILED, b"{}", (Pinned(0, "vouched"), Pinned(1, "vouched"))),
    ("3 equal ids", settings(True, 2, 2), None, b"{}", (Pinned(2, "vouched"), Pinned(2, "vouched"))),
    ("3 own id", settings(True), None, b'{"id_slot":5}', (Untouched("explicit"), Pinned(1, "vouched"))),
    ("3 own id, compactor's", settings(True), None, b'{"id_slot":1}', (Untouched("explicit"), Pinned(1, "vouched"))),
    ("4 probe failed", settings(), FAILED, b"{}", unsafe("probe_failed")),
    ("4 not a topology", settings(), NO_TOPOLOGY, b"{}", unsafe("topology_invalid")),
    ("4 before own ids", settings(), FAILED, b'{"id_slot":1}', unsafe("probe_failed")),
    ("4 before ids collide", settings("auto", 1, 1), FAILED, b"{}", unsafe("probe_failed")),
    ("5 no slot", settings(), slots(0), b"{}", unsafe("too_few_slots")),
    ("5 one slot", settings(), slots(1), b"{}", unsafe("too_few_slots")),
    ("5 before ids collide", settings("auto", 1, 1), slots(1), b"{}", unsafe("too_few_slots")),
    ("5 before own ids", settings(), slots(1), b'{"id_slot":1}', unsafe("too_few_slots")),
    ("6 equal ids", settings("auto", 1, 1), slots(2), b"{}", unsafe("ids_collide")),
    ("6 0 and 2 on two", settings("auto", 0, 2), slots(2), b"{}", unsafe("ids_collide")),
    ("6 3 and 67 on 64", settings("auto", 3, 67), slots(64), b"{}", unsafe("ids_collide")),
    ("6 before own ids", settings("auto", 0, 2), slots(2), b'{"id_slot":"x"}', unsafe("ids_collide")),
    ("7 own id is the compactor's", settings(), slots(2), b'{"id_slot":1}', unsafe("explicit_conflict")),
    ("7 as a float", settings(), slots(2), b'{"id_slot":1.0}', unsafe("explicit_conflict")),
    ("7 modulo", settings("auto", 0, 2), slots(3), b'{"id_slot":5}', unsafe("explicit_conflict")),
    ("7 both modulo", settings("auto", 4, 5), slots(2), b'{"id_slot":7}', unsafe("explicit_conflict")),
    ("8 own id is the main slot", settings(), slots(2), b'{"id_slot":0}', (Untouched("explicit"), Pinned(1))),
    ("8 own id elsewhere", settings(), slots(3), b'{"id_slot":2}', (Untouched("explicit"), Pinned(1))),
    ("8 modulo", settings(), slots(3), b'{"id_slot":5}', (Untouched("explicit"), Pinned(1))),
    ("8 as a float", settings(), slots(3), b'{"id_slot":2.0}', (Untouched("explicit"), Pinned(1))),
    ("9 two slots", settings(), slots(2), b"{}", BOTH_PINNED),
    ("9 three slots", settings(), slots(3), b"{}", BOTH_PINNED),
    ("9 64 slots", settings("auto", 63, 0), slots(64), b"{}", (Pinned(63), Pinned(0))),
    ("9 ids wrap", settings("auto", 2, 5), slots(2), b"{}", BOTH_PINNED),
    ("9 0 and 2 on three", settings("auto", 0, 2), slots(3), b"{}", (Pinned(0), Pinned(2))),
    ("9 listed in another order", settings(), listed(1, 0), b"{}", BOTH_PINNED),
    ("9 null is absent", settings(), slots(2), b'{"id_slot":null}', BOTH_PINNED),
    ("9 the last id counts", settings(), slots(2), b'{"id_slot":1,"id_slot":null}', BOTH_PINNED),
    *(
        (f"odd id {odd}", settings(), slots(2), b'{"id_slot":%s}' % odd.encode(), unsafe("explicit_unpredictable"))
        for odd in ("-1", "-2", "0.5", '"0"', "true", "false", "[0]", "{}", "1e400")
    ),
]


@pytest.mark.parametrize(("config", "probed", "body", "expected"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_the_table(config: PinSettings, probed: Probed | None, body: bytes, expected: tuple[Verdict, Verdict]) -> None:
    main = main_request(config, probed, body)
    side = side_request(config, probed, [bound(config, probed, body)])
    assert (verdict(main), verdict(side)) == expected
    assert (Reason.PINNED, Reason.VOUCHED).count(main.reason) == main.add_cache_prompt


@pytest.mark.parametrize(
    ("config", "body", "main_warning", "side_warning"),
    [
        (settings(True, 0, 1), b"{}", (), ()),
        (settings(True, 2, 2), b"{}", (Reason.IDS_COLLIDE,), (Reason.IDS_COLLIDE,)),
        (settings(True, 0, 1), b'{"id_slot":0}', (), ()),
        (settings(True, 0, 1), b'{"id_slot":1}', (Reason.EXPLICIT_CONFLICT,), ()),
        (settings(True, 0, 1), b'{"id_slot":"x"}', (Reason.EXPLICIT_UNPREDICTABLE,), ()),
    ],
)
def test_vouched_ids_that_meet_are_warned_about(
    config: PinSettings, body: bytes, main_warning: tuple[Reason, ...], side_warning: tuple[Reason, ...]
) -> None:
    assert main_request(config, None, body).warnings == main_warning
    assert side_request(config, None, []).warnings == side_warning


def test_vouched_settings_need_neither_topology_nor_binding() -> None:
    for probed in (None, FAILED, NO_TOPOLOGY, slots(0), slots(1), slots(2)):
        assert verdict(main_request(settings(True), probed)) == Pinned(0, "vouched")
        assert verdict(side_request(settings(True), probed, [])) == Pinned(1, "vouched")
    assert not settings(True).needs_topology
    assert not settings(False).needs_topology
    assert not settings("auto", same_endpoint=False).needs_topology
    assert settings("auto").needs_topology


@pytest.mark.parametrize("own", [b'"x"', b"-1", b"1.5", b"true", b"[]"])
@pytest.mark.parametrize("mode", [True, "auto"])
def test_an_odd_id_is_left_as_it_is(own: bytes, mode: Mode) -> None:
    body = b'{"id_slot":%s}' % own
    decision = main_request(settings(mode), slots(2), body)
    assert decision.reason is Reason.EXPLICIT_UNPREDICTABLE
    assert decision.warnings == (Reason.EXPLICIT_UNPREDICTABLE,)
    assert forward(body, decision) == body


@pytest.mark.parametrize(
    ("own", "sent", "warned"),
    [
        (b"", b'{"id_slot":0,"cache_prompt":true}', False),
        (b'"cache_prompt":true', b'{"id_slot":0,"cache_prompt":true}', False),
        (b'"cache_prompt":null', b'{"id_slot":0,"cache_prompt":true}', False),
        (b'"cache_prompt":false', b'{"id_slot":0,"cache_prompt":false}', True),
        (b'"cache_prompt":1', b'{"id_slot":0,"cache_prompt":1}', False),
    ],
)
@pytest.mark.parametrize("mode", [True, "auto"])
def test_the_clients_own_cache_prompt_is_kept(own: bytes, sent: bytes, warned: bool, mode: Mode) -> None:
    body = b"{" + own + b"}"
    decision = main_request(settings(mode), slots(2), body)
    assert forward(body, decision) == sent
    assert decision.warnings == ((Reason.CACHE_PROMPT_OFF,) if warned else ())


def test_cache_prompt_off_is_also_warned_about_where_the_request_is_left_alone() -> None:
    body = b'{"id_slot":0,"cache_prompt":false}'
    decision = main_request(settings(), slots(2), body)
    assert decision.warnings == (Reason.CACHE_PROMPT_OFF,)
    assert forward(body, decision) == body
    assert main_request(settings(), FAILED, body).warnings == (Reason.PROBE_FAILED, Reason.CACHE_PROMPT_OFF)
    assert main_request(settings(False), None, body).warnings == ()


def test_a_compactor_request_may_turn_its_own_cache_off() -> None:
    body = b'{"cache_prompt":false}'
    decision = side_request(settings(), slots(2), [bound(settings(), slots(2))], body)
    assert decision.warnings == ()
    assert forward(body, decision) == b'{"id_slot":1,"cache_prompt":false}'


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (b"1", Untouched("explicit")),
        (b"2", Untouched("explicit")),
        (b"5", Untouched("explicit")),
        (b"0", Refused("explicit_conflict")),
        (b"3.0", Refused("explicit_conflict")),
        (b"-1", Refused("explicit_unpredictable")),
        (b'"1"', Refused("explicit_unpredictable")),
        (b"true", Refused("explicit_unpredictable")),
        (b"1.5", Refused("explicit_unpredictable")),
    ],
)
def test_a_compactor_requests_own_id(own: bytes, expected: Verdict) -> None:
    decision = side_request(settings(), slots(3), [bound(settings(), slots(3))], b'{"id_slot":%s}' % own)
    assert verdict(decision) == expected


def test_a_compactor_requests_own_id_may_not_be_its_main_requests_own_slot() -> None:
    binding = bound(settings(), slots(3), b'{"id_slot":2}')
    assert verdict(side_request(settings(), slots(3), [binding], b'{"id_slot":5}')) == Refused("explicit_conflict")


class TestBindings:
    def test_none(self) -> None:
        assert verdict(side_request(settings(), slots(2), [])) == Refused("no_binding")
        assert verdict(side_request(settings(), slots(2), [], b'{"id_slot":1}')) == Refused("no_binding")

    def test_made_under_other_settings(self) -> None:
        old = bound(settings(generation=1), slots(2))
        assert verdict(side_request(settings(generation=2), slots(2), [old])) == Refused("settings_changed")

    @pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (64, 2)])
    def test_topology_changed(self, before: int, after: int) -> None:
        old = bound(settings(), slots(before))
        assert verdict(side_request(settings(), slots(after), [old])) == Refused("topology_changed")

    def test_a_restart_with_one_slot_is_too_few_slots(self) -> None:
        assert verdict(side_request(settings(), slots(1), [bound(settings(), slots(2))])) == Refused("too_few_slots")

    def test_a_restart_with_more_slots_mends_too_few_slots_from_the_next_main_request_on(self) -> None:
        """The server has enough slots now, so "fewer than two slots" (409) would no longer be true."""
        old = bound(settings(), slots(1))
        assert verdict(side_request(settings(), slots(2), [old])) == Refused("topology_changed")
        assert verdict(side_request(settings(), slots(2), [bound(settings(), slots(2))])) == Pinned(1)

    def test_made_without_a_topology(self) -> None:
        old = bound(settings(), FAILED)
        assert verdict(side_request(settings(), slots(2), [old])) == Refused("probe_failed")

    def test_candidates_that_agree_are_no_ambiguity(self) -> None:
        candidates = [bound(settings(), slots(2), name=name) for name in "abc"]
        assert verdict(side_request(settings(), slots(2), candidates)) == Pinned(1)
        stale = [bound(settings(generation=generation), slots(2)) for generation in (0, 1)]
        assert verdict(side_request(settings(generation=2), slots(2), stale)) == Refused("settings_changed")

    @pytest.mark.parametrize("turn", [1, -1])
    def test_candidates_that_disagree(self, turn: int) -> None:
        safe = bound(settings(), slots(2))
        for other in (
            bound(settings(), slots(2), b'{"id_slot":1}'),
            bound(settings(), slots(2), b'{"id_slot":"x"}'),
            bound(settings(), FAILED),
            bound(settings(generation=1), slots(2)),
            bound(settings(), slots(3)),
        ):
            candidates = [safe, other][::turn]
            assert verdict(side_request(settings(), slots(2), candidates)) == Refused("ambiguous_overlap")

    def test_the_servers_state_comes_before_the_binding(self) -> None:
        assert verdict(side_request(settings(), FAILED, [])) == Refused("probe_failed")
        assert verdict(side_request(settings(), NO_TOPOLOGY, [])) == Refused("topology_invalid")
        assert verdict(side_request(settings(), slots(1), [])) == Refused("too_few_slots")
        assert verdict(side_request(settings("auto", 0, 2), slots(2), [])) == Refused("ids_collide")


def test_unlisted_ids_are_never_added() -> None:
    for ids in ((5, 7), (0, 2), (1, 2), (-1, 0), (0, 1000)):
        topology = listed(*ids)
        assert verdict(main_request(settings(), topology)) == Untouched("topology_invalid", unsafe=True)
        assert verdict(side_request(settings(), topology, [bound(settings(), topology)])) == Refused("topology_invalid")


def test_an_own_id_that_resolves_to_no_listed_slot_is_not_safe() -> None:
    """get_slot_by_id() finds none then, and the server chooses: it may take the compactor's slot."""
    topology, body = listed(0, 1, 7), b'{"id_slot":2}'
    assert main_request(settings(), topology, body).unsafe
    assert side_request(settings(), topology, [bound(settings(), topology, body)]).action is Action.REFUSE


def test_automatic_mode_does_not_decide_without_a_probe() -> None:
    with pytest.raises(ValueError, match="topology"):
        main_request(settings(), None)
    with pytest.raises(ValueError, match="topology"):
        side_request(settings(), None, [])


def test_pass_forwards_what_refuse_does_not() -> None:
    probed = Unverified(Reason.PROBE_FAILED, "the API key is wrong")
    refusal = side_request(settings(), probed, [])
    passed = let_pass(refusal, settings(), probed, read(b"{}"))
    assert refusal.action is Action.REFUSE
    assert passed.action is Action.LEAVE
    assert passed.unsafe and passed.reason is Reason.PROBE_FAILED and passed.warnings == (Reason.PROBE_FAILED,)
    assert passed.detail == "the API key is wrong"
    body = b' {"id_slot":null} '
    assert forward(body, refusal) is None
    assert forward(body, passed) == body


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"{}", b'{"id_slot":1,"cache_prompt":true}'),
        (b'{"cache_prompt":false}', b'{"id_slot":1,"cache_prompt":false}'),
        (b'{"id_slot":1}', b'{"id_slot":1}'),
        (b'{"id_slot":-2}', b'{"id_slot":-2}'),
    ],
)
def test_what_must_pass_before_any_turn_runs_on_the_compactors_slot(body: bytes, sent: bytes) -> None:
    refusal = side_request(settings(), slots(4), [], body)
    passed = let_pass(refusal, settings(), slots(4), read(body))
    assert passed.reason is Reason.NO_BINDING and passed.unsafe and passed.warnings == (Reason.NO_BINDING,)
    assert forward(body, passed) == sent


def test_what_must_pass_after_a_change_of_slots_is_not_pinned() -> None:
    """The conversation may lie in what is the compactor's slot now."""
    before = bound(settings(main=1, compactor=0, generation=1), slots(2))
    refusal = side_request(settings(generation=2), slots(2), [before])
    passed = let_pass(refusal, settings(generation=2), slots(2), read(b"{}"))
    assert (passed.action, passed.reason, passed.slot) == (Action.LEAVE, Reason.SETTINGS_CHANGED, None)


def test_an_unsafe_main_request_says_why() -> None:
    for probed in (FAILED, NO_TOPOLOGY, slots(1)):
        decision = main_request(settings(), probed)
        assert decision.warnings == (decision.reason,)
    assert main_request(settings(), Unverified(Reason.PROBE_FAILED, "API key")).detail == "API key"
