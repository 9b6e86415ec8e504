"""The invariants over the whole input space, judged by what goes on the wire and how llama-server reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotpin.pinning.bindings import Binding, Bindings
from slotpin.pinning.decision import Action, Decision, PinSettings, Probed, Unverified, decide_compactor, decide_main
from slotpin.pinning.ids import ABSENT
from slotpin.pinning.reasons import Reason
from slotpin.pinning.request import Request
from slotpin.pinning.topology import Slot, Topology

from .json_text import REQUESTS
from .wire import forward, read, slots_used


def topology_of(ids: tuple[int, ...]) -> Topology:
    return Topology(tuple(Slot(slot_id, 4096) for slot_id in ids))


counts = st.integers(0, 64) | st.integers(0, 4)
orders = st.sampled_from([1, 1, -1])
topologies = st.builds(lambda count, order: topology_of(tuple(range(count))[::order]), counts, orders)
odd_topologies = st.lists(st.integers(-3, 80), max_size=6, unique=True).map(tuple).map(topology_of)
unverified = st.sampled_from([Unverified(Reason.PROBE_FAILED, "API key"), Unverified(Reason.TOPOLOGY_INVALID)])
configured_ids = st.integers(0, 4) | st.integers(0, 200)
modes: st.SearchStrategy[Literal[False, True, "auto"]] = st.sampled_from([False, True, "auto"])
all_settings = st.builds(PinSettings, modes, configured_ids, configured_ids, st.booleans(), st.integers(0, 2))
auto = st.builds(PinSettings, st.just("auto"), configured_ids, configured_ids, st.just(True), st.integers(0, 2))


def bind(decision: Decision, config: PinSettings, probed: Probed, state: str) -> tuple[Binding, ...]:
    """What a compactor request finds after its main request was opened, ended or aborted."""
    bindings = Bindings()
    ids = probed.ids if isinstance(probed, Topology) else None
    bindings.open(Binding("main", "c", decision, config.generation, ids))
    if state == "ended":
        bindings.end("main")
    elif state == "aborted":
        bindings.abort("main")
    return bindings.candidates("c")


@settings(max_examples=250)
@given(auto, topologies, REQUESTS, REQUESTS, st.sampled_from(["open", "ended"]))
def test_main_and_compactor_never_get_the_same_slot(
    config: PinSettings, topology: Topology, main_body: bytes, side_body: bytes, state: str
) -> None:
    assume(topology.count)
    main = decide_main(config, topology, read(main_body))
    side = decide_compactor(config, topology, read(side_body), bind(main, config, topology, state))
    main_sent, side_sent = forward(main_body, main), forward(side_body, side)
    assert main_sent is not None  # a main request is never refused
    if side_sent is not None:
        main_slots, side_slots = slots_used(main_sent, topology.ids), slots_used(side_sent, topology.ids)
        assert main_slots.isdisjoint(side_slots)
        # The slot that is announced is the one that it runs on.
        assert (list(main_slots), list(side_slots)) == ([main.slot], [side.slot])


@settings(max_examples=200)
@given(auto, topologies | odd_topologies | unverified, REQUESTS, st.sampled_from(["open", "ended", "aborted"]))
def test_no_unlisted_id_is_added(config: PinSettings, probed: Probed, body: bytes, state: str) -> None:
    main = decide_main(config, probed, read(body))
    side = decide_compactor(config, probed, read(body), bind(main, config, probed, state))
    for decision in (main, side):
        if decision.add_id:
            assert isinstance(probed, Topology)
            assert decision.slot in probed.ids
            sent = forward(body, decision)
            assert sent is not None
            assert json.loads(sent.decode("utf-8-sig"))["id_slot"] == decision.slot


def own_ids(body: bytes) -> list[object]:
    """Every outermost `id_slot` but null, with numbers as text."""
    pairs: list[tuple[str, object]] = json.JSONDecoder(
        object_pairs_hook=list, parse_int=lambda text: ("number", text), parse_float=lambda text: ("number", text)
    ).decode(body.decode("utf-8-sig"))
    return [value for name, value in pairs if name == "id_slot" and value is not None]


@settings(max_examples=200)
@given(all_settings, topologies | odd_topologies | unverified, REQUESTS)
def test_an_existing_id_is_never_changed_or_outvoted(config: PinSettings, probed: Probed, body: bytes) -> None:
    main = decide_main(config, probed, read(body))
    side = decide_compactor(config, probed, read(body), bind(main, config, probed, "open"))
    for decision in (main, side):
        if (sent := forward(body, decision)) is None:
            continue
        before, after = own_ids(body), own_ids(sent)
        if decision.add_id:
            ours = ("number", str(decision.slot))
            assert read(body).client_id == ABSENT
            assert after == [*before, ours] or after == [ours, *before]
        else:
            assert after == before


@given(
    all_settings.filter(lambda config: config.enabled is False or not config.same_endpoint),
    st.none() | topologies | odd_topologies | unverified,
    REQUESTS,
)
def test_off_and_other_endpoints_change_no_byte(config: PinSettings, probed: Probed | None, body: bytes) -> None:
    for decision in (decide_main(config, probed, read(body)), decide_compactor(config, probed, read(body), ())):
        assert decision.action is Action.LEAVE and not decision.warnings
        assert forward(body, decision) == body


@settings(max_examples=200)
@given(auto, topologies | odd_topologies | unverified, topologies | unverified, REQUESTS, REQUESTS)
def test_unsafe_stays_unsafe_until_the_next_main_request(
    config: PinSettings, probed: Probed, later: Probed, main_body: bytes, side_body: bytes
) -> None:
    """Even a topology that is verified afterwards does not tell where that main request ran."""
    main = decide_main(config, probed, read(main_body))
    side = decide_compactor(config, later, read(side_body), bind(main, config, probed, "ended"))
    if main.unsafe or isinstance(later, Unverified) or probed != later:
        assert side.action is Action.REFUSE
    if isinstance(probed, Unverified):
        assert main.unsafe and main.action is Action.LEAVE
    if main.unsafe:
        assert main.reason in main.warnings
        assert forward(main_body, main) == main_body


@settings(max_examples=50)
@given(auto, topologies | unverified, REQUESTS, REQUESTS)
def test_an_aborted_main_request_is_no_ticket(
    config: PinSettings, probed: Probed, main_body: bytes, side_body: bytes
) -> None:
    main = decide_main(config, probed, read(main_body))
    side = decide_compactor(config, probed, read(side_body), bind(main, config, probed, "aborted"))
    assert side.action is Action.REFUSE


def test_an_unnamed_compactor_request_is_judged_by_every_conversation_that_it_may_belong_to() -> None:
    """Pi's summaries carry no session id: this one may be of the conversation that runs on the compactor's slot."""
    config, topology = PinSettings("auto", 0, 1, same_endpoint=True), topology_of((0, 1))
    bindings = Bindings()
    for name, body in (("conflict", b'{"id_slot":1}'), ("safe", b"{}")):
        bindings.open(Binding(name, name, decide_main(config, topology, read(body)), 0, topology.ids))
        bindings.end(name)
    side = decide_compactor(config, topology, Request(), bindings.candidates(""))
    assert (side.action, side.reason) == (Action.REFUSE, Reason.AMBIGUOUS_OVERLAP)


def test_an_older_turn_does_not_vouch_for_the_latest_one() -> None:
    """It is still open and of the server that is there; in between the conversation had a turn on another one."""
    config, topology = PinSettings("auto", 0, 1, same_endpoint=True), topology_of((0, 1, 2))
    bindings = Bindings()
    for name, there in (("older", topology), ("latest", topology_of((0,)))):
        bindings.open(Binding(name, "c", decide_main(config, there, read(b"{}")), 0, there.ids))
    bindings.end("latest")
    side = decide_compactor(config, topology, Request(), bindings.candidates("c"))
    assert (side.action, side.reason) == (Action.REFUSE, Reason.AMBIGUOUS_OVERLAP)


@dataclass
class Main:
    """A main request as the server saw it: the model that `Bindings` is held against."""

    conversation: str
    number: int
    slots: frozenset[int]
    world: tuple[PinSettings, Topology | None]
    unsafe: bool
    state: str = "open"
    superseded: bool = False  # ended, and then a turn of its conversation arrived


own_id_texts = st.sampled_from([*[""] * 12, "null", "0", "1", "2", "3", "1.0", "-1", '"x"', "true"])
conversations = st.sampled_from(["a", "b"])
Change = int | bool | tuple[int, int]  # a restart with so many slots, whether probes succeed, or configured ids
changes: st.SearchStrategy[Change] = st.sampled_from([1, 2, 3, True, True, False, (0, 1), (1, 0), (0, 2)])


class Exchanges(RuleBasedStateMachine):
    """Turns of two conversations, of which two may overlap in each, while settings and server change."""

    def __init__(self) -> None:
        super().__init__()
        self.bindings = Bindings()
        self.mains: list[Main] = []
        self.config = PinSettings("auto", 0, 1, same_endpoint=True)
        self.server = topology_of((0, 1))
        self.reachable = True

    @initialize(count=st.integers(2, 4))
    def start(self, count: int) -> None:
        self.server = topology_of(tuple(range(count)))

    @property
    def probed(self) -> Probed:
        return self.server if self.reachable else Unverified(Reason.PROBE_FAILED)

    @property
    def world(self) -> tuple[PinSettings, Topology | None]:
        return self.config, self.server if self.reachable else None

    @rule(conversation=conversations, own=own_id_texts)
    def main_arrives(self, conversation: str, own: str) -> None:
        if sum(main.conversation == conversation for main in self.open_mains()) == 2:
            return
        body = f'{{"id_slot":{own}}}'.encode() if own else b"{}"
        decision = decide_main(self.config, self.probed, read(body))
        sent = forward(body, decision)
        assert sent is not None
        number = len(self.mains)
        for main in self.mains:
            main.superseded |= main.state == "ended" and main.conversation == conversation
        slots = slots_used(sent, self.server.ids)
        self.mains.append(Main(conversation, number, slots, self.world, decision.unsafe))
        ids = self.server.ids if self.reachable else None
        self.bindings.open(Binding(str(number), conversation, decision, self.config.generation, ids))

    def open_mains(self) -> list[Main]:
        return [main for main in self.mains if main.state == "open"]

    @precondition(lambda self: self.open_mains())
    @rule(data=st.data(), state=st.sampled_from(["ended", "ended", "aborted"]))
    def main_finishes(self, data: st.DataObject, state: str) -> None:
        main = data.draw(st.sampled_from(self.open_mains()))
        main.state = state
        finish = self.bindings.end if state == "ended" else self.bindings.abort
        finish(str(main.number))

    @rule(change=changes)
    def world_changes(self, change: Change) -> None:
        match change:
            case bool():
                self.reachable = change
            case int():
                self.server = topology_of(tuple(range(change)))
            case main_id, compactor_id:
                generation = self.config.generation + 1
                self.config = PinSettings("auto", main_id, compactor_id, same_endpoint=True, generation=generation)

    def belongs_to(self, conversation: str) -> tuple[list[Main], list[Main]]:
        """The open turns and the latest one to arrive if it has ended; and what else may count.

        Of an ended turn that another one overlapped and aborted, either reading is sound.
        """
        own = [main for main in self.mains if main.conversation == conversation]
        certain = [main for main in own if main.state == "open" or (main.state == "ended" and main is own[-1])]
        kept = [main for main in own if main.state != "aborted"][-1:]
        return certain, [main for main in kept if main.state == "ended" and not main.superseded and main not in certain]

    @invariant()
    def compactors_may_come_at_any_time(self) -> None:
        for conversation in ("a", "b"):
            self.compactor_arrives(conversation, "")

    @rule(conversation=conversations, own=own_id_texts)
    def compactor_with_an_id_arrives(self, conversation: str, own: str) -> None:
        self.compactor_arrives(conversation, own)

    def compactor_arrives(self, conversation: str, own: str) -> None:
        body = f'{{"id_slot":{own}}}'.encode() if own else b"{}"
        side = decide_compactor(self.config, self.probed, read(body), self.bindings.candidates(conversation))
        certain, possible = self.belongs_to(conversation)
        if (sent := forward(body, side)) is None:
            assert own not in ("", "null") or not certain or not self.current(certain + possible)
            return
        mains = certain or possible
        assert self.reachable and mains and self.current(mains)
        slots = slots_used(sent, self.server.ids)
        assert list(slots) == [side.slot]
        assert all(slots.isdisjoint(main.slots) for main in mains)

    def current(self, mains: list[Main]) -> bool:
        return all(main.world == self.world and not main.unsafe for main in mains)


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=150, stateful_step_count=20)
