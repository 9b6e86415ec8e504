"""Slotpin's plans and looks in front of a stub with three slots, without a proxy around them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slotpin.llama.series import choose
from slotpin.pinning.reuse import Left
from slotpin.pinning.route import read_route
from slotpin.proxy.admission import Admitted
from slotpin.proxy.headers import Headers, RequestHead
from slotpin.proxy.plan import Plan, Planner
from slotpin.proxy.server import Server
from slotpin.proxy.state import State
from tests.support.clock import Clock
from tests.support.proxy import capturing_log, settings_for
from tests.support.stub_upstream import Connection, Request, Stub, answer, stub_upstream

CHAT = "/v1/chat/completions"
STOCK = "b1-abc"
PATCHED = f"b1-abc+slotpin.{choose('all').digest}"
FIRST: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
NEXT = [*FIRST, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


class Front:
    """A llama-server with three slots of `tokens` each, and what slotpin knows of it."""

    def __init__(self, state: State, clock: Clock, stub: Stub, tokens: int) -> None:
        self.state = state
        self.clock = clock
        self.count = 0
        self._stub = stub
        self._tokens = tokens
        self._tasks = 0
        self._show()

    @property
    def server(self) -> Server:
        return self.state.server(self.state.running.probe_target)

    def planner(self, headers: Headers) -> Planner:
        self.count += 1
        head = RequestHead("POST", CHAT.encode(), [(b"Host", b"h"), *headers], http10=False, keep_alive=True)
        return Planner(self.state, self.state.running, f"request {self.count}", head)

    async def plan(self, body: bytes, target: str = CHAT, headers: Headers | None = None) -> Plan:
        return await self.planner(headers or []).plan(read_route("POST", target.encode()), body)

    def plan_now(self, body: bytes, target: str = CHAT, headers: Headers | None = None) -> Plan | None:
        return self.planner(headers or []).plan_now(read_route("POST", target.encode()), body)

    def ended(self, plan: Plan, admitted: Admitted) -> None:
        """Its turn has had 100 tokens."""
        assert plan.conversation is not None
        self.answered(admitted.entered.sent_at)
        self.server.gates.leave(admitted.entered, settled=True)
        plan.conversation.left = Left(100, 10, plan.decision.slot, self.server.epoch, 4096)
        self.server.mark(plan.conversation.key)

    def answered(self, sent_at: float) -> None:
        """A request that was sent then has its whole answer."""
        self._tasks += 1
        self._show()
        self.server.answered(sent_at)

    def _show(self) -> None:
        slot = {"n_ctx": 4096, "is_processing": False, "n_prompt_tokens": self._tokens, "id_task": self._tasks}
        self._stub.slots = answer(json.dumps([{"id": number, **slot} for number in range(3)]).encode())


@asynccontextmanager
async def front(enabled: bool | str = "auto", build: str = STOCK, tokens: int = 100) -> AsyncIterator[Front]:
    async def script(connection: Connection, _: Request) -> None:
        await connection.send(answer(json.dumps({"build_info": build}).encode()))

    async with stub_upstream(script) as stub:
        clock = Clock()
        state = State(settings_for(stub, enabled), capturing_log()[0], clock)
        try:
            yield Front(state, clock, stub, tokens)
        finally:
            await state.close()


def body(messages: object = FIRST, **members: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **members}).encode()
