"""Ask llama-server for its slots, once for everybody who wants to know."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import quote, urlencode

import msgspec
from cachetools import LRUCache, TTLCache

from slotpin.observe.totals import Histogram
from slotpin.pinning.decision import Probed, Unverified
from slotpin.pinning.reasons import Reason
from slotpin.pinning.topology import Topology, TopologyError, parse_topology
from slotpin.proxy.questions import Questions
from slotpin.proxy.upstream import UpstreamError

PROBE_SECONDS = 2.0
CACHE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask: the server's root URL, without `/v1`, and the API key.

    `model`: of a server in front of several (`Front`); a question never makes it load one.
    """

    root_url: str
    api_key: str
    model: str = ""

    @property
    def front(self) -> Target:
        return replace(self, model="")


class Front(enum.Enum):
    """What stands in front of several models, each with a server and slots of its own."""

    ROUTER = "llama-server in router mode"  # tools/server/server-models.cpp
    SWAP = "llama-swap"  # lists what runs at /running; /upstream/MODEL/… leads to a model's server, and loads it


class Probe:
    """Verified topologies by target. `clock` gives seconds and is only for the age of what is kept."""

    def __init__(self, clock: Callable[[], float], seconds: float = PROBE_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._questions = Questions()
        self._verified: TTLCache[Target, tuple[Topology, float]] = TTLCache(64, CACHE_SECONDS, timer=clock)
        self._latest: LRUCache[Target, tuple[Topology, float]] = LRUCache(64)
        self._builds: LRUCache[Target, str] = LRUCache(64)
        self._running: dict[Target, asyncio.Task[Probed]] = {}
        self._fronts: dict[Target, Front] = {}
        self.failed = 0
        self.times = Histogram((0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2))

    async def topology(self, target: Target) -> Probed:
        """The server's slots, at most five seconds old, or why they are not known."""
        kept = self.fresh(target)
        return kept if kept is not None else await self._shared(target)

    def fresh(self, target: Target) -> Topology | None:
        """The same where nobody has to be asked."""
        try:  # in half of `get`'s time
            return self._verified[target][0]
        except KeyError:
            return None

    async def look(self, target: Target) -> Probed:
        """The server's slots as they are from now on: not an answer that is on its way already."""
        if (running := self._running.get(target)) is not None:
            await asyncio.shield(running)
        return await self._shared(target)

    async def _shared(self, target: Target) -> Probed:
        task = self._running.get(target)
        if task is None:
            task = asyncio.create_task(self._ask(target))
            self._running[target] = task
            task.add_done_callback(lambda _: self._running.pop(target, None))
        # One waiter that leaves must not take the answer from the others.
        return await asyncio.shield(task)

    async def build(self, target: Target) -> str:
        """`build_info` of `/props`, asked once until the server may be another process; empty where it isn't said."""
        if (known := self._builds.get(target)) is not None:
            return known
        try:
            async with asyncio.timeout(self._seconds):
                status, body = await self._fetch_of(target, "/props")
            build = msgspec.json.decode(body, type=_Props).build_info if status == 200 else ""
        except (TimeoutError, UpstreamError, ValueError):
            build = ""
        self._builds[target] = build
        return build

    def latest(self, target: Target) -> tuple[Topology, float] | None:
        """The last verified topology, however old, and when it was asked for."""
        return self._latest.get(target)

    def known_build(self, target: Target) -> str | None:
        """None where it was not asked for yet, or the server may be another process."""
        return self._builds.get(target)

    def has_models(self, target: Target) -> bool:
        """Whether slots belong to a model there."""
        return target in self._fronts

    def forget(self, target: Target) -> None:
        """The server broke off: it may come back with other slots."""
        self._fronts.pop(target, None)
        for known in (self._verified, self._builds):
            for same in [each for each in known if each.root_url == target.root_url]:
                known.pop(same, None)

    async def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        self._questions.close()

    async def _ask(self, target: Target) -> Probed:
        asked_at = self._clock()
        probed = await self._get(target)
        self.times.observe(self._clock() - asked_at)
        if isinstance(probed, Topology):
            self._verified[target] = self._latest[target] = (probed, asked_at)
        else:
            self.failed += 1
        return probed

    async def _get(self, target: Target) -> Probed:
        try:
            async with asyncio.timeout(self._seconds):
                status, body = await self._fetch_of(target, "/slots")
                if not target.model:
                    await self._recognise_front(target, status)
        except TimeoutError:
            return Unverified(Reason.PROBE_FAILED, f"no answer to /slots within {self._seconds:g} s", silent=True)
        except UpstreamError as error:
            return Unverified(Reason.PROBE_FAILED, str(error))
        if target in self._fronts:
            what = self._fronts[target].value
            return Unverified(Reason.PROBE_FAILED, f"it is {what}, and the request names no model")
        if status == 400 and target.model:
            return Unverified(Reason.MODEL_NOT_LOADED)
        if status != 200:
            return Unverified(Reason.PROBE_FAILED, _STATUS.get(status, f"/slots answered with HTTP{status}"))
        try:
            return parse_topology(body)
        except TopologyError as error:
            return Unverified(Reason.TOPOLOGY_INVALID, str(error))

    async def _recognise_front(self, target: Target, status: int) -> None:
        """By its answer to a look at slots of no model."""
        self._fronts.pop(target, None)
        if status == 400:
            self._fronts[target] = Front.ROUTER
        elif status == 404 and await self._running_models(target) is not None:
            self._fronts[target] = Front.SWAP

    async def _running_models(self, target: Target) -> set[str] | None:
        """What llama-swap has loaded; None if it isn't llama-swap."""
        status, body = await self.fetch(target, "/running")
        try:
            running = msgspec.json.decode(body, type=_Running).running if status == 200 else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return None if running is None else {each.model for each in running if each.state == "ready"}

    async def _fetch_of(self, target: Target, path: str) -> tuple[int, bytes]:
        """From the target's model where it has one; 400 where that is not loaded."""
        if not target.model:
            return await self.fetch(target, path)
        if self._fronts.get(target.front) is not Front.SWAP:
            return await self.fetch(target, f"{path}?{urlencode({'model': target.model, 'autoload': 'false'})}")
        if target.model not in (await self._running_models(target) or ()):
            return 400, b""
        return await self.fetch(target, f"/upstream/{quote(target.model)}{path}")

    async def fetch(self, target: Target, path: str) -> tuple[int, bytes]:
        """Status and body, from the server itself. Raises UpstreamError."""
        headers = {"Authorization": f"Bearer {target.api_key}"}
        answer = await self._questions.ask("GET", target.root_url, path, headers)
        return answer.status, answer.body


class _Props(msgspec.Struct):
    build_info: str = ""


class _Model(msgspec.Struct):
    model: str
    state: str


class _Running(msgspec.Struct):
    running: list[_Model]


# What llama-server means by them (tools/server/server-http.cpp, server-context.cpp).
_STATUS = {
    401: "the API key is wrong: set compactor.apiKey to the server's --api-key",
    403: "the API key is not allowed to see /slots: set compactor.apiKey to the server's --api-key",
    404: "there is no /slots: compactor.baseUrl is not a llama-server's",
    501: "/slots is switched off: start llama-server with --slots",
    503: "the model is loading",
}
