"""One llama-server's slots as several slotpins hold them: claims, requests under way, and what each turn has left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from slotpin.pinning.reuse import Left
from slotpin.proxy.gates import PLACED_SECONDS, Pass
from slotpin.proxy.sharing import scripts
from slotpin.proxy.sharing.link import SECONDS, Link, LostError
from slotpin.proxy.sharing.table import COMPACTOR_USED, Entry, Table, encode

# A lease is renewed so often in its time.
BEATS = 5
_FIRST_POLL, _LAST_POLL = 0.005, 0.1
# What could not be told to Redis is kept for later.
_MOST_UNSAID = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """`me` names this process; leases in seconds."""

    url: str
    prefix: str
    lease: float
    me: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of all slotpins on this server: begun, and begun in a slot of the server's choice."""

    begun: int
    strays: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A request under way. `kind`: p pinned, s in a slot of the server's choice, g as s and its client has left.

    `sent_at`: by this slotpin's clock.
    """

    name: str
    kind: str
    slot: int | None
    width: int
    sent_at: float


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a conversation's last turn left, with the counts of then; `at`: when, by this slotpin's clock."""

    left: Left
    counts: Counts
    at: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """A slot is this request's. `free_from`: when a look may show that the request before is over, by this slotpin's
    clock; None: it is. `ran`: the conversation or role that was there last."""

    free_from: float | None
    ran: str
    before: LeftBehind | None
    counts: Counts
    meets: tuple[Flight, ...]
    lapses: int
    at: float


@dataclass(frozen=True, slots=True)
class Flown:
    """`goes`: it is known to the others now. Else it might meet some of `meets`; all under way take `width` slots."""

    goes: bool
    meets: tuple[Flight, ...]
    width: int
    before: LeftBehind | None
    counts: Counts


