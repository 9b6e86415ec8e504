"""Conversations and their slots, on a real server; and many single requests, in front of one that only says yes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.real.client import Answer, fetch
from tests.real.prompts import prose
from tests.real.servers import Llama, Slotpin, llama, slotpin, write_config
from tests.support.program import Program
from tests.support.proxy import Client, Response, request
from tests.support.stub_upstream import Connection, Request, answer, stub_upstream

CHAT = "/v1/chat/completions"
# What is re-used was in the slot: there is nothing else to take it from.
FLAGS = ("--parallel", "6", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--ctx-size", "65536")
TURNS = 10
FEW = 3
"""Tokens: the last one generated is never evaluated, the last one of a prompt always."""

Message = dict[str, str]
Identity = Callable[[int, int], tuple[dict[str, str], dict[str, object]]]
"""Headers and members of the body with the session id of a conversation's turn, by both their numbers."""

IDENTITIES: dict[str, Identity] = {
    "none": lambda conversation, turn: ({}, {}),
    "header": lambda conversation, turn: ({"X-Session-Affinity": f"session-{conversation}"}, {}),
    "field": lambda conversation, turn: ({}, {"prompt_cache_key": f"session-{conversation}"}),
    "ever-new": lambda conversation, turn: ({"X-Session-Affinity": f"request-{conversation}-{turn}"}, {}),
}
SYSTEM = prose(300, seed=1)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
]


@pytest.fixture(scope="module")
def six_slots() -> Iterator[Llama]:
    with llama(*FLAGS) as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path, six_slots: Llama) -> Iterator[Slotpin]:
    with slotpin(tmp_path, six_slots.url) as running:
        yield running


@dataclass
class Conversation:
    """As an agent keeps it; `opening` is its first message."""

    url: str
    number: int
    opening: str
    identity: Identity = IDENTITIES["none"]
    said: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def turn(self, system: str = SYSTEM, **more: object) -> Answer:
        count = len(self.answers)
        text = f"{self.opening}" if count == 0 else f"then {prose(5, seed=100 * self.number + count)}"
        self.said.append({"role": "user", "content": text})
        headers, members = self.identity(self.number, count)
        messages = [{"role": "system", "content": system}, *self.said]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **members, **more}
        answered = fetch(self.url + CHAT, body, headers)
        assert answered.status == 200, answered
        self.answers.append(answered)
        message = answered.json["choices"][0]["message"]
        self.said.append({"role": "assistant", "content": message["content"]})
        return answered

    @property
    def slots(self) -> set[int | None]:
        return {each.slot for each in self.answers}


def prompt_tokens(answered: Answer) -> int:
    timings = answered.json["timings"]
    tokens: int = timings["prompt_n"] + timings["cache_n"]
    return tokens


def check_reuse(conversation: Conversation) -> None:
    """Every follow-up has evaluated the tokens of its new messages only."""
    for before, after in zip(conversation.answers, conversation.answers[1:], strict=False):
        held = prompt_tokens(before) + before.json["timings"]["predicted_n"]
        new = prompt_tokens(after) - held
        assert 0 < new < 40  # the opening of the answer before, and a few words
        assert after.json["timings"]["prompt_n"] <= new + FEW
        assert after.json["timings"]["cache_n"] >= held - FEW


def take_turns(conversations: Sequence[Conversation]) -> None:
    """The first turns in order; then half of the others one by one in any order, half all at the same time."""
    for conversation in conversations:
        conversation.turn()
    for round_ in range(1, TURNS // 2):
        for conversation in random.Random(round_).sample(conversations, len(conversations)):
            conversation.turn()
    with ThreadPoolExecutor(len(conversations)) as pool:
        for _ in range(TURNS // 2, TURNS):
            list(pool.map(Conversation.turn, conversations))


@pytest.mark.parametrize("identity", IDENTITIES)
def test_four_interleaved_conversations_keep_their_slots(proxy: Slotpin, six_slots: Llama, identity: str) -> None:
    before = len(six_slots.selections)
    conversations = [
        Conversation(proxy.url, number, prose(200, seed=10 + number), IDENTITIES[identity]) for number in range(4)
    ]
    take_turns(conversations)
    assert [len(each.answers) for each in conversations] == [TURNS] * 4
    assert [len(each.slots) for each in conversations] == [1] * 4
    used = [each.answers[0].slot or 0 for each in conversations]
    assert used[0] == 0
    assert len(set(used)) == 4
    assert 1 not in used
    assert {each.reason for conversation in conversations for each in conversation.answers} == {"pinned"}
    # The server's own word for it.
    ran = six_slots.chosen_since(before, 4 * TURNS)
    assert {by for _, by in ran} == {"id"}
    assert [[slot for slot, _ in ran].count(slot) for slot in used] == [TURNS] * 4
    for conversation in conversations:
        check_reuse(conversation)
    assert len(proxy.status["conversations"]) == 4


def test_side_requests_in_between_cost_nothing(proxy: Slotpin) -> None:
    conversations = [
        Conversation(proxy.url, number, prose(200, seed=20 + number), IDENTITIES["header"]) for number in range(4)
    ]
    for _ in range(3):
        for conversation in conversations:
            conversation.turn()
            headers, _ = conversation.identity(conversation.number, 0)
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "a title, please"}]
            side = fetch(f"{proxy.url}/compactor{CHAT}", {"messages": messages, "max_tokens": 4}, headers)
            assert (side.status, side.slot, side.reason) == (200, 1, "pinned")
    for conversation in conversations:
        assert len(conversation.slots) == 1
        check_reuse(conversation)


