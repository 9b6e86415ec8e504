"""What will be done with a generating request: read it, find its role and conversation, decide, bind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from slotpin.pinning.bindings import Binding
from slotpin.pinning.conversations import Conversation, SessionId, parent_ids, session_ids
from slotpin.pinning.decision import (
    Action,
    Decision,
    Probed,
    decide_compactor,
    decide_main,
    let_pass,
    placed,
    unpinned,
)
from slotpin.pinning.ids import Unpredictable, normalise
from slotpin.pinning.message_end import Shape
from slotpin.pinning.reasons import Reason
from slotpin.pinning.request import Body, Opening, Request, read_body, read_opening
from slotpin.pinning.reuse import WARN_TOKENS
from slotpin.pinning.roles import NO_RECOGNISERS, Classified, OnUnsafe, Role, classify
from slotpin.pinning.route import Route
from slotpin.pinning.splice import Pieces, Text, splice
from slotpin.pinning.topology import Topology
from slotpin.pinning.turn import Difference, Turn, difference, read_turn
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.server import Server
from slotpin.proxy.sharing.admission import without_slot
from slotpin.proxy.sharing.shared import Shared
from slotpin.proxy.sharing.together import place_together, tickets
from slotpin.proxy.state import Running, State


@dataclass(slots=True)
class Plan:
    """`raw` None: the body is passed on while it still arrives. `conversation` is the one whose cache the request uses;
    `change` is where its messages stop being those of that conversation's last turn. `gate` is the slot whose gate it
    passes, also where the server chooses the slot. `names_slot`: by an odd `id_slot` of its client's, which is not
    ours. `tracked`: it shares the server with pinned requests."""

    classified: Classified
    decision: Decision
    raw: Text | None
    body: Body | None = None
    probed: Probed | None = None
    server: Server | None = None
    conversation: Conversation | None = None
    change: Difference | None = None
    gate: int | None = None
    names_slot: bool = False
    tracked: bool = False

    def forget_body(self) -> None:
        """It will not be sent again."""
        self.raw = self.body = None

    @property
    def pinned(self) -> bool:
        """Whether the server is told in which slot to run it."""
        return self.decision.slot is not None or self.names_slot

    @property
    def streams(self) -> bool:
        return self.body is not None and self.body.streams

    @property
    def completions(self) -> int:
        return self.body.completions if self.body is not None else 1

    @property
    def payload(self) -> Pieces | None:
        """The body to send: the client's own bytes, with what the decision adds."""
        members: dict[str, bytes] = {}
        if self.decision.add_id:
            members["id_slot"] = b"%d" % (self.decision.slot or 0)
        if self.decision.add_cache_prompt:
            members["cache_prompt"] = b"true"
        if self.raw is None:
            return None
        if not members or self.body is None:
            return (self.raw,)
        return splice(self.raw, members, self.body.request.nulls)


@dataclass(slots=True)
class _Read:
    """What was read in a body. `request` is the body's, as the server on this route takes it."""

    body: Body
    classified: Classified
    turn: Turn
    request: Request


