"""Ask the slotpin that runs; it answers from memory, and llama-server is asked nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec

from slotpin.checks.client import KeyWantedError, NoAnswerError, Reply, Server
from slotpin.errors import UserError
from slotpin.observe.board import Board
from slotpin.proxy.questions import Questions


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slotpin listens, and a key that it takes."""

    url: str
    key: str


class Explained(msgspec.Struct):
    """`request` is the record as JSON, `explained` headings and what stands under them."""

    request: msgspec.Raw
    explained: list[tuple[str, str]]


async def look(place: Place) -> Board:
    """Raises UserError where no slotpin answers, as all of these do."""
    return _read(place, await _get(place, "/slotpin/status"), Board)


async def status(place: Place) -> bytes:
    """The whole of it, as JSON."""
    reply = await _get(place, "/slotpin/status")
    _read(place, reply, Board)
    return reply.body


async def explain(place: Place, request: str) -> Explained:
    """By an id or its beginning. Raises UserError also where it is not known."""
    reply = await _get(place, f"/slotpin/requests/{quote(request, safe='')}")
    if reply.status != 200 and reply.error.startswith("slotpin: "):
        raise UserError(reply.error.removeprefix("slotpin: "), 1)
    return _read(place, reply, Explained)


Shape = TypeVar("Shape")


def _read(place: Place, reply: Reply, shape: type[Shape]) -> Shape:
    found = reply.read(shape) if reply.status == 200 else None
    if found is None:
        raise _not_there(place, _what_it_is(reply))
    return found


def _what_it_is(reply: Reply) -> str:
    if reply.headers.get("server", "").startswith("llama.cpp"):  # tools/server/server-http.cpp
        return "that is a llama-server, not slotpin"
    return reply.error if reply.status != 200 else "what answers there is not slotpin"


async def _get(place: Place, path: str) -> Reply:
    with Questions() as questions:
        try:
            reply = await Server(questions, place.url, place.key).get(path)
        except NoAnswerError as error:
            raise _not_there(place, str(error)) from None
    if reply.wants_own_key:
        raise KeyWantedError(place.url)
    return reply


def _not_there(place: Place, why: str) -> UserError:
    start = "start it with slotpin serve or slotpin up, or say with --url where it listens"
    return UserError(f"no slotpin at {place.url}: {why}; {start}", 1)
