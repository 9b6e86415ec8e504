"""The traffic of `bench.soak`: clients of every kind, most of them well behaved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from urllib.parse import urlsplit

import aiohttp

from bench.fuzz_cases import make_case

# A follow-up makes a conversation longer; after so many the next one begins.
TURNS = 6
# Twice the most that slotpin remembers of each kind.
FILL_CONVERSATIONS = 1024
ANSWER_SECONDS = 120.0
FUZZ_SECONDS = 0.5
WORDS = "slot cache token prompt server branch commit file test loop index buffer range value line"


@dataclass(slots=True)
class Traffic:
    """`counts`: by kind of client and what became of its request."""

    url: str
    chance: random.Random
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def text(self, count: int) -> str:
        return " ".join(self.chance.choices(WORDS.split(), k=count))

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopped.wait(), self.chance.uniform(0, 2 * seconds))


Client = Callable[[Traffic], Coroutine[None, None, None]]


async def _post(traffic: Traffic, kind: str, path: str, body: dict[str, object], session: str = "") -> str:
    """The answer's text; empty where there is none."""
    headers = {"X-Slotpin-Session": session} if session else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)) as client,
            client.post(f"{traffic.url}{path}", json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            traffic.counts[kind, str(answer.status)] += 1
            return text if answer.status == 200 else ""
    except (aiohttp.ClientError, ConnectionError):
        traffic.counts[kind, "broken off"] += 1
    except TimeoutError:
        traffic.counts[kind, "no answer"] += 1
    return ""


def _content(answer: str) -> str:
    """Of a chat answer, streamed or not."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")] or [answer]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join((choice.get("message") or choice.get("delta") or {}).get("content") or "" for choice in choices)


async def converse(traffic: Traffic) -> None:
    """A conversation that grows turn by turn, as an agent's does."""
    session = f"soak-{traffic.chance.getrandbits(32):x}"
    messages = [{"role": "system", "content": traffic.text(60)}, {"role": "user", "content": traffic.text(80)}]
    for turn in range(TURNS):
        body = {"messages": messages, "max_tokens": 16, "stream": turn % 3 > 0, "cache_prompt": True}
        answer = _content(await _post(traffic, "conversation", "/v1/chat/completions", body, session))
        if traffic.stopped.is_set():
            return
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": traffic.text(20)}]
        await traffic.pause(0.2)


async def side_request(traffic: Traffic) -> None:
    body = {"messages": [{"role": "user", "content": f"Summarise: {traffic.text(60)}"}], "max_tokens": 8}
    await _post(traffic, "side request", "/compactor/v1/chat/completions", body)
    await traffic.pause(1.0)


async def other_routes(traffic: Traffic) -> None:
    """Everything that isn't a chat."""
    text, stream = traffic.text(40), traffic.chance.random() < 0.5
    user = [{"role": "user", "content": text}]
    routes: list[tuple[str, str, dict[str, object]]] = [
        ("native completion", "/completion", {"prompt": text, "n_predict": 8, "stream": stream}),
        ("text completion", "/v1/completions", {"prompt": text, "max_tokens": 8, "stream": stream}),
        ("responses", "/v1/responses", {"input": user, "max_output_tokens": 8, "stream": stream}),
        ("anthropic", "/v1/messages", {"messages": user, "max_tokens": 8, "stream": stream}),
        ("tokenize", "/tokenize", {"content": text}),
    ]
    kind, path, body = traffic.chance.choice(routes)
    await _post(traffic, kind, path, {"model": "local", **body})
    await traffic.pause(0.3)


async def look(traffic: Traffic) -> None:
    path = traffic.chance.choice(["/health", "/v1/models", "/slots", "/props", "/slotpin/status", "/slotpin/health"])
    try:
        async with aiohttp.ClientSession() as client, client.get(f"{traffic.url}{path}") as answer:
            await answer.read()
            traffic.counts["look", str(answer.status)] += 1
    except aiohttp.ClientError:
        traffic.counts["look", "broken off"] += 1
    await traffic.pause(0.5)


async def leave(traffic: Traffic) -> None:
    """A client that goes away at some point: in the head, in the body, while it waits, or while the answer comes."""
    body = {"messages": [{"role": "user", "content": traffic.text(300)}], "max_tokens": 64, "stream": True}
    path = traffic.chance.choice(["/v1/chat/completions", "/compactor/v1/chat/completions"])
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    stage = traffic.chance.choice(["head", "body", "at once", "waiting", "streaming"])
    reader, writer = await asyncio.open_connection(*traffic.address)
    try:
        if stage in ("head", "body"):
            raw = head if stage == "head" else head + data
            first = 0 if stage == "head" else len(head)
            writer.write(raw[: traffic.chance.randrange(first + 1, len(raw))])
            await traffic.pause(0.05)
        else:
            writer.write(head + data)
            if stage == "waiting":
                await traffic.pause(0.1)
            elif stage == "streaming":
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(reader.read(traffic.chance.randrange(1, 8000)), 10)
                    await traffic.pause(0.02)
        if traffic.chance.random() < 0.5:  # as a process that is killed
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        writer.transport.abort()
    traffic.counts["leaves", stage] += 1
    await traffic.pause(0.5)


async def send_nonsense(traffic: Traffic) -> None:
    case = make_case(traffic.chance.randrange(10**8), seed=2)
    reader, writer = await asyncio.open_connection(*traffic.address)
    got = b""
    try:
        with contextlib.suppress(TimeoutError, ConnectionError):
            writer.write(case.raw)
            got = await asyncio.wait_for(reader.read(4096), FUZZ_SECONDS)
    finally:
        writer.transport.abort()
    traffic.counts["nonsense", got[9:12].decode("latin-1") if got else "no answer"] += 1
    await traffic.pause(0.1)


async def fill(traffic: Traffic) -> None:
    """As many conversations as slotpin remembers, of one turn and of several."""
    places = asyncio.Semaphore(4)

    async def begin(number: int) -> None:
        async with places:
            messages = [{"role": "user", "content": f"{number}. {traffic.text(12)}"}]
            for _ in range(1 + number % 2 * (TURNS - 1)):
                body = {"messages": messages, "max_tokens": 1}
                await _post(traffic, "fill", "/v1/chat/completions", body, f"fill-{number}")
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": traffic.text(6)}]

    await asyncio.gather(*(begin(number) for number in range(FILL_CONVERSATIONS)))
    traffic.counts.clear()


# How many of each at a time.
CLIENTS: dict[Client, int] = {
    converse: 3,
    side_request: 1,
    other_routes: 2,
    look: 1,
    leave: 2,
    send_nonsense: 1,
}


async def run_clients(traffic: Traffic) -> None:
    """Until it is stopped; then each ends what it is at."""

    async def repeat(client: Client) -> None:
        while not traffic.stopped.is_set():
            await client(traffic)

    async with asyncio.TaskGroup() as group:
        for client, count in CLIENTS.items():
            for _ in range(count):
                group.create_task(repeat(client))
