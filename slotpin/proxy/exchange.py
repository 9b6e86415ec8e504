"""One request's life: arrive, classify, decide, bind, rewrite, forward, relay, end, release."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Literal

from slotpin.llama.series import choose
from slotpin.pinning.bindings import Binding
from slotpin.pinning.conversations import named_conversation
from slotpin.pinning.decision import Action, Decision, Probed, decide_compactor, decide_main, let_pass
from slotpin.pinning.message_end import MessageEndScanner, Shape
from slotpin.pinning.reasons import Reason, explain
from slotpin.pinning.request import Body, Opening, Request, read_body, read_opening
from slotpin.pinning.roles import Classified, OnUnsafe, Role, classify
from slotpin.pinning.route import Route, read_route
from slotpin.pinning.splice import splice
from slotpin.pinning.topology import Topology
from slotpin.proxy.answer import Answer
from slotpin.proxy.headers import Headers, upstream_head
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import Reply, error, refusal
from slotpin.proxy.state import State
from slotpin.proxy.upstream import Address, StaleConnectionError, UpstreamConnection, UpstreamError

Outcome = Literal["completed", "client_left", "upstream_broke", "upstream_refused", "unreachable", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What will be done with a generating request. `body` None: pass it on while it still arrives."""

    classified: Classified
    decision: Decision
    body: bytes | None
    completions: int = 1
    probed: Probed | None = None


