"""One request's life: arrive, plan, wait at its gate, go out, relay, end, release.

Most requests wait for nothing but their answer, so all up to that is done at once, and the answer's end calls back:
a task for each would cost more than what slotpin does in it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

from slotpin.pinning.decision import Action, Decision, refused
from slotpin.pinning.reasons import Reason
from slotpin.pinning.roles import Role
from slotpin.pinning.route import Route, read_route
from slotpin.proxy.admission import Admitted, busy_message, last_look, pass_now
from slotpin.proxy.answer import Answer, Watch
from slotpin.proxy.forward import Forward, Forwarded
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.ledger import Ledger
from slotpin.proxy.listener import Incoming
from slotpin.proxy.plan import ON_UNSAFE, ROLES, Plan, Planner
from slotpin.proxy.replies import BUG, Reply, error, refusal
from slotpin.proxy.server import Server
from slotpin.proxy.sharing import admission as sharing
from slotpin.proxy.state import State
from slotpin.proxy.steps import Steps
from slotpin.proxy.upstream import Address

Outcome = Forwarded | Literal["client_left", "cut_off", "refused", "failed"]
T = TypeVar("T")
# An SSE comment: clients pass over it (WHATWG HTML section 9.2.6).
_KEEP_ALIVE = b": slotpin waits for the slot\n\n"


class Exchange:
    """`begin`; it ends by itself, or with `cancel` when its client has gone."""

    __slots__ = (
        "_answer",
        "_arrived",
        "_forward",
        "_incoming",
        "_is_over",
        "_ledger",
        "_planner",
        "_running",
        "_state",
        "_steps",
        "_watch",
        "id",
    )

    def __init__(self, state: State, incoming: Incoming) -> None:
        self.id = os.urandom(6).hex()
        self._state = state
        self._running = state.running
        self._incoming = incoming
        self._planner = Planner(state, self._running, self.id, incoming.head)
        self._steps = Steps(state.tasks)
        self._arrived = 0.0  # when its body was whole, or is not read here
        self._ledger: Ledger | None = None  # of a request that generates
        self._watch: Watch | None = None
        self._answer: Answer | None = None
        self._forward: Forward | None = None
        self._is_over = False

    def begin(self) -> None:
        self._steps.run(self._run())

    def cancel(self) -> None:
        if not self._steps.cancel():
            self._leave()

    async def _run(self) -> None:
        try:
            await self._carry_out()
        except asyncio.CancelledError:
            self._leave()
            raise
        except Exception:
            self._failed()

    async def _carry_out(self) -> None:
        incoming = self._incoming
        head = incoming.head
        if reply := _bad_request(head):
            incoming.reply(reply)
            return
        route = read_route(head.method, head.target)
        if route.shape is None:
            self._state.relayed += 1
            if head.method == "POST":
                self._state.strangers.passed_on_at = self._state.clock()
            role = route.role or self._planner.header_role or Role.MAIN
            self._answer = Answer(incoming, watch=None)
            await self._send(role, route, None, self._answer)
            return
        plan = await self._plan(route)
        ledger = self._ledger = Ledger(self._state, self._running, self.id, plan, head, self._arrived)
        self._watch = Watch(route.shape, plan.completions, self._begun, ledger.message_ended)
        answer = self._answer = Answer(incoming, self._watch)
        if plan.tracked and plan.decision.action is not Action.REFUSE:
            try:
                await self._pass_gate(plan, ledger)
            except TimeoutError:
                seconds = self._running.settings.gate.wait_seconds
                plan.decision = refused(Reason.SLOT_BUSY, busy_message(plan, seconds))
        if not ledger.has_decision:
            ledger.decided()
        answer.own_lines = self._own_lines(plan.classified.role, plan.decision)
        if plan.decision.action is Action.REFUSE:
            answer.fail(refusal(plan.decision))
            self._over("refused")
            return
        await self._send(plan.classified.role, route, plan, answer)

    async def _plan(self, route: Route) -> Plan:
        body = self._incoming.body
        if self._running.pin.enabled is False:
            self._arrived = self._state.clock()
            return self._planner.unread(route, Reason.DISABLED, None)
        if body.complete:
            raw: bytes | bytearray = body.take()
        else:
            await self._steps.in_a_task()
            raw = await body.read()
        self._arrived = self._state.clock()
        if (plan := self._planner.plan_now(route, raw)) is not None:
            return plan
        await self._steps.in_a_task()
        return await self._planner.plan(route, raw)

    def _begun(self) -> None:
        """The server works on it."""
        if self._ledger is not None and self._forward is not None:
            self._ledger.begun()
            self._forward.forget_body()

    def _over(self, outcome: Outcome) -> None:
        """Once, whatever has become of it."""
        if self._is_over:
            return
        self._is_over = True
        ledger, answer, watch, forward = self._ledger, self._answer, self._watch, self._forward
        # They hold each other, and with them the request's body.
        self._answer = self._forward = self._watch = None
        if ledger is None or answer is None or watch is None:
            return
        try:
            ledger.status = answer.status or None
            over = answer.complete or answer.message_ended or forward is None or not forward.reached
            ledger.close(outcome, watch.counters.result(), settled=over)
        except Exception:
            self._state.log_bug(self._incoming.head.target)

    def _leave(self) -> None:
        """Its client has gone, or slotpin stops."""
        if self._forward is not None:
            self._forward.leave()
        if self._answer is not None and self._answer.message_ended:
            self._over("completed")  # a client that has its whole message needs not wait for the last bytes
        else:
            self._over("cut_off" if self._incoming.cut_off else "client_left")

    def _failed(self) -> None:
        self._state.log_bug(self._incoming.head.target)
        if self._forward is not None:
            self._forward.leave()
        self._over("failed")
        self._incoming.fail(BUG)

    async def _pass_gate(self, plan: Plan, ledger: Ledger) -> None:
        """Until the request may go out. Raises TimeoutError."""
        server = plan.server
        assert server is not None
        who = f"{plan.classified.role} request {self.id}"
        admitted = pass_now(plan, server, who, self._running.retry_seconds)
        if admitted is None:
            await self._steps.in_a_task()
            admitted = await self._wait_at_gate(plan, server, who)
        ledger.admitted(server, admitted)

    async def _wait_at_gate(self, plan: Plan, server: Server, who: str) -> Admitted:
        wait_seconds = self._running.settings.gate.wait_seconds
        entering = server.gates.enter(plan.gate, who, plan.completions)
        leave = partial(server.gates.leave, settled=True)
        async with asyncio.timeout(wait_seconds or None):
            if server.gates.is_open(plan.gate):
                entered = await entering
            else:
                entered = await self._patiently(entering, plan, undo=leave)
            try:
                if server.shared is not None:
                    claimed = await self._patiently(sharing.claim(plan, server, entered), plan, undo=lambda _: None)
                admitted = await last_look(plan, server, entered, self._running.retry_seconds)
                if server.shared is not None:
                    clearing = sharing.clear(plan, server, entered, claimed)
                    await self._patiently(clearing, plan, undo=lambda _: None)
                elif server.gates.could_meet(pinned=plan.pinned) and not await server.is_patched():
                    await self._patiently(server.gates.clear(entered, pinned=plan.pinned), plan, undo=lambda _: None)
                else:
                    server.gates.sent(entered, pinned=plan.pinned)
            except BaseException:
                leave(entered)
                raise
        return admitted

    async def _patiently(self, waiting: Coroutine[Any, Any, T], plan: Plan, undo: Callable[[T], None]) -> T:
        """Wait, with a sign of life to a client that streams. `undo` what came in the moment of being cancelled."""
        seconds = self._running.settings.gate.keep_alive_seconds
        task = asyncio.create_task(waiting)
        try:
            while not (await asyncio.wait([task], timeout=seconds if plan.streams and seconds else None))[0]:
                self._show_life(plan)
        except BaseException:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                undo(task.result())
            raise
        return task.result()

    def _show_life(self, plan: Plan) -> None:
        if not self._incoming.started:
            lines = b"Content-Type: text/event-stream\r\n" + self._own_lines(plan.classified.role, plan.decision)
            self._incoming.start(200, b"OK", lines, None)
        self._incoming.write(_KEEP_ALIVE)
        self._incoming.flush()

    async def _send(self, role: Role, route: Route, plan: Plan | None, answer: Answer) -> None:
        payload = plan.payload if plan is not None else None
        authorization = self._authorization(role, by_path=route.role is not None)
        self._forward = Forward(self._state, self._running, self._incoming, answer, self._over)
        await self._forward.send(self._address(role), route.target, payload, authorization, self._steps)

    def _own_lines(self, role: Role, decision: Decision) -> bytes:
        slot = b"" if decision.slot is None else b"X-Slotpin-Slot: %d\r\n" % decision.slot
        warning = b""
        if decision.warnings:
            text = "; ".join(f"{cause}: {text}" for cause, text in decision.explained)
            warning = b"X-Slotpin-Warning: %b\r\n" % _printable(text)
        return b"X-Slotpin-Request: %b\r\nX-Slotpin-Role: %b\r\nX-Slotpin-Reason: %b\r\n%b%b" % (
            *(self.id.encode(), role.encode(), decision.reason.encode()),
            *(slot, warning),
        )

    def _address(self, role: Role | None) -> Address:
        running = self._running
        return running.compactor if role is Role.COMPACTOR and not running.pin.same_endpoint else running.main

    def _authorization(self, role: Role, *, by_path: bool) -> bytes | None:
        """What takes the place of the client's credentials: on an endpoint of its own the compactor's key, unless the
        path chose it for a client that may have a key for it. Main's key stays at home."""
        if self._address(role) == self._running.main:
            return self._running.main_authorization
        if not by_path or self._running.settings.listen.api_keys:
            return b"Bearer " + self._running.probe_target.api_key.encode()
        return None


def _bad_request(head: RequestHead) -> Reply | None:
    if head.method == "CONNECT":
        return error(405, "method_not_allowed", "CONNECT is not served; slotpin fronts llama-server only")
    if (role := head.get(b"x-slotpin-role")) and role.lower() not in ROLES:
        return error(400, "invalid_role", f"X-Slotpin-Role: {_shown(role)} is not a role; use main or compactor")
    if (word := head.get(b"x-slotpin-on-unsafe")) and word.lower() not in ON_UNSAFE:
        return error(400, "invalid_on_unsafe", f"X-Slotpin-On-Unsafe: {_shown(word)} is neither refuse nor pass")
    return None


def _shown(value: bytes) -> str:
    return f'"{_printable(value.decode("latin-1")).decode()}"'


def _printable(text: str) -> bytes:
    """Text as a header value may hold it (RFC 9110 section 5.5)."""
    return bytes(byte if 32 <= byte < 127 else ord("?") for byte in text.encode())
