"""llama-server's own routes, as far as the proofs need them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from slotpin.llama.launch import LlamaServer
from tests.support.llama import running_server

JsonObject = dict[str, Any]

HANGING_SECONDS = 120.0


class ServerError(Exception):
    """An answer with an error status, or none at all (`status` 0)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` are the generated ones; `cache_n` prompt tokens were re-used, `prompt_n` evaluated."""

    tokens: tuple[int, ...]
    cache_n: int
    prompt_n: int


def run(proof: Coroutine[Any, Any, None]) -> None:
    """Run a proof on an event loop of its own; one that hangs fails."""
    asyncio.run(asyncio.wait_for(proof, HANGING_SECONDS))


def prompt(seed: int, length: int) -> list[int]:
    """`length` token ids, others for each seed; no two prompts share a prefix."""
    source = random.Random(seed)
    return [source.randrange(1000, 20000) for _ in range(length)]


class Client:
    def __init__(self, server: LlamaServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self._session = session

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        """Raises ServerError unless the answer is a 200."""
        try:
            async with self._session.post(self.server.base_url + path, json=body) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise ServerError(0, repr(error)) from error
        if response.status != 200:
            raise ServerError(response.status, text)
        answer: JsonObject = json.loads(text)
        return answer

    async def get(self, path: str) -> str:
        async with self._session.get(self.server.base_url + path) as response:
            return await response.text()

    async def complete(self, tokens: list[int], slot: int, n_predict: int = 4, **params: object) -> Answer:
        """The greedy continuation of a prompt, evaluated in that slot."""
        answer = await self.post("/completion", completion(tokens, slot, n_predict) | params)
        timings = answer["timings"]
        return Answer(tuple(answer["tokens"]), timings["cache_n"], timings["prompt_n"])

    async def stream(self, body: JsonObject, started: asyncio.Event) -> Answer:
        """The same, streamed; `started` is set at the first generated token."""
        tokens: list[int] = []
        async with self._session.post(self.server.base_url + "/completion", json=body | {"stream": True}) as response:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ServerError(response.status, json.dumps(event["error"]))
                tokens += event["tokens"]
                if tokens:
                    started.set()
                if event["stop"]:
                    timings = event["timings"]
                    return Answer(tuple(tokens), timings["cache_n"], timings["prompt_n"])
        raise ServerError(0, "the stream ended early")

    async def slot_action(self, slot: int, action: str, filename: str) -> JsonObject:
        return await self.post(f"/slots/{slot}?action={action}", {"filename": filename})

    async def slots(self) -> list[JsonObject]:
        slots: list[JsonObject] = json.loads(await self.get("/slots"))
        return slots

    async def slot_tokens(self) -> list[int]:
        """How many tokens each slot holds."""
        return [slot.get("n_prompt_tokens", 0) for slot in await self.slots()]

    async def deferred(self) -> int:
        """How many requests wait for a slot; needs `--metrics`."""
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith("llamacpp:requests_deferred "):
                return int(float(line.split()[1]))
        raise AssertionError("no requests_deferred in /metrics")

    def log(self) -> str:
        return self.server.log_path.read_text(errors="replace")

    def alive(self) -> bool:
        return self.server.returncode is None


def completion(tokens: list[int], slot: int, n_predict: int) -> JsonObject:
    return {
        "prompt": tokens,
        "id_slot": slot,
        "cache_prompt": True,
        "n_predict": n_predict,
        "temperature": 0,
        "return_tokens": True,
    }


@asynccontextmanager
async def llama_server(binary: Path, model: Path, *flags: str) -> AsyncIterator[Client]:
    # One thread: tiny models gain nothing from more, and threads that wait for each other are slow on a busy machine.
    flags = ("--threads", "1", *flags)
    # The server closes a connection that was idle for 5 s; one that is never kept can't be stale.
    async with (
        running_server(model, *flags, binary=binary) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        yield Client(server, session)


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str, seconds: float = 60) -> None:
    """Poll `condition`; fail if it is still false after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)
