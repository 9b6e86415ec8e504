"""llama-server as its own routes show it: `/props`, `/slots`, `/v1/models`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from slotpin.checks.client import NoAnswerError, Reply, Server


class _GenerationSettings(msgspec.Struct):
    n_ctx: int | None = None


class Props(msgspec.Struct):
    """`GET /props` (get_res_props in tools/server/server-context.cpp, get_router_props in server-models.cpp)."""

    default_generation_settings: _GenerationSettings
    build_info: str = ""
    is_sleeping: bool = False
    role: str = ""  # "router": the server starts a server for each model


class _Params(msgspec.Struct):
    seed: int | None = None


class Slot(msgspec.Struct):
    """An element of `GET /slots`; `params` are those of its last task."""

    id: int
    n_ctx: int | None = None
    is_processing: bool = False
    id_task: int | None = None
    n_prompt_tokens: int | None = None
    params: _Params = msgspec.field(default_factory=_Params)

    @property
    def used(self) -> bool:
        return self.id_task is not None and self.id_task >= 0

    @property
    def holds_tokens(self) -> bool:
        # Older servers don't say how many: then a slot that was used counts as full.
        return self.used if self.n_prompt_tokens is None else self.n_prompt_tokens > 0


class _Status(msgspec.Struct):
    value: str = ""


class Model(msgspec.Struct):
    """`status` is there in router mode only."""

    id: str
    status: _Status | None = None


class Models(msgspec.Struct):
    data: list[Model]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the server can't be examined, and what mends that."""

    check: str
    text: str
    remedy: str


OTHER_UPSTREAM = "slotpin doctor --upstream http://HOST:PORT/v1   # if that is right, main.baseUrl in the file"
API_KEY_REMEDY = "export SLOTPIN_COMPACTOR_API_KEY=KEY   # the server's --api-key; or compactor.apiKey"
SLOTS_REMEDY = "llama-server … --slots"


async def read_props(server: Server) -> Props | Trouble:
    """What kind of server it is, without waking one that sleeps."""
    try:
        health = await server.get("/health")
        if health.status == 503:
            return Trouble("llama-server", f"{server.root}: the model is loading", "slotpin doctor   # in a moment")
        reply = await server.get("/props")
    except NoAnswerError as error:
        return Trouble("llama-server", f"{server.root}: {error}", "slotpin up   # or start your own llama-server there")
    if reply.status in (401, 403):
        return Trouble("API key", f"{server.root} does not accept compactor.apiKey", API_KEY_REMEDY)
    props = reply.read(Props) if reply.status == 200 else None
    return props or Trouble("llama-server", f"{server.root} is not a llama-server ({_unlike(reply)})", OTHER_UPSTREAM)


def _unlike(reply: Reply) -> str:
    return f"/props: HTTP {reply.status}" if reply.status != 200 else "/props: not what a llama-server says"


async def read_slots(server: Server) -> list[Slot] | Trouble:
    try:
        reply = await server.get("/slots")
    except NoAnswerError as error:
        return Trouble("slots", f"{server.root}/slots: {error}", "slotpin doctor   # when the server is less busy")
    if reply.status == 501:
        return Trouble("slots", "/slots is switched off, so nothing can be verified", SLOTS_REMEDY)
    if reply.status in (401, 403):
        return Trouble("API key", f"{server.root} does not accept compactor.apiKey for /slots", API_KEY_REMEDY)
    slots = reply.read(list[Slot]) if reply.status == 200 else None
    if slots is None or len({slot.id for slot in slots}) != len(slots):
        what = "not a list of slots" if reply.status == 200 else reply.error
        return Trouble("slots", f"{server.root}/slots: {what}", OTHER_UPSTREAM)
    return slots


async def read_models(server: Server) -> list[Model]:
    """Empty where the server does not say."""
    try:
        reply = await server.get("/v1/models")
    except NoAnswerError:
        return []
    models = reply.read(Models) if reply.status == 200 else None
    return models.data if models else []
