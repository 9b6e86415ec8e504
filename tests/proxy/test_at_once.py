"""What has to wait for nothing is planned and let through at once, as it would be otherwise; else nothing is done."""

from __future__ import annotations

import pytest

from slotpin.pinning.decision import Action
from slotpin.pinning.reasons import Reason
from slotpin.proxy.admission import Admitted, last_look, pass_now
from slotpin.proxy.headers import Headers
from slotpin.proxy.plan import LARGE_BYTES, Plan
from slotpin.proxy.probe import CACHE_SECONDS
from tests.support.front import FIRST, NEXT, PATCHED, STOCK, Front, body, front
from tests.support.proxy import on_loop

ANTHROPIC = "/v1/messages"


def shown(plan: Plan) -> tuple[object, ...]:
    conversation = plan.conversation.key if plan.conversation is not None else None
    return plan.classified, plan.decision, plan.payload, conversation, plan.change, plan.gate, plan.pinned, plan.tracked


@on_loop
async def test_only_the_first_request_has_to_wait() -> None:
    async with front() as slotpin:
        assert slotpin.plan_now(body()) is None
        assert (len(slotpin.state.conversations), slotpin.state.bindings.open_count) == (0, 0)
        first = await slotpin.plan(body())
        then = slotpin.plan_now(body(NEXT))
        assert then is not None
        assert (then.decision.reason, then.decision.slot) == (Reason.PINNED, first.decision.slot)
        assert then.conversation is first.conversation and slotpin.state.bindings.open_count == 2
        slotpin.clock.now += CACHE_SECONDS
        assert slotpin.plan_now(body(NEXT)) is None


@on_loop
async def test_a_large_body_waits_for_its_turn() -> None:
    async with front() as slotpin:
        await slotpin.plan(body())
        assert slotpin.plan_now(body([{"role": "user", "content": "x" * LARGE_BYTES}])) is None
        assert len(slotpin.state.conversations) == 1


@pytest.mark.parametrize(("build", "reason"), [(STOCK, Reason.ROUTE_IGNORES_SLOT), (PATCHED, Reason.PINNED)])
@on_loop
async def test_the_anthropic_route_waits_until_it_is_known_who_is_there(build: str, reason: Reason) -> None:
    async with front(build=build) as slotpin:
        await slotpin.plan(body())
        assert slotpin.plan_now(body(), ANTHROPIC) is None
        assert (await slotpin.plan(body(), ANTHROPIC)).decision.reason is reason
        plan = slotpin.plan_now(body(NEXT), ANTHROPIC)
        assert plan is not None and plan.decision.reason is reason


@pytest.mark.parametrize("enabled", [True, "auto"])
@pytest.mark.parametrize(
    ("request_body", "headers"),
    [
        (body(NEXT), []),
        (body(NEXT, id_slot=1, cache_prompt=None), []),
        (body(NEXT, id_slot=-2, n=2), []),
        (body([{"role": "user", "content": "other"}]), [(b"Session_Id", b"s")]),
        (body(NEXT), [(b"X-Slotpin-Role", b"compactor")]),
        (body([{"role": "system", "content": "You are a context summarization assistant."}, *FIRST]), []),
        (b"[]", []),
    ],
    ids=["next", "own id", "odd id", "another", "compactor", "summary", "no object"],
)
@on_loop
async def test_it_is_the_same_plan(enabled: bool | str, request_body: bytes, headers: Headers) -> None:
    async with front(enabled) as one, front(enabled) as other:
        for slotpin in (one, other):
            await slotpin.plan(body())
        plan = one.plan_now(request_body, headers=headers)
        assert plan is not None and shown(plan) == shown(await other.plan(request_body, headers=headers))


@on_loop
async def test_an_open_gate_is_passed_and_a_closed_one_left_alone() -> None:
    async with front() as slotpin:
        plan, same_slot = await slotpin.plan(body()), await slotpin.plan(body(NEXT))
        gates = slotpin.server.gates
        admitted = pass_now(plan, slotpin.server, "first", 1)
        assert admitted is not None and admitted.entered.who == "first" and gates.holder(0) is admitted.entered
        assert gates.could_meet(pinned=False)  # the server may know of it
        assert pass_now(same_slot, slotpin.server, "second", 1) is None
        assert gates.holder(0) is admitted.entered and gates.waiting(0) == 0
        gates.leave(admitted.entered, settled=True)
        assert pass_now(same_slot, slotpin.server, "second", 1) is not None


@pytest.mark.parametrize("build", [STOCK, PATCHED])
@on_loop
async def test_whoever_could_meet_a_stray_waits_on_a_stock_server(build: str) -> None:
    async with front(build=build) as slotpin:
        plan, gates = await slotpin.plan(body()), slotpin.server.gates
        gates.sent(await gates.enter(None, "a stray"), pinned=False)
        assert pass_now(plan, slotpin.server, "it", 1) is None  # it is not known which build is there
        await slotpin.server.is_patched()
        assert (pass_now(plan, slotpin.server, "it", 1) is not None) == (build == PATCHED)
        assert gates.is_open(0) == (build == STOCK)


async def _next_turn(slotpin: Front, *, looked: bool, now: bool) -> tuple[Plan, Admitted | None]:
    """A conversation's turn after its first one, and after a request in another slot."""
    server = slotpin.server
    first = await slotpin.plan(body())
    admitted = pass_now(first, server, "first", 1)
    assert admitted is not None
    server.began(0, "c1")
    slotpin.ended(first, admitted)
    slotpin.clock.now += 1
    server.began(2, "c2")
    sent_at = slotpin.clock.now
    slotpin.clock.now += 1
    slotpin.answered(sent_at)
    slotpin.clock.now += 1
    await server.is_patched()
    if looked:
        await server.look()
    plan = await slotpin.plan(body(NEXT))
    if now:
        return plan, pass_now(plan, server, "next", 1)
    return plan, await last_look(plan, server, await server.gates.enter(plan.gate, "next"), 1)


@pytest.mark.parametrize("build", [STOCK, PATCHED])
@pytest.mark.parametrize("tokens", [0, 100])
@on_loop
async def test_the_last_look_is_the_same(tokens: int, build: str) -> None:
    async with front(build=build, tokens=tokens) as one, front(build=build, tokens=tokens) as other:
        plan, admitted = await _next_turn(one, looked=True, now=True)
        late, looked = await _next_turn(other, looked=True, now=False)
        assert admitted is not None and looked is not None
        assert plan.decision == late.decision
        assert (admitted.held, admitted.other_ran) == (looked.held, looked.other_ran) == (tokens > 0, False)
        kept = tokens > 0 or build == PATCHED
        assert plan.decision.action is (Action.PIN if kept else Action.LEAVE)
        assert admitted.entered.pinned == kept


@on_loop
async def test_a_look_that_is_due_is_waited_for() -> None:
    async with front() as slotpin:
        plan, admitted = await _next_turn(slotpin, looked=False, now=True)
        assert admitted is None and plan.decision.action is Action.PIN
        assert slotpin.server.gates.is_open(plan.gate)
