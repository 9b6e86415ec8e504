"""What is kept of one generating exchange: its log events, its ticket, its gate, and what its cache did."""

from __future__ import annotations

import asyncio
import time

from slotpin.errors import printable
from slotpin.observe.observer import client_name
from slotpin.observe.records import UNDER_WAY, WAITING, Record
from slotpin.pinning.counters import Counters
from slotpin.pinning.reuse import Evidence, Left, Reuse, advise, assess
from slotpin.pinning.roles import Role
from slotpin.pinning.topology import Topology
from slotpin.proxy.admission import Admitted
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.plan import Plan
from slotpin.proxy.server import Server
from slotpin.proxy.state import Running, State


class Ledger:
    """`decided` or `admitted` first, `message_ended` when the answer is whole, `close` in any case, once each."""

    def __init__(
        self, state: State, running: Running, exchange_id: str, plan: Plan, head: RequestHead, arrived: float
    ) -> None:
        self._state = state
        self._running = running
        self._id = exchange_id
        self._plan = plan
        self._model = plan.body.model if plan.body is not None else None
        self._head = head
        self._arrived = arrived
        self._decided_at = arrived
        self._counters: Counters | None = None
        self.has_decision = False
        self.status: int | None = None  # llama-server's
        self._server: Server | None = None
        self._admitted: Admitted | None = None
        self._reuse: Reuse | None = None
        self._waited: float | None = None
        self._closed_at: float | None = None
        state.observer.began(exchange_id, self)

    def decided(self) -> None:
        """The decision will not change any more."""
        state, classified, decision = self._state, self._plan.classified, self._plan.decision
        self.has_decision = True
        self._decided_at = state.clock()
        state.log.debug(
            "decision",
            request=self._id,
            role=classified.role,
            action=decision.action,
            slot=decision.slot,
            reason=decision.reason,
        )
        for cause, text in decision.explained:
            state.warner.warn(cause, text, role=classified.role, request=self._id)

    def admitted(self, server: Server, admitted: Admitted) -> None:
        """It goes out now."""
        self._server, self._admitted = server, admitted
        self._waited = self._state.clock() - admitted.entered.since
        server.began(self._plan.decision.slot, self._conversation or self._plan.classified.role)
        self.decided()

    def begun(self) -> None:
        """The server works on it: its body is needed no longer, and may be large."""
        self._plan.forget_body()
        if self._admitted is not None:
            self._admitted.entered.running = True

    def message_ended(self, counters: Counters | None) -> None:
        """The client has its whole answer, and the server is done with the slot."""
        self._state.bindings.end(self._id)
        if counters is not None:
            self._counters = counters
            self._reuse = self._assess(counters)
        if self._server is not None and self._admitted is not None:
            self._server.answered(self._admitted.entered.sent_at)
            self._server.gates.leave(self._admitted.entered, settled=True)

    def close(self, outcome: str, counters: Counters | None, *, settled: bool) -> None:
        """`settled`: the server is done with it too."""
        if not self.has_decision:
            self.decided()
        self._state.bindings.abort(self._id)  # there is nothing to drop after a message end
        if self._server is not None and self._admitted is not None:
            self._server.gates.leave(self._admitted.entered, settled=settled)
        self._counters = counters
        self._closed_at = self._state.clock()
        # The answer's last bytes go out first.
        asyncio.get_running_loop().call_soon(self._tell, outcome)

    def _tell(self, outcome: str) -> None:
        self._state.observer.ended(self.record(outcome), self._head.get)

    def record(self, outcome: str = "") -> Record:
        """As it is now; `outcome` once it has ended."""
        plan, counters, reuse = self._plan, self._counters, self._reuse
        decision = plan.decision
        now = self._state.clock() if self._closed_at is None else self._closed_at
        seconds = now - self._arrived
        decided_at = self._decided_at if self.has_decision else now
        return Record(
            id=self._id,
            arrived=time.time() - seconds,
            client=client_name((self._head.get(b"user-agent") or b"")[:_AGENT_BYTES]),
            model=printable(self._model[:_MODEL_LETTERS]) if self._model else None,
            server=plan.server.model if plan.server is not None else "",
            role=plan.classified.role,
            found_by=plan.classified.found_by,
            conversation=self._conversation,
            action=decision.action,
            reason=decision.reason,
            detail=decision.detail,
            warnings=decision.warnings,
            slot=decision.slot,
            slots=plan.probed.count if isinstance(plan.probed, Topology) else None,
            gate=plan.gate,
            generation=self._running.pin.generation,
            outcome=outcome or (UNDER_WAY if self.has_decision else WAITING),
            status=self.status,
            planned=max(0.0, decided_at - self._arrived - (self._waited or 0.0)),
            waited=self._waited,
            seconds=seconds,
            evaluated=counters.evaluated if counters is not None else None,
            cached=counters.cached if counters is not None else None,
            generated=counters.generated if counters is not None else None,
            prompt_ms=counters.prompt_ms if counters is not None else None,
            expected=reuse.expected if reuse is not None else None,
            lost=reuse.lost if reuse is not None else None,
            cause=reuse.cause if reuse is not None else None,
            cause_detail=reuse.detail if reuse is not None else "",
        )

    def _assess(self, counters: Counters) -> Reuse | None:
        """Compare with the conversation's last turn, and remember what this one leaves."""
        plan, server, admitted = self._plan, self._server, self._admitted
        conversation, slot = plan.conversation, plan.decision.slot
        if conversation is None or server is None or admitted is None:
            return None
        emptied = admitted.held is False and not admitted.other_ran
        evidence = Evidence(server.epoch, slot, emptied, admitted.other_ran, admitted.held, plan.change)
        reuse = assess(conversation.left, counters, evidence)
        if plan.classified.role is Role.MAIN:
            found = plan.probed.slot(slot) if isinstance(plan.probed, Topology) and slot is not None else None
            n_ctx = found.n_ctx if found is not None else None
            prompt = counters.evaluated + counters.cached
            left = Left(prompt, counters.generated, slot, server.epoch, n_ctx)
            # Where nothing was known of the slots there is nothing to look for in them either.
            conversation.left = left if slot is not None or isinstance(plan.probed, Topology) else None
            server.mark(conversation.key)
            if server.shared is not None and conversation.left is not None:
                server.shared.left(conversation.key, conversation.left)
            self._state.history.add(conversation.key, counters, reuse)
        if reuse.worth_a_warning and reuse.cause is not None:
            text = f"{reuse.lost} of {reuse.expected} tokens were evaluated again: {advise(reuse.cause, reuse.detail)}"
            self._state.warner.warn(f"cache_lost:{reuse.cause}", text, request=self._id, conversation=conversation.key)
        return reuse

    @property
    def _conversation(self) -> str | None:
        return self._plan.conversation.key if self._plan.conversation is not None else None


# A model's name is the client's own text.
_MODEL_LETTERS = 100
_AGENT_BYTES = 64
