"""One request's life: arrive, classify, decide, bind, rewrite, forward, relay, end, release."""

from __future__ import annotations

import asyncio
import secrets
from typing import Literal
from urllib.parse import unquote_to_bytes

from slotpin.pinning.bindings import Binding
from slotpin.pinning.conversations import named_conversation
from slotpin.pinning.decision import (
    Action,
    Decision,
    Probed,
    decide_compactor,
    decide_main,
    let_pass,
)
from slotpin.pinning.message_end import MessageEndScanner, Shape
from slotpin.pinning.reasons import Reason, explain
from slotpin.pinning.request import Body, Opening, generating_shape, read_body, read_opening
from slotpin.pinning.roles import Classified, OnUnsafe, Role, classify, split_role
from slotpin.pinning.splice import splice
from slotpin.pinning.topology import Topology
from slotpin.proxy.answer import Answer
from slotpin.proxy.headers import Headers, upstream_head
from slotpin.proxy.listener import Incoming
from slotpin.proxy.replies import Reply, error, refusal
from slotpin.proxy.state import State
from slotpin.proxy.upstream import Address, StaleConnectionError, UpstreamConnection, UpstreamError

Outcome = Literal["completed", "client_left", "upstream_broke", "upstream_refused", "unreachable", "refused", "failed"]


