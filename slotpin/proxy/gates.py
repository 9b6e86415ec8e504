"""One gate a slot: a request that is to be pinned waits here, not in llama-server, until its slot is free there.

llama-server swaps its host-memory cache into a pinned request's slot before it looks whether that slot is running
(get_available_slot, tools/server/server-context.cpp): the answer being generated would go on with another
conversation's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slotpin.pinning.decision import Probed, Unverified
from slotpin.pinning.recent import Recent
from slotpin.pinning.topology import Topology

if TYPE_CHECKING:
    from slotpin.proxy.sharing.shared import Shared

# Asked every second or more often, llama-server would not notice that a client has left.
LOOK_SECONDS = 2.0
# It polls for a vanished client once a second (HTTP_POLLING_SECONDS): sooner there is nothing to see.
FIRST_LOOK_SECONDS = 1.1
# After this long every request has its slot, if there is one: its prompt has been cut into tokens.
PLACED_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class Pass:
    """One exchange's place at a gate, from `enter` to `leave`. `slot` None: it passes no gate.

    `pinned`: its slot is in the request; else the server chooses one. `width` is how many slots it takes. `running`:
    the server has begun, so that it has its slot. `token`: by which other slotpins know it. Times in seconds.
    """

    slot: int | None
    who: str
    since: float
    width: int = 1
    pinned: bool = False
    sent_at: float = float("inf")
    running: bool = False
    token: str | None = None


@dataclass(eq=False, slots=True)
class _Gate:
    """`unsettled`: the exchange before is over for us since `left_at`, but perhaps not for the server."""

    holder: Pass | None = None
    waiting: list[tuple[Pass, asyncio.Future[None]]] = field(default_factory=list)
    unsettled: bool = False
    left_at: float = 0.0

    @property
    def free(self) -> bool:
        return self.holder is None and not self.unsettled and not self.waiting


class Gates:
    """`look` asks for the slots anew; `clock` gives seconds. `shared`: other slotpins have the same slots, and what an
    exchange leaves unsettled is seen to by the next one that claims its slot, whichever slotpin that comes through."""

    def __init__(self, look: Callable[[], Awaitable[Probed]], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self.shared: Shared | None = None
        self._gates: dict[int, _Gate] = {}
        self._sent: set[Pass] = set()
        self._strays = 0  # of those sent, the ones without a slot of ours
        # When one that ran in a slot of the server's choice was left; -inf: none that the server may still work on.
        self._strayed_at = float("-inf")
        self._looked_at = float("-inf")
        # When a slot's gate was left last: what a look showed there before is old.
        self._left_at: Recent[int, float] = Recent(1024)
        self._watcher: asyncio.Task[None] | None = None

    def is_open(self, slot: int | None) -> bool:
        """Whether nobody would have to wait there."""
        return slot is None or slot not in self._gates or self._gates[slot].free

    def enter_now(self, slot: int | None, who: str, width: int = 1) -> Pass | None:
        """Through the slot's gate if that is open; else None."""
        entering = Pass(slot, who, self._clock(), width)
        if slot is None:
            return entering
        gate = self._gates.get(slot)
        if gate is None:
            self._gates[slot] = _Gate(holder=entering)
        elif gate.free:
            gate.holder = entering
        else:
            return None
        return entering

    async def enter(self, slot: int | None, who: str, width: int = 1) -> Pass:
        """Wait for the slot's gate. Whoever is cancelled while waiting has given up the place."""
        if (entered := self.enter_now(slot, who, width)) is not None:
            return entered
        assert slot is not None  # else there is no gate to wait for
        entering, gate = Pass(slot, who, self._clock(), width), self._gates[slot]
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (entering, opened)
        gate.waiting.append(place)
        self._watch()
        try:
            await opened
        except asyncio.CancelledError:
            if opened.done() and not opened.cancelled():
                self.leave(entering, settled=True)  # it was its turn in the very same moment
            else:
                with contextlib.suppress(ValueError):  # passed over in the same moment
                    gate.waiting.remove(place)
                self._tidy(slot)
            raise
        return entering

    def could_meet(self, *, pinned: bool) -> bool:
        """Whether a request that goes out now could meet another one in its slot."""
        if pinned:
            return self._strays > 0 or self._strayed_at > float("-inf")
        return any(other.pinned and not other.running for other in self._sent)

    async def clear(self, entered: Pass, *, pinned: bool) -> None:
        """Wait until this request can't meet one in its slot of which nobody knows where it runs; then it is `sent`.

        A request without `id_slot` gets a slot that is idle, so two can only meet where one is pinned to a slot that
        the other has just been given.
        """
        while self.could_meet(pinned=pinned):
            probed, asked_at = await self.next_look()
            if isinstance(probed, Unverified):
                if probed.silent:
                    continue
                break
            if pinned and self._all_placed(probed, asked_at):
                slot = probed.slot(entered.slot) if entered.slot is not None else None
                if slot is None or not slot.busy:
                    break
        self.sent(entered, pinned=pinned)

    def sent(self, entered: Pass, *, pinned: bool) -> None:
        """From now on the server may know of it."""
        entered.pinned = pinned
        entered.sent_at = self._clock()
        self._sent.add(entered)
        self._strays += not pinned

    def leave(self, entered: Pass, *, settled: bool) -> None:
        """The exchange is over; `settled`: for the server too. Any further call for the same pass does nothing."""
        if entered in self._sent:
            self._sent.discard(entered)
            self._strays -= not entered.pinned
            if not settled and not entered.pinned:
                self._strayed_at = self._clock()
        if self.shared is not None:
            self.shared.release(entered, settled=settled)
            settled = True
        if entered.slot is None:
            return
        gate = self._gates.get(entered.slot)
        if gate is None or gate.holder is not entered:
            return
        gate.holder = None
        gate.left_at = self._left_at[entered.slot] = self._clock()
        if settled:
            self._open(gate)
        else:
            gate.unsettled = True
            self._watch()
        self._tidy(entered.slot)

    async def next_look(self, not_before: float = float("-inf")) -> tuple[Probed, float]:
        """What the next look shows that may be taken, and when it was asked for."""
        await asyncio.sleep(max(self._looked_at + LOOK_SECONDS, not_before) - self._clock())
        asked_at = self._clock()
        return await self._ask(), asked_at

    def observe(self, topology: Topology, asked_at: float) -> None:
        """What a look has shown, whoever asked."""
        busy = {slot.id for slot in topology.slots if slot.busy}
        for number, gate in list(self._gates.items()):
            if gate.unsettled and number not in busy and asked_at >= gate.left_at + FIRST_LOOK_SECONDS:
                self._open(gate)
                self._tidy(number)
        for sent in self._sent:
            sent.running |= sent.pinned and sent.slot in busy
        if asked_at >= self._strayed_at + FIRST_LOOK_SECONDS and len(busy) <= self._width:
            self._strayed_at = float("-inf")

    def suspect(self, topology: Topology, asked_at: float) -> bool:
        """Close the gates of slots that somebody else's request is running in: one that did not come through here.

        Whether there is one.
        """
        found = False
        if self._strays or self._strayed_at > float("-inf"):
            return found  # or it is one of ours, in a slot of the server's choice
        for slot in topology.slots:
            if slot.busy and slot.id not in self._gates and asked_at > self._left_at.get(slot.id, float("-inf")):
                self._gates[slot.id] = _Gate(unsettled=True, left_at=asked_at - FIRST_LOOK_SECONDS)
                found = True
        return found

    @property
    def now(self) -> float:
        return self._clock()

    def holder(self, slot: int) -> Pass | None:
        gate = self._gates.get(slot)
        return gate.holder if gate is not None else None

    def is_unsettled(self, slot: int) -> bool:
        """Whether the exchange before is over for us, but perhaps not for the server."""
        gate = self._gates.get(slot)
        return gate is not None and gate.unsettled

    def waiting(self, slot: int) -> int:
        gate = self._gates.get(slot)
        return len(gate.waiting) if gate is not None else 0

    def __contains__(self, slot: object) -> bool:
        """Whether somebody holds this slot or waits for it."""
        gate = self._gates.get(slot) if isinstance(slot, int) else None
        return gate is not None and (gate.holder is not None or bool(gate.waiting))

    def __iter__(self) -> Iterator[int]:
        """The slots that somebody holds or waits for."""
        return (slot for slot in tuple(self._gates) if slot in self)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def _all_placed(self, topology: Topology, asked_at: float) -> bool:
        """Whether every exchange under way has had its slot: more can't be found by looking.

        One that is long under way may have left its slot already, while its client is slow to read.
        """
        latest = max([self._strayed_at, *(sent.sent_at for sent in self._sent if not sent.pinned)])
        if asked_at >= latest + PLACED_SECONDS:
            return True
        return sum(slot.busy for slot in topology.slots) >= min(self._width, topology.count)

    @property
    def _width(self) -> int:
        return sum(sent.width for sent in self._sent)

    def _open(self, gate: _Gate) -> None:
        gate.unsettled = False
        while gate.waiting:
            entering, opened = gate.waiting.pop(0)
            if not opened.done():  # else its client has left in this very moment
                gate.holder = entering
                opened.set_result(None)
                return

    def _tidy(self, slot: int) -> None:
        """A client can name any number: only gates in use are kept."""
        if (gate := self._gates.get(slot)) is not None and gate.free:
            del self._gates[slot]

    def _watch(self) -> None:
        if self._watcher is None and any(gate.unsettled and gate.waiting for gate in self._gates.values()):
            self._watcher = asyncio.create_task(self._watch_server())

    async def _watch_server(self) -> None:
        """Look while somebody waits for a slot that the server may still be working in."""
        try:
            while waited_for := [gate for gate in self._gates.values() if gate.unsettled and gate.waiting]:
                due = max(self._looked_at + LOOK_SECONDS, min(gate.left_at for gate in waited_for) + FIRST_LOOK_SECONDS)
                if (wait := due - self._clock()) > 0:
                    await asyncio.sleep(wait)
                    continue
                probed = await self._ask()
                if isinstance(probed, Unverified) and not probed.silent:
                    # It is gone, or does not say: waiting longer shows no more.
                    for gate in waited_for:
                        self._open(gate)
        finally:
            self._watcher = None

    async def _ask(self) -> Probed:
        """A look; whoever waits for what it shows is let in by `observe`."""
        self._looked_at = self._clock()
        return await self._look()
