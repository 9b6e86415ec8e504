"""The way to Redis: one connection, one command at a time, and none that is waited for longer than half a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slotpin.errors import UserError

if TYPE_CHECKING:
    from redis.asyncio import Redis

SECONDS = 0.5


class LostError(Exception):
    """Redis gave no answer."""


class Link:
    """`on_lost` hears why, each time that it is lost."""

    def __init__(self, url: str, keys: Sequence[str], on_lost: Callable[[str], None]) -> None:
        self._url = url
        self._keys = tuple(keys)
        self._on_lost = on_lost
        self._client = _client(url)
        self._one_at_a_time = asyncio.Lock()
        self._asked: set[asyncio.Task[Any]] = set()
        self.lost = False

    async def ask(self, script: str, *arguments: object, anew: bool = False) -> Any:
        """What the script answers. `anew`: also while Redis is lost. Raises LostError.

        A command that was begun is ended: whoever is cancelled must not leave half an answer on the connection.
        """
        task = asyncio.create_task(self._ask(script, arguments, anew))
        self._asked.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def tell(self, script: str, *arguments: object, failed: Callable[[], None]) -> None:
        """The same without waiting; commands reach Redis in the order in which they were given."""
        task = asyncio.create_task(self._ask(script, arguments, False))
        self._asked.add(task)

        def ended(_: asyncio.Task[Any]) -> None:
            if self._ended(task) is not None:
                failed()

        task.add_done_callback(ended)

    async def close(self) -> None:
        if self._asked:
            await asyncio.wait(self._asked)
        await self._client.aclose()

    def _ended(self, task: asyncio.Task[Any]) -> BaseException | None:
        self._asked.discard(task)
        return task.exception() if not task.cancelled() else LostError()

    async def _ask(self, script: str, arguments: Sequence[object], anew: bool) -> Any:
        from redis.exceptions import MovedError, RedisError

        async with self._one_at_a_time:
            if self.lost and not anew:
                raise LostError
            try:
                async with asyncio.timeout(SECONDS):
                    try:
                        answer = await self._evaluate(script, arguments)
                    except MovedError as moved:  # of a cluster, in which another node has these keys
                        await self._client.aclose()
                        self._client = _client(self._url, host=moved.host, port=moved.port)
                        answer = await self._evaluate(script, arguments)
            except (RedisError, OSError, TimeoutError) as problem:
                await self._lose(problem)
                raise LostError from None
            self.lost = False
            return answer

    async def _evaluate(self, script: str, arguments: Sequence[object]) -> Any:
        from redis.exceptions import NoScriptError

        values = [*self._keys, *map(str, arguments)]
        try:
            return await self._client.evalsha(_digest(script), len(self._keys), *values)
        except NoScriptError:
            return await self._client.eval(script, len(self._keys), *values)

    async def _lose(self, problem: Exception) -> None:
        self.lost = True
        await self._client.aclose()
        self._client = _client(self._url)
        self._on_lost(_why(problem))


def check_installed() -> None:
    """Raises UserError."""
    try:
        import redis.asyncio  # noqa: F401
    except ImportError:
        raise UserError("sharing.redisUrl is set, but the client is missing: pip install 'slotpin[redis]'") from None


def shown(url: str) -> str:
    """Without user and password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


def _client(url: str, **other: Any) -> Redis:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    client = Redis.from_url(
        url,
        decode_responses=True,
        protocol=2,
        socket_timeout=SECONDS,
        socket_connect_timeout=SECONDS,
        retry=Retry(NoBackoff(), 0),
        client_name="slotpin",
    )
    client.connection_pool.connection_kwargs.update(other)
    return client


_DIGESTS: dict[str, str] = {}


def _digest(script: str) -> str:
    """By which Redis knows it."""
    if (digest := _DIGESTS.get(script)) is None:
        digest = _DIGESTS[script] = sha1(script.encode(), usedforsecurity=False).hexdigest()
    return digest


def _why(problem: Exception) -> str:
    """In a few words without anything of the URL."""
    from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError

    match problem:
        case AuthenticationError() | NoPermissionError():
            return "it does not accept the user or password in sharing.redisUrl, or not what slotpin asks it"
        case BusyLoadingError():
            return "it is still loading its data"
        case ResponseError():
            return f"it answers {str(problem)[:120]}"
        case TimeoutError():
            return f"no answer within {SECONDS:g} s"
    return "it can't be reached"
