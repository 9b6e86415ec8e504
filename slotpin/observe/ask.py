"""Ask the slotpin that runs; it answers from memory, and llama-server is asked nothing."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from slotpin.checks.client import NoAnswerError, Reply, Server, session
from slotpin.errors import UserError
from slotpin.observe.board import Board


class Explained(msgspec.Struct):
    """`request` is the record as JSON, `explained` headings and what stands under them."""

    request: msgspec.Raw
    explained: list[tuple[str, str]]


async def get(url: str, path: str) -> Reply:
    """Raises UserError where no slotpin answers."""
    async with session() as http:
        try:
            return await Server(http, url, "none").get(path)
        except NoAnswerError as error:
            raise UserError(_not_there(url, str(error))) from None


async def look(url: str) -> Board:
    """Raises UserError, also where another program answers."""
    reply = await get(url, "/slotpin/status")
    board = reply.read(Board) if reply.status == 200 else None
    if board is None:
        raise UserError(_not_there(url, reply.error if reply.status != 200 else "what answers there is not slotpin"))
    return board


async def explain(url: str, request: str) -> Explained:
    """By an id or its beginning. Raises UserError also where it is not known."""
    reply = await get(url, f"/slotpin/requests/{quote(request, safe='')}")
    found = reply.read(Explained) if reply.status == 200 else None
    if found is not None:
        return found
    if reply.error.startswith("slotpin: "):
        raise UserError(reply.error.removeprefix("slotpin: "), 1)
    raise UserError(_not_there(url, "what answers there is not slotpin, or an older one"))


def _not_there(url: str, why: str) -> str:
    return f"no slotpin at {url}: {why}; start it with slotpin serve or slotpin up, or say with --url where it listens"
