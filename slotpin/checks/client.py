"""A small HTTP client for the checks: whole answers, and each way in which there is none in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

LOOK_SECONDS = 10.0
# The evaluation of a prompt on a slow machine, behind the requests of others.
ANSWER_SECONDS = 1800.0
MAX_BODY_BYTES = 16 * 1024 * 1024

Answer = TypeVar("Answer")


class NoAnswerError(Exception):
    """No HTTP answer came; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` has its names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def read(self, shape: type[Answer]) -> Answer | None:
        """The body as `shape`; None if it is something else."""
        try:
            return msgspec.json.decode(self.body, type=shape)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def error(self) -> str:
        """The message of an error in OpenAI's shape, or what there is instead."""
        body = self.read(_Error)
        return body.error.message if body else f"HTTP {self.status}"


class _Message(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Message


def session() -> aiohttp.ClientSession:
    # llama-server closes idle connections after five seconds: one that is never kept can't be stale.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


class Server:
    """`root` is its URL without `/v1`."""

    def __init__(self, session: aiohttp.ClientSession, root: str, api_key: str) -> None:
        self.root = root
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def get(self, path: str) -> Reply:
        """Raises NoAnswerError."""
        url, headers = f"{self.root}{path}", self._headers
        return await _answer(self._session.get(url, headers=headers, allow_redirects=False), LOOK_SECONDS)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        """Raises NoAnswerError."""
        url, all_headers = f"{self.root}{path}", {**self._headers, **(headers or {})}
        request = self._session.post(url, json=body, headers=all_headers, allow_redirects=False)
        return await _answer(request, ANSWER_SECONDS)


async def _answer(request: AbstractAsyncContextManager[aiohttp.ClientResponse], seconds: float) -> Reply:
    try:
        async with asyncio.timeout(seconds), request as answer:
            body = b""
            while len(body) < MAX_BODY_BYTES and (more := await answer.content.read(MAX_BODY_BYTES)):
                body += more
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, body)
    except TimeoutError:
        raise NoAnswerError(f"no answer within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswerError(_why(error)) from None


def _why(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return "TLS fails; is it http:// instead of https://?"
        case aiohttp.ClientConnectorDNSError():
            return "there is no host of that name"
        case aiohttp.ClientConnectorError():
            return "nothing listens there"
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "it closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "it broke off its answer"
        case _:
            return "its answer is not HTTP"
