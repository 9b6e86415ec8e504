"""A stock server with a host-memory cache spoils the answer of a busy slot; slotpin lets no request get there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from slotpin.llama.cache import server_log
from tests.real.prompts import chat, prose
from tests.real.servers import Llama, Slotpin, llama, write_config
from tests.support.processes import wait_until
from tests.support.program import Program

# The host-memory cache is on unless --cache-ram is 0. Of the two slots only the first is used. In split mode idle slots
# keep what they hold. Flash attention would sum cells in the order in which they lie, which turns a word now and then.
FLAGS = ("--parallel", "2", "--no-kv-unified", "--flash-attn", "off", "--ctx-size", "16384")
CHAT = "/v1/chat/completions"
LONG, SHORT = 200, 8
ENDLESS = 8000 - LONG
TIMES = 20
ATTEMPTS = 5
SPIN_SECONDS = 20.0
HANGING_SECONDS = 120.0

CAME, DONE = "selected slot by id", "stop processing"
STEP = re.compile(rf"id +0 \| task -?\d+ \| ({CAME}|{DONE})")

Answers = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Variant:
    """How both requests get to slot 0: by an id of their own, or because slotpin puts all conversations there."""

    name: str
    own_id: bool
    reason: str


VARIANTS = [Variant("own-id", True, "explicit"), Variant("placed", False, "pinned")]
by_name = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two requests without a common prefix: the one that runs has a long answer, the one that waits a short one."""

    seed: int
    own_id: bool = True

    def running(self, tokens: int = LONG) -> dict[str, Any]:
        return self._body(prose(200, seed=2 * self.seed), tokens)

    @property
    def waiting(self) -> dict[str, Any]:
        return self._body(prose(200, seed=2 * self.seed + 1), SHORT)

    def _body(self, text: str, tokens: int) -> dict[str, Any]:
        return chat(text, tokens, stream=True) | ({"id_slot": 0} if self.own_id else {})