def test_the_same_opening_under_other_session_ids_becomes_another_conversation(proxy: Slotpin) -> None:
    """The first turns could be one client's whose id changes with every request; once ids come back they are not."""
    conversations = [Conversation(proxy.url, number, prose(200, seed=30), IDENTITIES["header"]) for number in range(4)]
    take_turns(conversations)
    for conversation in conversations:
        del conversation.answers[:2]
        assert len(conversation.slots) == 1
        check_reuse(conversation)
    used = set.union(*(each.slots for each in conversations))
    assert len(used) == 4
    assert 1 not in used


@pytest.mark.parametrize("identity", ["none", "header"])
def test_a_date_in_the_system_text_and_swapped_tools_change_no_slot(proxy: Slotpin, identity: str) -> None:
    conversations = [
        Conversation(proxy.url, number, prose(50, seed=40 + number), IDENTITIES[identity]) for number in range(3)
    ]
    for minute in range(6):
        system = f"{SYSTEM}\nIt is 12:0{minute}."
        tools = TOOLS if minute % 2 else TOOLS[::-1]
        for conversation in conversations:
            conversation.turn(system, tools=tools, tool_choice="none")
    assert [len(each.slots) for each in conversations] == [1] * 3
    assert len(set.union(*(each.slots for each in conversations))) == 3
    assert conversations[0].slots == {0}
    assert len(proxy.status["conversations"]) == 3


ONE_SHOTS, WARM = 10_000, 2_000
CLIENTS = 4
MARGIN = 2 * 2**20
"""Bytes: 260 for each request after the first ones."""


# All have been used, and none is ever emptied.
SLOTS = json.dumps(
    [{"id": slot, "n_ctx": 4096, "is_processing": False, "id_task": 6, "n_prompt_tokens": 20} for slot in range(6)]
).encode()


class Upstream:
    """A llama-server with six slots that has the same short answer for everybody."""

    def __init__(self) -> None:
        self.count = 0

    async def script(self, connection: Connection, got: Request) -> None:
        if got.target != CHAT.encode():
            await connection.send(answer())
            return
        self.count += 1
        message = {"role": "assistant", "content": "yes"}
        timings = {"prompt_n": 20, "cache_n": 0, "predicted_n": 1, "prompt_ms": 1.0}
        body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "timings": timings}
        await connection.send(answer(json.dumps(body).encode()))


def chat_request(messages: Sequence[Message], session: str, role: str = "") -> bytes:
    headers = [f"X-Session-Affinity: {session}"] if session else []
    headers += [f"X-Slotpin-Role: {role}"] if role else []
    return request("POST", CHAT, json.dumps({"messages": messages}).encode(), [line.encode() for line in headers])


class Clients:
    """Keep-alive connections to one proxy."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients

    async def ask(self, data: bytes, at: int = 0) -> Response:
        client = self._clients[at]
        await client.send(data)
        answered = await client.read_response()
        assert answered.status == 200, answered
        return answered

    async def one_shots(self, numbers: range) -> None:
        async def some(at: int) -> None:
            for number in numbers[at :: len(self._clients)]:
                await self.ask(chat_request([one_shot(number)], f"once-{number}"), at)

        await asyncio.gather(*map(some, range(len(self._clients))))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def one_shot(number: int) -> Message:
    """Every second one is new, the others are all the same."""
    return user("a title, please" if number % 2 else f"a title for chapter {number}")


@pytest.mark.parametrize(("session", "count"), [("the-first", ONE_SHOTS), ("", WARM)], ids=["with-id", "without-id"])
def test_many_single_requests_leave_no_trace(tmp_path: Path, session: str, count: int) -> None:
    async def proof() -> None:
        upstream = Upstream()
        async with stub_upstream(upstream.script, slots=answer(SLOTS)) as stub:
            with await asyncio.to_thread(start, tmp_path, stub.url) as program:
                port = urlsplit(await asyncio.to_thread(lambda: program.url)).port
                assert port is not None
                clients = [await Client.connect(port) for _ in range(CLIENTS)]
                try:
                    await check(Clients(clients), psutil.Process(program.process.pid))
                finally:
                    for client in clients:
                        await client.close()
                assert program.events("bug") == []
        assert upstream.count == count + 6

    async def check(clients: Clients, process: psutil.Process) -> None:
        said = [user("hello"), {"role": "assistant", "content": "yes"}, user("and then")]
        for end in (1, 3):
            turn = await clients.ask(chat_request(said[:end], session))
            assert turn.get(b"X-Slotpin-Slot") == b"0"
        await clients.one_shots(range(WARM))
        before = process.memory_info().rss
        await clients.one_shots(range(WARM, count))
        grown = process.memory_info().rss - before
        print(f"grown by {grown / 2**20:.1f} MiB")
        assert grown < MARGIN
        side = chat_request([user("shorten this")], session, "compactor")
        for _ in range(2):  # by the ticket of the turn before all of them, and by that of one after them
            assert (await clients.ask(side)).get(b"X-Slotpin-Slot") == b"1"
            said += [{"role": "assistant", "content": "yes"}, user("go on")]
            turn = await clients.ask(chat_request(said, session))
            assert (turn.get(b"X-Slotpin-Slot"), turn.get(b"X-Slotpin-Reason")) == (b"0", b"pinned")
        shown = await clients.ask(request("GET", "/slotpin/status"))
        assert len(shown.body) < 32 * 1024

    def start(home: Path, upstream: str) -> Program:
        write_config(home, upstream)
        return Program(home, "serve", "--config", "slotpin.json", "--set", "log.level=error")

    asyncio.run(asyncio.wait_for(proof(), 120))
