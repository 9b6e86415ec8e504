"""Whether the server clears idle slots is learned from what ran while a conversation's slot was idle."""

from __future__ import annotations

import asyncio
import json

import pytest

from slotpin.proxy.admission import pass_now
from tests.support.front import NEXT, body, front
from tests.support.proxy import on_loop, running_proxy, settings_for
from tests.support.stub_upstream import Connection, Request, answer, stub_upstream

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("tokens", [0, 100])
@pytest.mark.parametrize(
    ("sent", "answered", "tells"),
    [(11, 12, True), (9, 12, False), (11, 15, False), (11, None, False)],
    ids=["all of it in between", "sent before", "answered after the look", "not answered"],
)
@on_loop
async def test_another_one_has_to_run_all_the_while(sent: int, answered: int | None, tells: bool, tokens: int) -> None:
    """The turn ends at 10, the slot is looked at at 14. What began before may have cleared it before, too; what is not
    answered may not have begun."""
    async with front(tokens=tokens) as slotpin:
        server, clock = slotpin.server, slotpin.clock
        clock.now = 1
        first = await slotpin.plan(body())
        admitted = pass_now(first, server, "first", 1)
        assert admitted is not None
        server.began(0, "c1")
        for now in range(2, 16):
            clock.now = now
            if now == sent:
                server.began(2, "c2")
            if now == answered:
                slotpin.answered(sent)
            if now == 10:
                slotpin.ended(first, admitted)
            if now == 14:
                await server.look()
        plan = await slotpin.plan(body(NEXT))
        assert plan.conversation is not None and plan.conversation.left is not None
        # An exchange that begins during the look hides nothing of what was seen.
        server.began(1, "c3")
        server.holds(plan.conversation.key, plan.conversation.left, 0)
        assert server.clears_idle_slots is (False if tells and tokens else None)


@on_loop
async def test_it_is_learned_where_conversations_never_rest() -> None:
    """Others begin between a look and the answer to it, so that it doesn't show how the slots are now."""
    tasks = 0
    held = asyncio.Event()  # what is asked of the slots is answered then
    held.set()
    asked = asyncio.Event()

    async def script(connection: Connection, received: Request) -> None:
        nonlocal tasks
        if received.target.startswith(b"/slots"):
            slot = {"n_ctx": 4096, "is_processing": False, "n_prompt_tokens": 11, "id_task": tasks}
            shown = answer(json.dumps([{"id": number, **slot} for number in range(4)]).encode())
            asked.set()
            await held.wait()
            await connection.send(shown)
            return
        tasks += 1
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
        await connection.send(answer(json.dumps({"usage": usage}).encode()))

    async with stub_upstream(script, slots=None) as stub, running_proxy(settings_for(stub)) as running:

        async def turn(session: bytes, text: str) -> None:
            messages = [{"role": "user", "content": text}]
            answered = await running.fetch(CHAT, body(messages), [b"X-Slotpin-Session: " + session])
            assert b"X-Slotpin-Reason: pinned" in answered.head

        await turn(b"a", "one")
        await turn(b"b", "two")
        held.clear()
        asked.clear()
        waits = asyncio.create_task(turn(b"a", "one"))
        await asked.wait()
        await turn(b"c", "three")
        assert not waits.done()
        held.set()
        await waits
        assert (await running.status())["server"]["clearsIdleSlots"] is False