class Shared:
    """`clock` gives seconds; `on_lost` hears why Redis is gone, `on_epoch` that the server is another process."""

    def __init__(
        self,
        options: Options,
        server: str,
        clock: Callable[[], float],
        on_lost: Callable[[str], None],
    ) -> None:
        tag = f"{options.prefix}:{{{sha256(server.encode()).hexdigest()[:16]}}}"
        self.me = options.me
        self._lease = options.lease
        self._clock = clock
        self.on_epoch: Callable[[int], None] = lambda _: None
        self._on_lost = on_lost
        self._link = Link(options.url, [f"{tag}:{key}" for key in scripts.KEYS], self._lost)
        self.table = Table()
        self.busy: set[int] = set()
        self.committing = asyncio.Lock()
        # Which Redis process was spoken to last, whether it was, and from when on it lets slots be claimed.
        self._run = ""
        self._heard_at = float("-inf")
        self._opens_at = float("inf")
        # Until then another slotpin's pinned request may not have begun of which nobody can tell any more.
        self._quiet_until = float("-inf")
        self._knows_of_loss = False
        self.others = 0
        self.losses = 0
        self.epoch = new_epoch()
        # The highest task number that any slotpin has seen, and since when that is known here; what was seen here.
        self.high, self.high_at = -1, float("inf")
        self.seen_task = -1
        # Redis's clock less this one's.
        self._offset = 0.0
        # How often the lease has run out: what was claimed before that may be another's.
        self._lapses = 0
        # By token; of a claim also whether it was granted.
        self._claims: dict[str, tuple[int, bool]] = {}
        self._flights: dict[str, Flight] = {}
        self._passes: dict[str, Pass] = {}
        self._unsaid: list[tuple[str, tuple[object, ...]]] = []
        self._beating: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        return self._link.lost

    def holds(self, claimed: Claimed) -> bool:
        """Whether the slot is still the request's: the others have known all the time that this slotpin is there."""
        return self.holds_lease and claimed.lapses == self._lapses

    @property
    def holds_lease(self) -> bool:
        """Whether the others know that this slotpin is there."""
        return not self.lost and self._clock() < self._heard_at + self._lease

    @property
    def opens_in(self) -> float:
        """Seconds until slots may be claimed; 0: they may."""
        return 0.0 if self.lost else max(0.0, self._opens_at - self._clock())

    @property
    def quiet_for(self) -> float:
        """Seconds until each request that was sent while Redis was there has begun."""
        return max(0.0, self._quiet_until - self._clock())

    @property
    def state(self) -> str:
        """on, settling or lost."""
        if self.lost:
            return "lost"
        return "on" if self.holds_lease and not self.opens_in else "settling"

    @property
    def open(self) -> bool:
        """Whether slots may be claimed."""
        return not self.lost and not self.opens_in

    async def prepare(self, is_patched: Callable[[], Awaitable[bool]]) -> None:
        """Before a decision. Until the others have said again what they hold, a stock server gets no new request: one
        without a slot could meet what they have sent."""
        await self.start()
        if not self.lost and self.opens_in and not await is_patched():
            await asyncio.sleep(self.opens_in)

    async def refresh(self) -> None:
        """See what the others have written."""
        async with self.committing:
            with contextlib.suppress(LostError):
                await self.commit({})

    async def start(self) -> None:
        """Be known to the others; it goes on by itself from then on."""
        if self._beating is None:
            with contextlib.suppress(LostError):
                await self._beat()
            if self._beating is None:
                self._beating = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        with contextlib.suppress(LostError):
            await self._ask(scripts.BYE)
        await self._link.close()

    async def claim(self, entered: Pass, who: str, busy: bool | None, asked_at: float) -> Claimed | None:
        """Wait until the pass's slot is its own; None: Redis is lost, or nothing may be claimed yet.

        `busy`: what a look showed of the slot that was asked for at `asked_at`; None: there was none.
        """
        assert entered.slot is not None
        token = self._token(entered)
        self._claims[token] = (entered.slot, False)
        self._flights[token] = Flight(token, "p", entered.slot, entered.width, self._clock())
        pause = _FIRST_POLL
        while True:
            age = -1 if busy is None else int((self._clock() - asked_at) * 1000)
            try:
                answer = await self._ask(scripts.CLAIM, entered.slot, token, entered.width, who, int(bool(busy)), age)
            except LostError:
                return None
            if answer[0] == "settling":
                return None
            if answer[0] == "mine":
                break
            await asyncio.sleep(pause)
            pause = min(_LAST_POLL, pause * 1.5)
        self._flights[token] = Flight(token, "p", entered.slot, entered.width, self._clock())
        self._claims[token] = (entered.slot, True)
        _, _, look_after, ran, left, counts, meets = answer
        free_from = None if look_after < 0 else self._clock() + look_after / 1000
        return Claimed(free_from, ran, self._left(left), Counts(*counts), self._met(meets), self._lapses, self._clock())

    async def fly(self, entered: Pass, kind: str, who: str, excused: Iterable[str]) -> Flown | None:
        """Tell the others of a request that goes out now, unless it could meet one in its slot; None: Redis is lost.

        `excused`: names of those that it can't meet; `*`: none can harm it.
        """
        token = self._token(entered)
        slot = "-" if entered.slot is None or kind == "s" else entered.slot
        arguments = (kind, slot, token, entered.width, who, *excused)
        try:
            answer = await self._ask(scripts.FLY, *arguments)
        except LostError:
            return None
        word, _, meets, width, left, counts = answer
        if word == "go":
            number = entered.slot if kind == "p" else None
            self._flights[token] = Flight(token, kind, number, entered.width, self._clock())
        return Flown(word == "go", self._met(meets), width, self._left(left), Counts(*counts))

    def release(self, entered: Pass, *, settled: bool) -> None:
        """The request is over, or will not be sent; `settled`: for the server too."""
        if (token := entered.token) is None:
            return
        entered.token = None
        slot, _ = self._claims.pop(token, ("", False))
        self._flights.pop(token, None)
        self._passes.pop(token, None)
        self._tell(scripts.RELEASE, slot, token, int(settled))

    def left(self, conversation: str, left: Left) -> None:
        """What its turn has left, and how far the counts are."""
        if (name := self.table.name_of(conversation)) is None:
            return
        text = msgspec.json.encode((left.prompt, left.generated, left.slot, left.epoch, left.n_ctx)).decode()
        self._tell(scripts.LEAVE, name, text)

    def end_epoch(self) -> None:
        """The server has restarted: what it held is gone, for the others too."""
        ended, self.epoch = self.epoch, new_epoch()
        self.seen_task = self.high = -1
        self.high_at = float("inf")
        self._tell(scripts.END_EPOCH, ended)

    async def commit(self, entries: dict[str, Entry], *, force: bool = False) -> tuple[bool, LeftBehind | None]:
        """Write what belongs together, if nobody else has written meanwhile; else the table is new. Raises LostError.

        Answers whether it was written, and what the last of the conversations left. Without entries: only see what is
        new.
        """
        written = [text for name, entry in entries.items() for text in (name, encode(entry))]
        answer = await self._ask(scripts.COMMIT, self.table.version, int(force), *written)
        word, _, version, anew, news, slots, left = answer
        self.busy = {int(slot) for slot in slots}
        self.table.update(version, bool(anew), [*news, *(written if word == "ok" else ())])
        return word == "ok", self._left(left)

    def forget(self, conversation: str) -> None:
        if (name := self.table.name_of(conversation)) is not None:
            self.table.forget(name)
            self._tell(scripts.COMMIT, self.table.version, 1, name, "")

    def compactor_used(self) -> None:
        if not self.table.compactor_used:
            self.table.compactor_used = True
            self._tell(scripts.COMMIT, self.table.version, 1, COMPACTOR_USED, "1")

    @property
    def now(self) -> float:
        """Redis's clock, as far as it is known."""
        return self._clock() + self._offset

    def local_time(self, redis_seconds: float) -> float:
        return redis_seconds - self._offset

    def running(self, name: str) -> bool:
        """Whether it is a request of this slotpin's that the server has begun."""
        owner, _, token = name.partition(" ")
        return owner == self.me and token in self._passes and self._passes[token].running

    def _token(self, entered: Pass) -> str:
        if entered.token is None:
            entered.token = secrets.token_hex(6)
            self._passes[entered.token] = entered
        return entered.token

    async def _ask(self, script: str, *arguments: object, anew: bool = False) -> Any:
        asked_at = self._clock()
        answer = await self._link.ask(script, *self._head, *arguments, anew=anew)
        self._heard(answer[1], asked_at)
        return answer

    def _tell(self, script: str, *arguments: object) -> None:
        def failed() -> None:
            self._unsaid = [*self._unsaid[1 - _MOST_UNSAID :], (script, arguments)]

        self._link.tell(script, *self._head, *arguments, failed=failed)

    @property
    def _head(self) -> tuple[object, ...]:
        return self.me, int(self._lease * 1000), self._run, self.epoch, self.seen_task

    def _heard(self, state: Sequence[Any], asked_at: float) -> None:
        run, opens_in, epoch, high, now = state
        clock = self._clock()
        if self._run and run != self._run:
            self._be_quiet()
        if asked_at > self._heard_at + self._lease:
            self._lapses += 1
        self._knows_of_loss = False
        self._run, self._heard_at, self._opens_at = run, asked_at, clock + opens_in / 1000
        self._offset = int(now) / 1000 - clock
        if int(epoch) != self.epoch:
            self.epoch, self.seen_task, self.high, self.high_at = int(epoch), -1, -1, float("inf")
            self.on_epoch(self.epoch)
        if high > self.high:
            self.high, self.high_at = high, clock

    def _lost(self, why: str) -> None:
        self.losses += not self._knows_of_loss
        self._be_quiet()
        self._on_lost(why)

    def _be_quiet(self) -> None:
        """The others notice it by their next beat, and until then may send to slots that they have claimed."""
        if self._knows_of_loss:
            return
        self._knows_of_loss = True
        self._quiet_until = self._clock() + self._lease / BEATS + 2 * SECONDS + PLACED_SECONDS

    async def _keep(self) -> None:
        pause = self._lease / BEATS
        while True:
            await asyncio.sleep(pause)
            try:
                await self._beat()
                pause = self._lease / BEATS
            except LostError:
                pause = min(pause * 1.5, self._lease / 2)

    async def _beat(self) -> None:
        """Renew the lease, and see to it that Redis knows what this slotpin holds."""
        claims = [text for token, (slot, granted) in self._claims.items() for text in (slot, token, int(granted))]
        now = self._clock()
        flights = [
            text
            for token, each in self._flights.items()
            if self._claims.get(token, (0, True))[1]
            for text in (token, each.kind, "-" if each.slot is None else each.slot, each.width,
                         int((now - each.sent_at) * 1000))
        ]  # fmt: skip
        answer = await self._ask(scripts.BEAT, len(self._claims), *claims, *flights, anew=True)
        self.others = answer[2]
        unsaid, self._unsaid = self._unsaid, []
        for script, arguments in unsaid:
            self._tell(script, *arguments)

    def _met(self, found: Sequence[Sequence[Any]]) -> tuple[Flight, ...]:
        now = self._clock()
        return tuple(
            Flight(name, kind, None if slot == "-" else int(slot), int(width), now - int(age) / 1000)
            for name, kind, slot, width, age in found
        )

    def _left(self, text: str) -> LeftBehind | None:
        if not text:
            return None
        json, *counts, at = text.rsplit(" ", 3)
        left = Left(*msgspec.json.decode(json))
        return LeftBehind(left, Counts(*map(int, counts)), self.local_time(int(at) / 1000))


def new_epoch() -> int:
    """Another one than any other slotpin's, and small enough for Lua to keep whole."""
    return secrets.randbits(50) + 1
