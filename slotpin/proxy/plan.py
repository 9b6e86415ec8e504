"""What will be done with a generating request: read it, find its role and conversation, decide, bind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from slotpin.pinning.bindings import Binding
from slotpin.pinning.conversations import Conversation, parent_ids, session_ids
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


class Planner:
    """For one exchange: its id, its head and the settings that it began with."""

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

    async def plan(self, route: Route, raw: Text) -> Plan:
        taken_in = await self._take_in(route, raw)
        if taken_in is None:
            plan = self.unread(route, Reason.NOT_JSON_OBJECT, raw)
            plan.server, _ = await self._server(None)
            plan.tracked = self._shares_slots
            return plan
        body, classified, turn = taken_in
        server, probed = await self._server(body.model)
        request = replace(body.request, fans_out=True) if body.completions > 1 else body.request
        if route.shape is Shape.ANTHROPIC:
            request = replace(request, route_pins=isinstance(probed, Topology) and await server.is_patched())
        ids = session_ids(self._head.get, body, self._running.session_headers, self._running.session_fields)
        plan = Plan(classified, Decision(Action.LEAVE, Reason.DISABLED), raw, body, probed, server)
        shared = server.shared if self._shares_slots else None
        if shared is not None:
            await shared.prepare(server.is_patched)
        if classified.role is Role.MAIN:
            conversation = self._conversation(plan, ids, turn, body)
            decide = partial(self._main, plan, server, request, conversation)
            if shared is None:
                decide()
            else:
                await place_together(plan, server, shared, self._running.pin, decide)
            self._bind(plan, server, conversation)
        else:
            await self._side(plan, server, request, ids, turn, body)
        if shared is not None and not shared.open:
            plan.decision = without_slot(plan)
        self._find_gate(plan, request, server)
        plan.tracked = self._shares_slots
        chosen = plan.decision.action is Action.PIN and plan.decision.reason is not Reason.VOUCHED
        if chosen and not server.pinning_helps(self._running.retry_seconds):
            plan.decision = unpinned(plan.decision, Reason.PINNING_STOPPED)
        return plan

    async def _take_in(self, route: Route, raw: Text) -> tuple[Body, Classified, Turn] | None:
        """Large bodies one after the other, with pauses: in the milliseconds that each takes nothing else is done."""
        assert route.shape is not None
        if len(raw) < LARGE_BYTES:
            body = read_body(raw)
            return None if body is None else (body, self._classify(route, body), read_turn(body, route.shape))
        async with self._state.taking_in:
            await asyncio.sleep(0)
            body = read_body(raw)
            await asyncio.sleep(0)
            if body is None:
                return None
            classified = self._classify(route, body)
            await asyncio.sleep(0)
            return body, classified, read_turn(body, route.shape)

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

    def _conversation(self, plan: Plan, ids: Sequence[tuple[str, str]], turn: Turn, body: Body) -> Conversation:
        """The one whose turn this is."""
        conversations = self._state.conversations
        before = conversations.find(ids, turn, body.model)
        plan.change = difference(before.turn, turn, body) if before is not None else None
        plan.conversation = conversations.take(before, ids, turn, body.model, self._state.clock())
        return plan.conversation

    def _main(self, plan: Plan, server: Server, request: Request, conversation: Conversation) -> None:
        """Decide on a turn of a conversation, and give that a slot."""
        decision = decide_main(self._running.pin, plan.probed, request)
        if isinstance(plan.probed, Topology) and (slot := decision.slot) is not None:
            if decision.action is Action.PIN:
                decision = self._placed(decision, plan.probed, server, conversation)
            else:
                server.placement.note(conversation.key, slot, self._state.clock())
        plan.decision = decision

    def _bind(self, plan: Plan, server: Server, conversation: Conversation) -> None:
        """The decision to the exchange."""
        slot_ids = plan.probed.ids if isinstance(plan.probed, Topology) else None
        generation = self._running.pin.generation
        binding = Binding(self._id, conversation.key, plan.decision, generation, slot_ids, server.model)
        self._state.bindings.open(binding)

    def _placed(self, decision: Decision, topology: Topology, server: Server, conversation: Conversation) -> Decision:
        pin, gates = self._running.pin, server.gates
        main, compactor = normalise(pin.main_id, topology.count), normalise(pin.compactor_id, topology.count)
        if (left := conversation.left) is not None and left.slot is None:
            found = server.find(conversation.key, left)
            if found is not None and found != compactor:
                server.placement.note(conversation.key, found, self._state.clock())
        place = partial(
            server.placement.place,
            *(conversation.key, topology, main, compactor, self._running.settings.conversations.slots),
            *(gates if server.shared is None else {*gates, *server.shared.busy}, self._state.clock()),
        )
        where = place()
        if where.shared and self._makes_room(server, main, conversation):
            where = place()
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

    async def _side(
        self, plan: Plan, server: Server, request: Request, ids: Sequence[tuple[str, str]], turn: Turn, body: Body
    ) -> None:
        state, pin = self._state, self._running.pin
        shared = server.shared if self._shares_slots else None
        if shared is not None:
            await shared.refresh()
        if plan.classified.found_by not in ("path", "header"):
            extended = state.conversations.extended_by(turn, body.model)
            slot = server.placement.slot_of(extended.key) if extended is not None else None
            if slot is None and shared is not None and (found := shared.table.extended_by(turn, body.model)):
                slot = found.last
            decision = decide_main(pin, plan.probed, request)
            if slot is not None and decision.reason is Reason.PINNED:
                plan.conversation = extended
                plan.decision = replace(decision, slot=slot, reason=Reason.EXTENDS_CONVERSATION)
                return
        running = self._running
        parents = parent_ids(self._head.get, body, running.session_headers, running.session_fields)
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
            server.placement.compactor_used(state.clock())
            if shared is not None:
                shared.compactor_used()
        plan.decision = decision

    def _classify(self, route: Route, body: Body) -> Classified:
        return classify(
            route.role,
            self.header_role,
            self._running.recognisers,
            body.model,
            self._api_key(),
            cache(lambda: read_opening(body)),
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


# What takes longer than all else that is done for a request.
LARGE_BYTES = 512 * 1024
ROLES: dict[bytes, Role] = {role.encode(): role for role in Role}
ON_UNSAFE: dict[bytes, OnUnsafe] = {each.encode(): each for each in OnUnsafe}
_NOBODY = "?"  # no conversation's key