@dataclass
class Client:
    url: str
    session: aiohttp.ClientSession = field(repr=False)

    async def words(self, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The answer piece by piece."""
        async with self.session.post(self.url + CHAT, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                for choice in event["choices"]:
                    if word := choice["delta"].get("content"):
                        yield word

    async def text(self, body: dict[str, Any]) -> str:
        return "".join([word async for word in self.words(body)])

    async def waits_at_gate(self) -> bool:
        """Whether slotpin holds a request back for slot 0."""
        gates = (await self._get("/slotpin/status"))["gates"]
        return any(gate["slot"] == 0 and gate["waiting"] for gate in gates)

    async def is_running(self) -> bool:
        """Whether slot 0 is busy."""
        busy: bool = (await self._get("/slots"))[0]["is_processing"]
        return busy

    async def _get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    # llama-server closes a connection after a stream.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Client(url, session)


def run(proof: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(proof(), HANGING_SECONDS))


@pytest.fixture(scope="module")
def server() -> Iterator[Llama]:
    with llama(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Llama) -> Sequence[Answers]:
    """Both answers of each pair, from the server itself, one after the other."""
    found: list[Answers] = []

    async def ask() -> None:
        async with client_of(server.url) as client:
            for seed in range(TIMES):
                pair = Pair(seed)
                await client.text(pair.waiting)
                found.append((await client.text(pair.running()), await client.text(pair.waiting)))

    run(ask)
    return found


@contextmanager
def on_slot_0(home: Path, server: Llama, variant: Variant) -> Iterator[Slotpin]:
    """slotpin in automatic mode; all that it decided on meanwhile was for slot 0."""
    write_config(home, server.url)
    settings = () if variant.own_id else ("--set", "conversations.slots=main-only")
    with Program(home, "serve", "--config", "slotpin.json", *settings) as program:
        yield Slotpin(program)
        assert program.process.poll() is None
        assert program.events("bug") == []
        decisions = program.exchanges()
        assert {(each["reason"], each["slot"]) for each in decisions} == {(variant.reason, 0)}


def assert_never_met(server: Llama) -> None:
    """By the server's log: no request came for slot 0 before the one in it was done, left by its client or not."""
    port = urlsplit(server.url).port
    assert port is not None
    log = server_log(port)
    wait_until(lambda: STEP.findall(log.read_text())[-1] == DONE, "the last request is done")
    steps = STEP.findall(log.read_text())
    assert len(steps) > 2
    assert steps == [CAME, DONE] * (len(steps) // 2)


async def begin(client: Client, body: dict[str, Any]) -> asyncio.Task[str]:
    """A request whose answer has begun."""
    begun = asyncio.Event()

    async def read() -> str:
        words = []
        async with aclosing(client.words(body)) as answer:
            async for word in answer:
                words.append(word)
                begun.set()
        return "".join(words)

    task = asyncio.create_task(read())
    await begun.wait()
    return task


async def overlapping(client: Client, pair: Pair) -> Answers:
    """Both answers, the second request sent while the first generates. Raises TimeoutError when the slot spins."""
    await client.text(pair.waiting)  # so that the next request moves it to the host-memory cache
    running = await begin(client, pair.running())
    waiting = asyncio.create_task(client.text(pair.waiting))
    try:
        async with asyncio.timeout(SPIN_SECONDS):
            return await running, await waiting
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


def test_directly_an_answer_is_spoiled(expected: Sequence[Answers]) -> None:
    """The control: if this fails, the tests below prove nothing any more."""

    async def proof(url: str) -> None:
        async with client_of(url) as client:
            for seed, right in enumerate(expected):
                try:
                    answers = await overlapping(client, Pair(seed))
                except (TimeoutError, aiohttp.ClientError):
                    return
                if answers != right:
                    return
        raise AssertionError("all answers were right")

    with llama(*FLAGS) as server:  # one of its own, since the slot may spin for ever
        run(partial(proof, server.url))


@by_name
def test_both_answers_are_those_of_runs_alone(
    tmp_path: Path, server: Llama, expected: Sequence[Answers], variant: Variant
) -> None:
    exchanges: list[dict[str, Any]] = []

    async def was_held_back(client: Client, proxy: Slotpin, seed: int) -> bool:
        """Whether a request had to wait: now and then the first answer is whole before the second request is there."""
        before = len(exchanges)
        assert await overlapping(client, Pair(seed, variant.own_id)) == expected[seed], seed
        wait_until(lambda: len(proxy.program.events("exchange")) == before + 3, "all three are logged")
        exchanges[:] = proxy.program.exchanges()
        return any(exchange["waited_ms"] > 0 for exchange in exchanges[before:])

    async def proof(proxy: Slotpin) -> None:
        async with client_of(proxy.url) as client:
            for seed in range(TIMES):
                for _ in range(ATTEMPTS):
                    if await was_held_back(client, proxy, seed):
                        break
                else:
                    raise AssertionError("the second request was never held back")

    with on_slot_0(tmp_path, server, variant) as proxy:
        run(partial(proof, proxy))
    assert_never_met(server)


async def leave(client: Client, pair: Pair, stream: bool) -> Answers:
    """Both answers, the second request having waited for one whose client left; the first one's at a second try.

    llama-server notices that a stream has no reader at the next token; without `stream`, after up to a second.
    """
    await client.text(pair.waiting)
    endless = pair.running(ENDLESS)
    if stream:
        leaving = await begin(client, endless)
    else:
        leaving = asyncio.create_task(client.text(endless | {"stream": False}))
        while not await client.is_running():
            assert not leaving.done()
    waiting = asyncio.create_task(client.text(pair.waiting))
    while not await client.waits_at_gate():
        assert not (waiting.done() or leaving.done())
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    return await client.text(pair.running()), await waiting


@by_name
def test_also_when_the_first_client_leaves_in_the_middle(
    tmp_path: Path, expected: Sequence[Answers], variant: Variant
) -> None:
    """Each variant half of the times, on several servers at once: what is waited for most is the next look."""
    half = range(TIMES)[VARIANTS.index(variant) :: len(VARIANTS)]

    async def on_one(proxy: Slotpin, seeds: Sequence[int]) -> None:
        async with client_of(proxy.url) as client:
            for seed in seeds:
                answers = await leave(client, Pair(seed, variant.own_id), stream=seed // 2 % 2 == 0)
                assert answers == expected[seed], seed

    async def proof() -> None:
        await asyncio.gather(*(on_one(proxy, half[at :: len(proxies)]) for at, proxy in enumerate(proxies)))

    with ExitStack() as stack:
        servers = [stack.enter_context(llama(*FLAGS)) for _ in range(5)]
        homes = [tmp_path / str(number) for number in range(5)]
        for home in homes:
            home.mkdir()
        proxies = [
            stack.enter_context(on_slot_0(home, server, variant)) for home, server in zip(homes, servers, strict=True)
        ]
        run(proof)
        outcomes = [event["outcome"] for proxy in proxies for event in proxy.program.exchanges()]
        assert outcomes.count("client_left") == len(half)
        for server in servers:
            assert_never_met(server)