class Exchange:
    def __init__(self, state: State, incoming: Incoming) -> None:
        self.id = secrets.token_hex(6)
        self._state = state
        self._running = state.running
        self._incoming = incoming
        self._bound = False

    async def run(self) -> None:
        head = self._incoming.head
        path, _, query = head.target.partition(b"?")
        # llama-server decodes a path before it routes it (cpp-httplib), so this is what it will see.
        path_role, server_path = split_role(unquote_to_bytes(path).decode("latin-1"))
        target = path[len(f"/{path_role}") :] or b"/" if path_role else path
        if query:
            target += b"?" + query
        header_role = head.get(b"x-slotpin-role")
        if head.method == "CONNECT" or (header_role is not None and header_role not in _ROLES):
            self._incoming.reply(_bad_request(head.method, header_role))
            return
        named_role = path_role or (_ROLES[header_role] if header_role else None)
        shape = generating_shape(head.method, server_path)
        if shape is None:
            self._state.relayed += 1
            await self._forward(self._address(named_role), target, [], None)
        else:
            await self._generate(target, shape, path_role, named_role)

    async def _generate(self, target: bytes, shape: Shape, path_role: Role | None, named_role: Role | None) -> None:
        running = self._running
        if running.pin.enabled is False:
            found_by = "path" if path_role else "header" if named_role else "default"
            classified = Classified(named_role or Role.MAIN, found_by)
            decision = Decision(Action.LEAVE, Reason.DISABLED)
            await self._carry_out(target, shape, classified, decision, None, None, None)
            return
        raw = await self._incoming.body.read()
        body = read_body(raw)
        classified = self._classify(path_role, named_role, body)
        if body is None:
            decision = Decision(Action.LEAVE, Reason.NOT_JSON_OBJECT)
            await self._carry_out(target, shape, classified, decision, None, raw, None)
            return
        probed = await self._state.probe.topology(running.probe_target) if running.pin.needs_topology else None
        decision = self._decide(classified, body, probed)
        await self._carry_out(target, shape, classified, decision, body, raw, probed)

    def _classify(self, path_role: Role | None, named_role: Role | None, body: Body | None) -> Classified:
        return classify(
            path_role,
            named_role,
            self._running.recognisers if body is not None else (),
            body.model if body is not None else None,
            self._api_key(),
            lambda: read_opening(body) if body is not None else _NO_OPENING,
        )

    def _decide(self, classified: Classified, body: Body, probed: Probed | None) -> Decision:
        state, pin = self._state, self._running.pin
        conversation = named_conversation(self._incoming.head.get)
        if classified.role is Role.MAIN:
            decision = decide_main(pin, probed, body.request)
            ids = probed.ids if isinstance(probed, Topology) else None
            state.bindings.open(Binding(self.id, conversation, decision, pin.generation, ids))
            self._bound = True
            return decision
        decision = decide_compactor(pin, probed, body.request, state.bindings.candidates(conversation))
        if decision.action is Action.REFUSE and classified.on_unsafe is OnUnsafe.PASS:
            return let_pass(decision)
        return decision

    async def _carry_out(
        self,
        target: bytes,
        shape: Shape,
        classified: Classified,
        decision: Decision,
        body: Body | None,
        raw: bytes | None,
        probed: Probed | None,
    ) -> None:
        self._record(classified, decision, probed)
        headers = self._own_headers(classified.role, decision)
        outcome: Outcome = "client_left"
        answer: Answer | None = None
        try:
            if decision.action is Action.REFUSE:
                outcome = "refused"
                reply = refusal(decision)
                self._incoming.reply(reply.with_headers(headers))
                return
            if raw is not None and body is not None:
                raw = _rewritten(raw, body, decision)
            scanner = MessageEndScanner(shape, body.completions if body is not None else 1)
            answer = Answer(self._incoming, headers, scanner, self._message_ended)
            outcome = await self._forward(self._address(classified.role), target, headers, answer, raw, classified)
        finally:
            if answer is not None and answer.message_ended:
                outcome = "completed"
            if self._bound:
                self._state.bindings.abort(self.id)  # nothing is left to drop after a message end
            self._state.outcomes[outcome] += 1
            self._state.log.info(
                "exchange", request=self.id, outcome=outcome, status=answer.status if answer is not None else None
            )

    async def _forward(
        self,
        address: Address,
        target: bytes,
        headers: Headers,
        answer: Answer | None,
        body: bytes | None = None,
        classified: Classified | None = None,
    ) -> Outcome:
        """Send the request and relay its answer. `body` None: as the client sends it, while it is still arriving."""
        incoming = self._incoming
        if answer is None:
            answer = Answer(incoming, headers, None, None)
        if body is None and incoming.body.complete:
            body = await incoming.body.read()
        pool = self._state.pool(address)
        length = int(incoming.head.get(b"content-length") or b"-1") if body is None else len(body)
        head = upstream_head(
            incoming.head,
            address.root.encode() + target,
            address.host_header,
            length if length >= 0 else None,
            self._authorization(classified),
        )
        connection: UpstreamConnection | None = None
        try:
            connection = await pool.acquire()
            try:
                await self._transfer(connection, head, body, length >= 0, answer)
            except StaleConnectionError:
                if body is None:
                    raise
                connection = await pool.acquire(fresh=True)
                await self._transfer(connection, head, body, True, answer)
        except UpstreamError as problem:
            self._state.probe.forget(self._running.probe_target)
            if incoming.started:
                incoming.abort()
                return "upstream_broke"
            what = "cannot reach llama-server at" if connection is None else "no answer from llama-server at"
            reply = error(502, "upstream_unreachable", f"{what} {address.url}: {problem}")
            incoming.reply(reply.with_headers(headers))
            return "unreachable"
        finally:
            incoming.flow.on_change = None
            if connection is not None:
                pool.release(connection)
        return "upstream_refused" if answer.status >= 400 else "completed" if answer.message_ended else "upstream_broke"

    async def _transfer(
        self, connection: UpstreamConnection, head: bytes, body: bytes | None, sized: bool, answer: Answer
    ) -> None:
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
                connection.abort()  # the server has answered early; half a request is left on this connection

    async def _upload(self, connection: UpstreamConnection, sized: bool) -> None:
        async for piece in self._incoming.body.pieces():
            connection.write(piece if sized else b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.flow.drain()
        if not sized:
            connection.write(b"0\r\n\r\n")

    def _message_ended(self) -> None:
        if self._bound:
            self._state.bindings.end(self.id)

    def _record(self, classified: Classified, decision: Decision, probed: Probed | None) -> None:
        state = self._state
        state.decisions[classified.role, decision.reason] += 1
        state.log.info(
            "decision",
            request=self.id,
            role=classified.role,
            found_by=classified.found_by,
            action=decision.action,
            slot=decision.slot,
            slots=probed.count if isinstance(probed, Topology) else None,
            reason=decision.reason,
            generation=self._running.pin.generation,
        )
        for cause in decision.warnings:
            state.warner.warn(cause, explain(cause, decision.detail), role=classified.role, request=self.id)

    def _own_headers(self, role: Role, decision: Decision) -> Headers:
        headers: Headers = [
            (b"X-Slotpin-Request", self.id.encode()),
            (b"X-Slotpin-Role", role.encode()),
            (b"X-Slotpin-Reason", decision.reason.encode()),
        ]
        if decision.slot is not None:
            headers.append((b"X-Slotpin-Slot", b"%d" % decision.slot))
        if decision.warnings:
            text = "; ".join(f"{cause}: {explain(cause, decision.detail)}" for cause in decision.warnings)
            headers.append((b"X-Slotpin-Warning", _printable(text)))
        return headers

    def _address(self, role: Role | None) -> Address:
        running = self._running
        return running.compactor if role is Role.COMPACTOR and not running.pin.same_endpoint else running.main

    def _api_key(self) -> str | None:
        head = self._incoming.head
        authorization = head.get(b"authorization") or b""
        scheme, _, token = authorization.partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else head.get(b"x-api-key")
        return key.decode("latin-1") if key else None

    def _authorization(self, classified: Classified | None) -> bytes | None:
        """The compactor's own key, where slotpin and not the client chose its endpoint: main's key stays at home."""
        running = self._running
        if classified is None or running.pin.same_endpoint or running.pin.enabled is False:
            return None
        if classified.role is Role.MAIN or classified.found_by == "path":
            return None
        return b"Bearer " + running.probe_target.api_key.encode()


_ROLES: dict[bytes, Role] = {role.encode(): role for role in Role}
_NO_OPENING = Opening()


def _rewritten(raw: bytes, body: Body, decision: Decision) -> bytes:
    members: dict[str, bytes] = {}
    if decision.add_id:
        members["id_slot"] = b"%d" % (decision.slot or 0)
    if decision.add_cache_prompt:
        members["cache_prompt"] = b"true"
    return splice(raw, members, body.request.nulls)


def _bad_request(method: str, header_role: bytes | None) -> Reply:
    if method == "CONNECT":
        return error(405, "method_not_allowed", "CONNECT is not served: slotpin fronts llama-server only")
    shown = _printable((header_role or b"").decode("latin-1")).decode()
    return error(400, "invalid_role", f'X-Slotpin-Role: "{shown}" is not a role; use main or compactor')


def _printable(text: str) -> bytes:
    """Text as a header value may hold it (RFC 9110 section 5.5)."""
    return bytes(byte if 32 <= byte < 127 else ord("?") for byte in text.encode())
