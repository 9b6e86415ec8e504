"""A small HTTP client for the checks: whole answers, and each way in which there is none in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from slotpin.config import Listen, Settings
from slotpin.errors import UserError
from slotpin.pinning.request import UNREADABLE
from slotpin.proxy.questions import Questions
from slotpin.proxy.upstream import UpstreamError

LOOK_SECONDS = 10.0
# The evaluation of a prompt on a slow machine, behind the requests of others.
ANSWER_SECONDS = 1800.0

Answer = TypeVar("Answer")


class NoAnswerError(Exception):
    """No HTTP answer came; the message says why, in a few words."""


class KeyWantedError(UserError):
    """A slotpin answers, and takes no request without one of its own keys."""

    def __init__(self, url: str) -> None:
        super().__init__(f"slotpin runs on {url} and wants a key: {OWN_KEY}, or use its own --config FILE")


# What lets these commands in.
OWN_KEY = """set SLOTPIN_LISTEN_API_KEYS='["KEY"]'"""


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
        except UNREADABLE:
            return None

    @property
    def wants_own_key(self) -> bool:
        """Whether it is slotpin that wants a key, and not the server behind it."""
        body = self.read(_Error) if self.status == 401 else None
        return body is not None and body.error.type == "slotpin_error"

    @property
    def error(self) -> str:
        """The message of an error in OpenAI's shape, or what there is instead."""
        body = self.read(_Error)
        return body.error.message if body else f"HTTP {self.status}"


class _Message(msgspec.Struct):
    message: str
    type: str = ""


class _Error(msgspec.Struct):
    error: _Message


def own_key(listen: Listen) -> str:
    """One that slotpin itself takes; any will do where it wants none."""
    return listen.api_keys[0].get_secret_value() if listen.api_keys else "none"


def key_for_requests(settings: Settings) -> str:
    """What a request through slotpin needs: slotpin's key where it wants one, else the server's."""
    return own_key(settings.listen) if settings.listen.api_keys else settings.compactor.api_key.get_secret_value()


class Server:
    """`root` is its URL without `/v1`."""

    def __init__(self, questions: Questions, root: str, api_key: str) -> None:
        self.root = root
        self._questions = questions
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def get(self, path: str, seconds: float = LOOK_SECONDS) -> Reply:
        """Raises NoAnswerError."""
        return await self._ask("GET", path, {}, b"", seconds)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        """Raises NoAnswerError."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        return await self._ask("POST", path, headers, msgspec.json.encode(body), ANSWER_SECONDS)

    async def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Reply:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._questions.ask(method, self.root, path, {**self._headers, **headers}, body)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {seconds:g} s") from None
        except UpstreamError as error:
            raise NoAnswerError(str(error)) from None
        return Reply(answer.status, answer.headers, answer.body)
