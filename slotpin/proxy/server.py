"""What is known of one llama-server: its slots, their gates, whose tokens they hold, and whether pinning helps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slotpin.llama.series import is_patched
from slotpin.pinning.decision import Probed
from slotpin.pinning.placement import Placement
from slotpin.pinning.recent import Recent
from slotpin.pinning.reuse import Left
from slotpin.pinning.topology import Topology
from slotpin.proxy.gates import Gates
from slotpin.proxy.probe import Probe, Target
from slotpin.proxy.sharing.shared import Counts, LeftBehind, Shared

# A conversation's slot holds its prompt and its answer; templates and stop tokens make the count differ by a few.
TOKENS_APART = 4
_EPOCHS = itertools.count(1)


@dataclass(slots=True)
class _Mark:
    """Where the server's history stood when a turn of a conversation ended."""

    at: float
    begun: int
    strays: int


class Server:
    """`epoch` is another one for each process that has been seen, here or elsewhere; what a slot held is gone with it.

    `model`: which one of a router's, empty elsewhere. `clears_idle_slots`: whether it clears every idle slot when a
    request starts (`--cache-idle-slots` with a unified KV cache); None while that is not known. `clock` gives seconds;
    `on_stranger` hears of a request in a slot that did not come through here.
    """

    def __init__(
        self,
        probe: Probe,
        target: Target,
        clock: Callable[[], float],
        shared: Shared | None = None,
        on_stranger: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self.target = target  # the key may change
        self._clock = clock
        self._on_stranger = on_stranger
        self.model = target.model
        self.gates = Gates(self.look, clock)
        self.placement = Placement()
        self.shared = self.gates.shared = shared
        self.epoch = next(_EPOCHS) if shared is None else shared.epoch
        self.clears_idle_slots: bool | None = None
        if shared is not None:
            shared.on_epoch = self.begin_epoch
        self._stopped_at = 0.0
        self._topology: Topology | None = None
        self._asked_at = float("-inf")
        self._taken_at = float("-inf")
        # When exchanges were sent that have been answered since the last look, and when that was.
        self._answered: deque[tuple[float, float]] = deque(maxlen=4096)
        # When the latest one was sent that had been answered at the last look.
        self._passed = float("-inf")
        # Exchanges that the server was sent, and those that ran in a slot of its own choice; who ran last in a slot;
        # when a turn ended.
        self._begun = self._strays = 0
        self._begun_at = float("-inf")
        self._ran: dict[int, str] = {}
        self._marks: Recent[str, _Mark] = Recent(1024)

    async def topology(self) -> Probed:
        """The slots, at most five seconds old."""
        return self._take(await self._probe.topology(self.target))

    def fresh(self) -> Topology | None:
        """The slots where they need not be asked for."""
        kept = self._probe.fresh(self.target)
        if kept is not None and kept is not self._topology:
            self._take(kept)
        return kept

    async def look(self) -> Probed:
        """The slots as they are now."""
        return self._take(await self._probe.look(self.target))

    async def is_patched(self) -> bool:
        """Whether it has all of slotpin's patches: then it heeds `id_slot` on the Anthropic route, restores what an
        emptied slot held, and takes a request for a busy slot without harm."""
        return is_patched(await self._probe.build(self.target))

    @property
    def known_patched(self) -> bool | None:
        """The same as far as it was asked for; None where `is_patched` has to ask."""
        build = self._probe.known_build(self.target)
        return None if build is None else is_patched(build)

    def pinning_helps(self, retry_seconds: float) -> bool:
        """False while the server is known to clear idle slots; after `retry_seconds` that has to be seen again."""
        if self.clears_idle_slots and self._clock() - self._stopped_at >= retry_seconds:
            self.clears_idle_slots = None
        return not self.clears_idle_slots

    def began(self, slot: int | None, who: str) -> None:
        """An exchange of conversation (or role) `who` is on its way, to `slot` where that is known."""
        self._begun += 1
        self._begun_at = self._clock()
        if slot is None:
            self._strays += 1
        else:
            self._ran[slot] = who

    def answered(self, sent_at: float) -> None:
        """An exchange that was sent then has run in a slot, to its message end."""
        self._answered.append((sent_at, self._clock()))

    def mark(self, key: str) -> None:
        """A turn of this conversation has ended just now."""
        self._marks[key] = _Mark(self._clock(), self._begun, self._strays)

    def learned(self, counts: Counts) -> None:
        """How far all slotpins together are."""
        if counts.begun != self._begun:
            self._begun_at = self._clock()
        self._begun, self._strays = counts.begun, counts.strays

    def left_behind(self, key: str, before: LeftBehind | None) -> None:
        """Where the server's history stood for all slotpins when the conversation's last turn ended."""
        if before is None:
            self._marks.pop(key, None)
        else:
            counts = before.counts
            self._marks[key] = _Mark(before.at, counts.begun, counts.strays)

    def was_there(self, slot: int, who: str) -> None:
        """Who ran last in a slot, as the others know it."""
        self._ran[slot] = who

    def other_ran(self, key: str, slot: int) -> bool:
        """Whether anything but this conversation's turns may have run in the slot since its last one."""
        mark = self._marks.get(key)
        return self._ran.get(slot, key) != key or (mark is not None and mark.strays != self._strays)

    def has_to_look(self, key: str, left: Left) -> bool:
        """Whether `holds` can tell only after another look.

        Only where an answer can change something: while it isn't known whether idle slots are cleared, and something
        else has run since.
        """
        mark = self._marks.get(key)
        if mark is None or left.epoch != self.epoch or self.clears_idle_slots is not None:
            return False
        return self._begun > mark.begun and not self._looked_since(mark)

    def holds(self, key: str, left: Left, slot: int) -> bool | None:
        """Whether the slot still held what this conversation left there, at the last look. None: no way to tell."""
        mark = self._marks.get(key)
        found = self._topology.slot(slot) if self._topology is not None else None
        if mark is None or found is None or left.epoch != self.epoch:
            return None
        untouched = not self.other_ran(key, slot)
        if found.tokens and untouched and self._passed > mark.at and self.clears_idle_slots is None:
            self.clears_idle_slots = False  # another one has run since, from its beginning to its end
        if not self._looked_since(mark):
            return None
        if not found.tokens and untouched and self._begun > mark.begun:
            self.clears_idle_slots = True
            self._stopped_at = self._clock()
        return found.tokens > 0

    def find(self, key: str, left: Left) -> int | None:
        """The one idle slot that holds as many tokens as this conversation left in a slot of the server's choice."""
        mark = self._marks.get(key)
        if self._topology is None or mark is None or self._asked_at <= mark.at or left.epoch != self.epoch:
            return None
        tokens = left.prompt + (left.generated or 0)
        found = [
            slot.id for slot in self._topology.slots if not slot.busy and abs(slot.tokens - tokens) <= TOKENS_APART
        ]
        return found[0] if len(found) == 1 else None

    def seen(self, slot: int) -> tuple[bool | None, float]:
        """Whether the last look showed the slot busy, and when that was asked for."""
        found = self._topology.slot(slot) if self._topology is not None else None
        return (None if found is None else found.busy), self._asked_at

    @property
    def known(self) -> Topology | None:
        """What the last look has shown."""
        return self._topology

    def close(self) -> None:
        self.gates.close()

    def _looked_since(self, mark: _Mark) -> bool:
        """Whether the last look came after all that can have emptied a slot since."""
        return self._asked_at > max(mark.at, self._begun_at)

    def _take(self, probed: Probed) -> Probed:
        latest = self._probe.latest(self.target)
        if latest is not None and latest[0] is not self._topology:
            topology, asked_at = latest
            passed = [sent_at for sent_at, at in self._answered if at < asked_at]
            self._passed = max([self._passed, *passed])
            if (before := self._topology) is not None:
                # Each has taken a task's number; that of one that was sent before may have been seen already.
                taken = sum(sent_at > self._taken_at for sent_at in passed)
                if before.ids != topology.ids or topology.last_task < before.last_task + taken:
                    self._restarted()
            if (shared := self.shared) is not None:
                if asked_at > shared.high_at and topology.last_task < shared.high:
                    self._restarted()
                shared.seen_task = max(shared.seen_task, topology.last_task)
            self._topology, self._asked_at, self._taken_at = topology, asked_at, self._clock()
            self._answered.clear()
            self.gates.observe(topology, asked_at)
            spoils = self.shared is None and not self.known_patched
            if spoils and self.gates.suspect(topology, asked_at):
                self._on_stranger()
        return probed

    def _restarted(self) -> None:
        """Another process, or the same after a sleep: its slots are empty. Task numbers only grow in one process, at
        least by one for each exchange. Conversations keep their slots: nothing better is known of any."""
        if self.shared is not None:
            self.shared.end_epoch()
        self.begin_epoch(next(_EPOCHS) if self.shared is None else self.shared.epoch)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.clears_idle_slots = None
        self._passed = float("-inf")
        self._ran.clear()
