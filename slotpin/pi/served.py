"""What a running slotpin serves, as Pi has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec

from slotpin.checks.client import KeyWantedError, NoAnswerError, Reply, Server
from slotpin.checks.look import Models
from slotpin.errors import UserError
from slotpin.proxy.questions import Questions

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True)
class Served:
    """`context` is what each slot has, in tokens."""

    model: str
    context: int
    thinks: bool
    sees: bool


@dataclass(frozen=True, slots=True)
class Found:
    """`unloaded`: models of a router that it would have to load before they could be looked at."""

    models: list[Served]
    unloaded: list[str]


class _Slot(msgspec.Struct):
    n_ctx: int = 0


class _Modalities(msgspec.Struct):
    vision: bool = False


class _Props(msgspec.Struct):
    chat_template: str = ""
    modalities: _Modalities = msgspec.field(default_factory=_Modalities)
    role: str = ""


async def look(url: str, api_key: str, *, pi_has_key: bool) -> Found:
    """Ask the slotpin at `url`. Raises UserError, also where the server wants a key and Pi has none."""
    with Questions() as http:
        server = Server(http, url, api_key)
        try:
            await _is_slotpin(server)
            reply = await server.get("/v1/models")
            if reply.wants_own_key:
                raise UserError(f"{KeyWantedError(url)}; Pi gets it with --api-key '$NAME', a variable that holds it")
            models = _read(reply, Models, f"{url}/v1/models").data
            props = _read(await server.get("/props"), _Props, f"{url}/props")
            if not pi_has_key and (reply := await Server(http, url, "none").get("/props")).status in (401, 403):
                who = f"the slotpin on {url}" if reply.wants_own_key else f"the llama-server behind {url}"
                raise UserError(
                    f"{who} wants an API key: give Pi one with --api-key '$NAME', where NAME is a variable with it"
                )
            is_router = props.role == "router"
            loaded = [
                model.id for model in models if not is_router or (model.status and model.status.value == "loaded")
            ]
            unloaded = [model.id for model in models if model.id not in loaded]
            found = [await _served(server, model, is_router) for model in loaded]
        except NoAnswerError as error:
            raise UserError(f"{url}: {error}; start slotpin with slotpin serve or slotpin up", 1) from None
    if not found:
        more = f" of {', '.join(unloaded)}" if unloaded else ""
        raise UserError(f"{url}: llama-server has no model loaded{more}; load one, then run this again", 1)
    return Found(found, unloaded)


async def _is_slotpin(server: Server) -> None:
    if (await server.get("/slotpin/health")).status != 200:
        raise UserError(f"{server.root} is not slotpin; say where it listens with --port or --config", 1)


async def _served(server: Server, model: str, is_router: bool) -> Served:
    # A router must not load a model for a look.
    query = f"?model={quote(model, safe='')}&autoload=false" if is_router else ""
    slots = _read(await server.get(f"/slots{query}"), list[_Slot], f"{server.root}/slots")
    props = _read(await server.get(f"/props{query}"), _Props, f"{server.root}/props")
    context = min((slot.n_ctx for slot in slots), default=0)
    if context < 1:
        raise UserError(f"{server.root}/slots does not say how much context a slot has", 1)
    # Pi's own llama.cpp provider tells it by this too (its extensions/llama/provider.ts).
    return Served(model, context, "enable_thinking" in props.chat_template, props.modalities.vision)


def _read(reply: Reply, shape: type[Shape], what: str) -> Shape:
    if reply.status in (401, 403):
        raise UserError(f"{what}: the API key is not accepted; set SLOTPIN_COMPACTOR_API_KEY or compactor.apiKey", 1)
    if reply.status == 501:
        raise UserError(f"{what}: switched off; start llama-server with --slots", 1)
    value = reply.read(shape) if reply.status == 200 else None
    if value is None:
        raise UserError(f"{what}: {reply.error if reply.status != 200 else 'is not what llama-server says'}", 1)
    return value