class Planner:
    """For one exchange: its id, its head and the settings that it began with."""

    __slots__ = ("_head", "_id", "_running", "_state")

    def __init__(self, state: State, running: Running, exchange_id: str, head: RequestHead) -> None:
        self._state = state
        self._running = running
        self._id = exchange_id
        self._head = head

    def unread(self, route: Route, reason: Reason, raw: Text | None) -> Plan:
        """For a body that isn't looked into. It may run in any slot, also in one that it names."""
        return Plan(
            classify(route.role, self.header_role, NO_RECOGNISERS, None, None, Opening),
            Decision(Action.LEAVE, reason),
            raw,
        )

    def plan_now(self, route: Route, raw: Text) -> Plan | None:
        """The plan where nothing has to be waited for. Else None, and nothing has been done: `plan` does it."""
        if len(raw) >= LARGE_BYTES or (where := self._where_now(route)) is None:
            return None
        server, probed, heeds_id = where
        if (read := self._read(route, raw)) is None:
            return self._unreadable(route, raw, server)
        plan = self._begin(raw, read, server, probed, heeds_id=heeds_id)
        self._decide(plan, read)
        return plan

    async def plan(self, route: Route, raw: Text) -> Plan:
        """The same with all that may have to be waited for: large bodies, the server's answers, other slotpins."""
        read = self._read(route, raw) if len(raw) < LARGE_BYTES else await self._read_large(route, raw)
        if read is None:
            server, _ = await self._server(None)
            return self._unreadable(route, raw, server)
        server, probed = await self._server(read.body.model)
        heeds_id = route.shape is not Shape.ANTHROPIC or (isinstance(probed, Topology) and await server.is_patched())
        plan = self._begin(raw, read, server, probed, heeds_id=heeds_id)
        if server.shared is not None and self._shares_slots:
            await self._decide_together(plan, read, server.shared)
        else:
            self._decide(plan, read)
        return plan

    def _where_now(self, route: Route) -> tuple[Server, Probed | None, bool] | None:
        """The server, its slots where they are needed, and whether it heeds `id_slot` on the route; None where that has
        to be asked for, or others share the slots."""
        state, target = self._state, self._running.probe_target
        server = state.server(target)
        if server.shared is not None and self._shares_slots:
            return None
        if not self._running.pin.needs_topology:
            return server, None, route.shape is not Shape.ANTHROPIC
        topology = server.fresh()
        if topology is None or state.probe.has_models(target):
            return None
        if route.shape is not Shape.ANTHROPIC:
            return server, topology, True
        patched = server.known_patched
        return None if patched is None else (server, topology, patched)

    async def _server(self, model: str | None) -> tuple[Server, Probed | None]:
        """The server that the request will run on, and its slots where they are needed."""
        state, target = self._state, self._running.probe_target
        server = state.server(target)
        if not self._running.pin.needs_topology:
            return server, None
        probed = None if state.probe.has_models(target) else await server.topology()
        if not state.probe.has_models(target):
            return server, probed
        of_model = replace(target, model=model or "")
        probed = await state.probe.topology(of_model)
        if isinstance(probed, Topology):
            server = state.server(of_model)
            await server.topology()
        return server, probed

    def _read(self, route: Route, raw: Text) -> _Read | None:
        assert route.shape is not None
        body = read_body(raw)
        if body is None:
            return None
        return _Read(body, self._classify(route, body), read_turn(body, route.shape), body.request)

    async def _read_large(self, route: Route, raw: Text) -> _Read | None:
        """One after the other, with pauses: in the milliseconds that each takes nothing else is done."""
        assert route.shape is not None
        async with self._state.taking_in:
            await asyncio.sleep(0)
            body = read_body(raw)
            await asyncio.sleep(0)
            if body is None:
                return None
            classified = self._classify(route, body)
            await asyncio.sleep(0)
            return _Read(body, classified, read_turn(body, route.shape), body.request)

    def _unreadable(self, route: Route, raw: Text, server: Server) -> Plan:
        plan = self.unread(route, Reason.NOT_JSON_OBJECT, raw)
        plan.server, plan.tracked = server, self._shares_slots
        return plan

    def _begin(self, raw: Text, read: _Read, server: Server, probed: Probed | None, *, heeds_id: bool) -> Plan:
        """A plan that is not decided yet."""
        if not heeds_id:
            read.request = structs.replace(read.request, route_pins=False)
        return Plan(read.classified, _UNDECIDED, raw, read.body, probed, server, tracked=self._shares_slots)

    def _decide(self, plan: Plan, read: _Read) -> None:
        if read.classified.role is Role.MAIN:
            conversation = self._conversation(plan, read)
            self._main(plan, read, conversation)
            self._bind(plan, conversation)
        else:
            self._side(plan, read, None)
        self._finish(plan, read)

    async def _decide_together(self, plan: Plan, read: _Read, shared: Shared) -> None:
        """Where other slotpins have the same slots."""
        server = _server_of(plan)
        await shared.prepare(server.is_patched)
        if read.classified.role is Role.MAIN:
            conversation = self._conversation(plan, read)
            decide = partial(self._main, plan, read, conversation)
            await place_together(plan, server, shared, self._running.pin, decide)
            self._bind(plan, conversation)
        else:
            await shared.refresh()
            self._side(plan, read, shared)
        if not shared.open:
            plan.decision = without_slot(plan)
        self._finish(plan, read)

    def _finish(self, plan: Plan, read: _Read) -> None:
        server = _server_of(plan)
        self._find_gate(plan, read.request, server)
        chosen = plan.decision.action is Action.PIN and plan.decision.reason is not Reason.VOUCHED
        if chosen and not server.pinning_helps(self._running.retry_seconds):
            plan.decision = unpinned(plan.decision, Reason.PINNING_STOPPED)

    @property
    def _shares_slots(self) -> bool:
        return self._running.pin.enabled is not False and self._running.pin.same_endpoint

    def _find_gate(self, plan: Plan, request: Request, server: Server) -> None:
        """Of the slot that the request will run in, also where it names that in a way that is left as it is."""
        known = server.known.count if server.known is not None else 0
        if isinstance(request.client_id, Unpredictable) and request.route_pins and known:
            plan.gate = request.client_id.lands_on(known)
            plan.names_slot = plan.gate is not None
        elif (slot := plan.decision.slot) is not None:
            plan.gate = normalise(slot, known) if known else slot

    def _conversation(self, plan: Plan, read: _Read) -> Conversation:
        """The one whose turn this is."""
        conversations, body, turn = self._state.conversations, read.body, read.turn
        ids = self._session_ids(body)
        before = conversations.find(ids, turn, body.model)
        plan.change = difference(before.turn, turn, body) if before is not None else None
        plan.conversation = conversations.take(before, ids, turn, body.model, self._state.clock())
        return plan.conversation

    def _main(self, plan: Plan, read: _Read, conversation: Conversation) -> None:
        """Decide on a turn of a conversation, and give that a slot."""
        decision = decide_main(self._running.pin, plan.probed, read.request)
        if isinstance(plan.probed, Topology) and (slot := decision.slot) is not None:
            server = _server_of(plan)
            if decision.action is Action.PIN:
                decision = self._placed(decision, plan.probed, server, conversation)
            else:
                server.placement.note(conversation.key, slot, self._state.clock())
        plan.decision = decision

    def _bind(self, plan: Plan, conversation: Conversation) -> None:
        """The decision to the exchange."""
        slot_ids = plan.probed.ids if isinstance(plan.probed, Topology) else None
        generation, model = self._running.pin.generation, _server_of(plan).model
        binding = Binding(self._id, conversation.key, plan.decision, generation, slot_ids, model)
        self._state.bindings.open(binding)

    def _placed(self, decision: Decision, topology: Topology, server: Server, conversation: Conversation) -> Decision:
        pin, placement, now = self._running.pin, server.placement, self._state.clock()
        main, compactor = normalise(pin.main_id, topology.count), normalise(pin.compactor_id, topology.count)
        if (left := conversation.left) is not None and left.slot is None:
            found = server.find(conversation.key, left)
            if found is not None and found != compactor:
                placement.note(conversation.key, found, now)
        busy = server.gates if server.shared is None else {*server.gates, *server.shared.busy}
        slots = self._running.settings.conversations.slots
        where = placement.place(conversation.key, topology, main, compactor, slots, busy, now)
        if where.shared and self._makes_room(server, main, conversation):
            where = placement.place(conversation.key, topology, main, compactor, slots, busy, now)
        shared = f"--parallel {where.enough} would be enough" if where.shared else ""
        return placed(decision, where.slot, shared=shared)

    def _makes_room(self, server: Server, main: int, conversation: Conversation) -> bool:
        """Whether the main slot is free now: a few tokens, as of a first "Hi", are not worth keeping it."""
        key = server.placement.home_at(main)
        holder = self._state.conversations.get(key) if key is not None and key != conversation.key else None
        if holder is None or holder.left is None or holder.left.prompt > WARN_TOKENS or main in server.gates:
            return False
        server.placement.forget(holder.key)
        return True

    def _side(self, plan: Plan, read: _Read, shared: Shared | None) -> None:
        """Decide on a request that is no turn of a conversation. `shared` only where the slots are."""
        state, pin, server = self._state, self._running.pin, _server_of(plan)
        body, turn, request = read.body, read.turn, read.request
        if plan.classified.found_by not in ("path", "header"):
            extended = state.conversations.extended_by(turn, body.model)
            slot = server.placement.slot_of(extended.key) if extended is not None else None
            if slot is None and shared is not None and (found := shared.table.extended_by(turn, body.model)):
                slot = found.last
            decision = decide_main(pin, plan.probed, request)
            if slot is not None and decision.reason is Reason.PINNED:
                plan.conversation = extended
                plan.decision = structs.replace(decision, slot=slot, reason=Reason.EXTENDS_CONVERSATION)
                return
        ids = self._session_ids(body)
        parents = parent_ids(self._head.get, body, self._running.session_sources)
        named = state.conversations.named(ids) or state.conversations.named(parents)
        conversation = named.key if named is not None else _NOBODY if ids else ""
        candidates = state.bindings.candidates(conversation, server.model)
        decision = decide_compactor(pin, plan.probed, request, candidates)
        if shared is not None and decision.reason is Reason.NO_BINDING:
            candidates = tickets(shared, ids, parents, pin, server.model)
            decision = decide_compactor(pin, plan.probed, request, candidates)
        if decision.action is Action.REFUSE and plan.classified.on_unsafe is OnUnsafe.PASS:
            decision = let_pass(decision, pin, plan.probed, request)
        if decision.action is Action.PIN:
            server.placement.compactor_used()
            if shared is not None:
                shared.compactor_used()
        plan.decision = decision

    def _session_ids(self, body: Body) -> list[SessionId]:
        return session_ids(self._head.get, body, self._running.session_sources)

    def _classify(self, route: Route, body: Body) -> Classified:
        return classify(
            route.role,
            self.header_role,
            self._running.recognisers,
            body.model,
            self._api_key(),
            lambda: read_opening(body),
            self._on_unsafe,
        )

    @property
    def header_role(self) -> Role | None:
        value = self._head.get(b"x-slotpin-role")
        return ROLES[value.lower()] if value else None

    @property
    def _on_unsafe(self) -> OnUnsafe | None:
        value = self._head.get(b"x-slotpin-on-unsafe")
        return ON_UNSAFE[value.lower()] if value else None

    def _api_key(self) -> str | None:
        scheme, _, token = (self._head.get(b"authorization") or b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else self._head.get(b"x-api-key")
        return key.decode("latin-1") if key else None


def _server_of(plan: Plan) -> Server:
    assert plan.server is not None
    return plan.server


# What takes longer than all else that is done for a request.
LARGE_BYTES = 512 * 1024
ROLES: dict[bytes, Role] = {role.encode(): role for role in Role}
ON_UNSAFE: dict[bytes, OnUnsafe] = {each.encode(): each for each in OnUnsafe}
_UNDECIDED = Decision(Action.LEAVE, Reason.DISABLED)
_NOBODY = "?"  # no conversation's key
