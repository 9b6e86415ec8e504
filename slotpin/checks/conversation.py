"""The conversation that `slotpin verify` holds: a main turn, a compaction, a follow-up, the follow-up repeated."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from slotpin.checks.client import Reply, Server
from slotpin.checks.cost import ANSWER_TOKENS
from slotpin.checks.look import Slot, read_slots
from slotpin.errors import UserError

SIDE = "compaction"
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "that",
    "with",
    "his",
    "they",
    "from",
    "this",
    "have",
    "not",
]

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of one request. `slot` is where the server ran it, None if `/slots` could not tell; `pinned` where
    slotpin sent it, None if it left that to the server. `prompt_ms` is evaluation time."""

    name: str
    slot: int | None
    pinned: int | None
    evaluated: int
    reused: int
    prompt_ms: float
    reason: str | None
    """slotpin's, None without it."""

    @property
    def prompt(self) -> int:
        return self.evaluated + self.reused


class _Timings(msgspec.Struct):
    prompt_n: int
    prompt_ms: float = 0.0
    cache_n: int = 0


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    timings: _Timings


class _Tokens(msgspec.Struct):
    tokens: list[object]


@dataclass(frozen=True, slots=True)
class Script:
    """The texts, drawn anew for each run so that no cache knows them. `main` has about as many tokens as were asked
    for, a third of them in the system text, which the compaction shares."""

    system: str
    opening: str
    to_shorten: str

    @property
    def main(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.opening}]

    @property
    def compaction(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.to_shorten}]

    def follow_up(self, answer: str) -> list[Message]:
        return [*self.main, {"role": "assistant", "content": answer}, {"role": "user", "content": "And what then?"}]


async def write_script(server: Server, tokens: int) -> Script:
    """`server` counts its own tokens. Raises NoAnswerError, UserError."""
    system, opening, side = [await _text(server, share) for share in (tokens // 3, tokens - tokens // 3, tokens // 3)]
    return Script(system, opening, f"Shorten this text: {side}")


async def _text(server: Server, tokens: int) -> str:
    source = random.Random(secrets.token_bytes(16))
    words = [secrets.token_hex(8), *source.choices(_WORDS, k=tokens)]
    reply = await server.post("/tokenize", {"content": " ".join(words)})
    counted = reply.read(_Tokens) if reply.status == 200 else None
    if counted is None or not counted.tokens:
        raise UserError(f"{server.root}/tokenize: {reply.error}; is it a llama-server?")
    return " ".join(words[: max(2, len(words) * tokens // len(counted.tokens))])


class Run:
    """One run of a script. `entry` takes the requests, `server` is the llama-server behind it.

    `/slots` is looked at once before and once after every finished request.
    """

    def __init__(self, entry: Server, server: Server, model: str | None, say: Callable[[str], None]) -> None:
        self._entry = entry
        self._server = server
        self._model = model
        self._say = say
        self._tasks: dict[int, int | None] = {}
        self._session = {"X-Slotpin-Session": f"slotpin-verify-{secrets.token_hex(8)}"}

    async def hold(self, script: Script) -> list[Turn]:
        """Raises NoAnswerError, UserError."""
        try:
            return await self._hold(script)
        finally:
            # slotpin keeps the main slot for a conversation that it knows; llama-server has no such route.
            await self._entry.post("/slotpin/forget", {}, self._session)

    async def _hold(self, script: Script) -> list[Turn]:
        self._tasks = {slot.id: slot.id_task for slot in await self._slots()}
        turns: list[Turn] = []
        answer = await self._ask(turns, "main turn", script.main, "main")
        await self._ask(turns, SIDE, script.compaction, "compactor")
        follow_up = script.follow_up(answer)
        await self._ask(turns, "follow-up", follow_up, "main")
        await self._ask(turns, "repeated follow-up", follow_up, "main")
        return turns

    async def _ask(self, turns: list[Turn], name: str, messages: list[Message], role: str) -> str:
        """Add what became of the request to `turns`; the answer's text."""
        self._say(f"{name} …")
        body: dict[str, Any] = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        if self._model is not None:
            body["model"] = self._model
        # llama-server takes no notice of the headers, so that both runs send the same.
        reply = await self._entry.post("/v1/chat/completions", body, {"X-Slotpin-Role": role, **self._session})
        chat = _chat(reply, name)
        slot = await self._ran_on(chat, reply)
        timings = chat.timings
        said, reason = reply.headers.get("x-slotpin-slot", ""), reply.headers.get("x-slotpin-reason")
        pinned = int(said) if said.isdecimal() else None
        turns.append(Turn(name, slot, pinned, timings.prompt_n, timings.cache_n, timings.prompt_ms, reason))
        on = "unknown slot" if slot is None else f"slot {slot}"
        self._say(f"{name}: {on}, {timings.prompt_n} prompt tokens evaluated, {timings.cache_n} re-used")
        return chat.choices[0].message.content or "Yes."

    async def _ran_on(self, chat: _Chat, reply: Reply) -> int | None:
        """The slot with a new task; where others have sent requests meanwhile, the one that holds our prompt."""
        slots = await self._slots()
        changed = [slot for slot in slots if slot.used and slot.id_task != self._tasks.get(slot.id)]
        self._tasks = {slot.id: slot.id_task for slot in slots}
        if len(changed) > 1:
            length = chat.timings.prompt_n + chat.timings.cache_n
            changed = [slot for slot in changed if 0 <= (slot.n_prompt_tokens or 0) - length <= ANSWER_TOKENS]
        if len(changed) > 1:
            said = reply.headers.get("x-slotpin-slot")
            changed = [slot for slot in changed if str(slot.id) == said]
        return changed[0].id if len(changed) == 1 else None

    async def _slots(self) -> list[Slot]:
        slots = await read_slots(self._server)
        if not isinstance(slots, list):
            raise UserError(f"{slots.text}; {slots.remedy}")
        return slots


def _chat(reply: Reply, name: str) -> _Chat:
    if reply.status != 200:
        # A refusal of slotpin's own says so, and llama-server's errors speak for themselves.
        raise UserError(f"the {name} was answered with HTTP {reply.status}: {reply.error.removeprefix('slotpin: ')}")
    chat = reply.read(_Chat)
    if chat is None or not chat.choices:
        raise UserError(f"the answer to the {name} has no timings; is it a llama-server?")
    return chat
