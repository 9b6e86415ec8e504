"""Ask the slotpin that runs; it answers from memory, and llama-server is asked nothing."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import msgspec

from slotpin.checks.client import NoAnswerError, Reply, Server, session
from slotpin.errors import UserError
from slotpin.observe.board import Board


class Explained(msgspec.Struct):
    """`request` is the record as JSON, `explained` headings and what stands under them."""

    request: msgspec.Raw
    explained: list[tuple[str, str]]


async def look(url: str) -> Board:
    """Raises UserError where no slotpin answers, as all of these do."""
    return _read(url, await _get(url, "/slotpin/status"), Board)


async def status(url: str) -> bytes:
    """The whole of it, as JSON."""
    reply = await _get(url, "/slotpin/status")
    _read(url, reply, Board)
    return reply.body


async def explain(url: str, request: str) -> Explained:
    """By an id or its beginning. Raises UserError also where it is not known."""
    reply = await _get(url, f"/slotpin/requests/{quote(request, safe='')}")
    if reply.status != 200 and reply.error.startswith("slotpin: "):
        raise UserError(reply.error.removeprefix("slotpin: "), 1)
    return _read(url, reply, Explained)


Shape = TypeVar("Shape")


def _read(url: str, reply: Reply, shape: type[Shape]) -> Shape:
    found = reply.read(shape) if reply.status == 200 else None
    if found is None:
        raise _not_there(url, reply.error if reply.status != 200 else "what answers there is not slotpin")
    return found


async def _get(url: str, path: str) -> Reply:
    async with session() as http:
        try:
            return await Server(http, url, "none").get(path)
        except NoAnswerError as error:
            raise _not_there(url, str(error)) from None


def _not_there(url: str, why: str) -> UserError:
    start = "start it with slotpin serve or slotpin up, or say with --url where it listens"
    return UserError(f"no slotpin at {url}: {why}; {start}", 1)