class Exchange:
    def __init__(self, state: State, incoming: Incoming) -> None:
        self.id = secrets.token_hex(6)
        self._state = state
        self._running = state.running
        self._incoming = incoming

    async def run(self) -> None:
        head = self._incoming.head
        if reply := _bad_request(head.method, head.get(b"x-slotpin-role")):
            self._incoming.reply(reply)
            return
        route = read_route(head.method, head.target)
        if route.shape is None:
            self._state.relayed += 1
            answer = Answer(self._incoming, own_headers=[], scanner=None)
            role = route.role or self._header_role or Role.MAIN
            authorization = self._authorization(role, by_path=route.role is not None)
            await self._forward(self._address(role), route.target, None, answer, authorization)
            return
        plan = await self._plan(route)
        self._record(plan)
        outcome: Outcome = "failed"
        try:
            outcome = await self._carry_out(plan, route.target, route.shape)
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        finally:
            self._state.bindings.abort(self.id)  # there is nothing to drop after a message end
            self._state.outcomes[outcome] += 1
            self._state.log.info("exchange", request=self.id, outcome=outcome)

    async def _plan(self, route: Route) -> _Plan:
        if self._running.pin.enabled is False:
            classified = classify(route.role, self._header_role, (), None, None, Opening)
            return _Plan(classified, Decision(Action.LEAVE, Reason.DISABLED), body=None)
        raw = await self._incoming.body.read()
        body = read_body(raw)
        if body is None:
            classified = classify(route.role, self._header_role, (), None, None, Opening)
            return _Plan(classified, Decision(Action.LEAVE, Reason.NOT_JSON_OBJECT), raw)
        classified = self._classify(route, body)
        probed = None
        if self._running.pin.needs_topology:
            probed = await self._state.probe.topology(self._running.probe_target)
        request = body.request
        if route.shape is Shape.ANTHROPIC:
            request = replace(request, route_pins=await self._server_is_patched(probed))
        decision = self._decide(classified, request, probed)
        return _Plan(classified, decision, _rewritten(raw, body, decision), body.completions, probed)

    def _classify(self, route: Route, body: Body) -> Classified:
        return classify(
            route.role,
            self._header_role,
            self._running.recognisers,
            body.model,
            self._api_key(),
            lambda: read_opening(body),
        )

    async def _server_is_patched(self, probed: Probed | None) -> bool:
        """Whether the server has all of slotpin's patches; one of them makes the Anthropic route heed `id_slot`."""
        if not isinstance(probed, Topology):
            return False
        build = await self._state.probe.build(self._running.probe_target)
        return bool(_PATCHES) and build.endswith(f"+slotpin.{_PATCHES}")

    def _decide(self, classified: Classified, request: Request, probed: Probed | None) -> Decision:
        """Decide, and bind a main request's decision to it."""
        bindings, pin = self._state.bindings, self._running.pin
        conversation = named_conversation(self._incoming.head.get)
        if classified.role is Role.MAIN:
            decision = decide_main(pin, probed, request)
            slot_ids = probed.ids if isinstance(probed, Topology) else None
            bindings.open(Binding(self.id, conversation, decision, pin.generation, slot_ids))
            return decision
        decision = decide_compactor(pin, probed, request, bindings.candidates(conversation))
        if decision.action is Action.REFUSE and classified.on_unsafe is OnUnsafe.PASS:
            return let_pass(decision)
        return decision

    async def _carry_out(self, plan: _Plan, target: bytes, shape: Shape) -> Outcome:
        headers = self._own_headers(plan)
        if plan.decision.action is Action.REFUSE:
            self._incoming.reply(refusal(plan.decision).with_headers(headers))
            return "refused"
        scanner = MessageEndScanner(shape, plan.completions)
        answer = Answer(self._incoming, headers, scanner, lambda: self._state.bindings.end(self.id))
        try:
            role = plan.classified.role
            authorization = self._authorization(role, by_path=plan.classified.found_by == "path")
            return await self._forward(self._address(role), target, plan.body, answer, authorization)
        except asyncio.CancelledError:
            if answer.message_ended:
                return "completed"  # the client has what it wanted, and needs not wait for the last bytes
            raise

    async def _forward(
        self, address: Address, target: bytes, body: bytes | None, answer: Answer, authorization: bytes | None = None
    ) -> Outcome:
        """Send the request and relay its answer."""
        incoming = self._incoming
        if body is None and incoming.body.complete:
            body = await incoming.body.read()
        length = incoming.head.content_length if body is None else len(body)
        if target != b"*":
            target = address.root.encode() + target
        head = upstream_head(incoming.head, target, address.host_header, length, authorization)
        pool = self._state.pool(address)
        connection: UpstreamConnection | None = None
        await incoming.flow.drain()  # of the answer before, where requests were sent ahead
        try:
            # What is passed on while it arrives can't be sent again, so it gets a connection that can't be stale.
            connection = await pool.acquire(fresh=body is None)
            try:
                await self._transfer(connection, head, body, answer, sized=length is not None)
            except StaleConnectionError:
                if body is None:
                    raise
                connection = None
                connection = await pool.acquire(fresh=True)
                await self._transfer(connection, head, body, answer, sized=True)
        except UpstreamError as problem:
            # It may come back with other slots.
            self._state.probe.forget(self._running.probe_target)
            if incoming.started:
                incoming.abort()
                return "completed" if answer.message_ended else "upstream_broke"
            what = "cannot reach llama-server at" if connection is None else "no answer from llama-server at"
            reply = error(502, "upstream_unreachable", f"{what} {address.url}: {problem}")
            incoming.reply(reply.with_headers(answer.own_headers))
            return "unreachable"
        finally:
            if connection is not None:
                # The next request of this connection, sent ahead, may have set its own already.
                if incoming.flow.on_change == connection.throttle:
                    incoming.flow.on_change = None
                pool.release(connection)
        if answer.status >= 400:
            return "upstream_refused"
        return "completed" if answer.message_ended else "upstream_broke"

    async def _transfer(
        self, connection: UpstreamConnection, head: bytes, body: bytes | None, answer: Answer, *, sized: bool
    ) -> None:
        """One try: until the answer is complete. Raises UpstreamError."""
        self._incoming.flow.on_change = connection.throttle
        connection.start(self._incoming.head.method, head, answer)
        if body is not None:
            if body:
                connection.write(body)
            await answer.wait()
            return
        upload = asyncio.create_task(self._upload(connection, sized))
        try:
            await answer.wait()
        finally:
            if not upload.done():
                upload.cancel()
                connection.abort()  # the answer came early: half a request is left on this connection

    async def _upload(self, connection: UpstreamConnection, sized: bool) -> None:
        async for piece in self._incoming.body.pieces():
            connection.write(piece if sized else b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.flow.drain()
        if not sized:
            connection.write(b"0\r\n\r\n")

    def _record(self, plan: _Plan) -> None:
        state, classified, decision = self._state, plan.classified, plan.decision
        state.decisions[classified.role, decision.reason] += 1
        state.log.info(
            "decision",
            request=self.id,
            role=classified.role,
            found_by=classified.found_by,
            action=decision.action,
            slot=decision.slot,
            slots=plan.probed.count if isinstance(plan.probed, Topology) else None,
            reason=decision.reason,
            generation=self._running.pin.generation,
        )
        for cause in decision.warnings:
            state.warner.warn(cause, explain(cause, decision.detail), role=classified.role, request=self.id)

    def _own_headers(self, plan: _Plan) -> Headers:
        decision = plan.decision
        headers: Headers = [
            (b"X-Slotpin-Request", self.id.encode()),
            (b"X-Slotpin-Role", plan.classified.role.encode()),
            (b"X-Slotpin-Reason", decision.reason.encode()),
        ]
        if decision.slot is not None:
            headers.append((b"X-Slotpin-Slot", b"%d" % decision.slot))
        if decision.warnings:
            text = "; ".join(f"{cause}: {explain(cause, decision.detail)}" for cause in decision.warnings)
            headers.append((b"X-Slotpin-Warning", _printable(text)))
        return headers

    @property
    def _header_role(self) -> Role | None:
        value = self._incoming.head.get(b"x-slotpin-role")
        return _ROLES[value.lower()] if value else None

    def _address(self, role: Role | None) -> Address:
        running = self._running
        return running.compactor if role is Role.COMPACTOR and not running.pin.same_endpoint else running.main

    def _api_key(self) -> str | None:
        head = self._incoming.head
        scheme, _, token = (head.get(b"authorization") or b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else head.get(b"x-api-key")
        return key.decode("latin-1") if key else None

    def _authorization(self, role: Role, *, by_path: bool) -> bytes | None:
        """The compactor's own key, where slotpin and not the path chose its endpoint: main's key stays at home."""
        if self._address(role) != self._running.main and not by_path:
            return b"Bearer " + self._running.probe_target.api_key.encode()
        return None


# Of all patches, as `slotpin build` applies them if nothing else is asked for.
_PATCHES = choose("all").digest
_ROLES: dict[bytes, Role] = {role.encode(): role for role in Role}


def _rewritten(raw: bytes, body: Body, decision: Decision) -> bytes:
    members: dict[str, bytes] = {}
    if decision.add_id:
        members["id_slot"] = b"%d" % (decision.slot or 0)
    if decision.add_cache_prompt:
        members["cache_prompt"] = b"true"
    return splice(raw, members, body.request.nulls)


def _bad_request(method: str, role: bytes | None) -> Reply | None:
    if method == "CONNECT":
        return error(405, "method_not_allowed", "CONNECT is not served; slotpin fronts llama-server only")
    if role and role.lower() not in _ROLES:
        shown = _printable(role.decode("latin-1")).decode()
        return error(400, "invalid_role", f'X-Slotpin-Role: "{shown}" is not a role; use main or compactor')
    return None


def _printable(text: str) -> bytes:
    """Text as a header value may hold it (RFC 9110 section 5.5)."""
    return bytes(byte if 32 <= byte < 127 else ord("?") for byte in text.encode())
