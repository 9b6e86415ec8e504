"""Which slot each conversation has."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Literal

import msgspec

from slotpin.pinning.ids import normalise
from slotpin.pinning.recent import Recent
from slotpin.pinning.topology import Topology

# The main slot goes to another conversation only after its own has been silent for so long; and for so long a
# conversation counts when it is asked how many slots would be enough. Seconds.
IDLE_LIMIT = 3600.0

_MAX_CONVERSATIONS = 1024


class Placed(msgspec.Struct, frozen=True):
    """`shared`: no slot was left for this conversation alone. `enough`: the `--parallel` that would do."""

    slot: int
    shared: bool
    enough: int | None


class _Home(msgspec.Struct, frozen=True):
    """`used`: when its conversation was last there, in the caller's seconds."""

    key: str
    used: float


class _Lately(msgspec.Struct, frozen=True):
    """`turns` in a row, none of them `IDLE_LIMIT` after the one before; `used` is the last one's time."""

    turns: int
    used: float


class Placement:
    """The homes of conversations on one server. A slot is the home of one conversation at most, which keeps it until
    another one needs it. Who finds no home shares the main slot, and looks again at each turn.

    As long as no side request has used the compactor's slot, that is lent: it costs nothing there, while each change
    of conversation on the main slot may cost everything. Once one has, the next would cut what was lent.
    """

    def __init__(self) -> None:
        self._layout: tuple[tuple[int, ...], int, int] | None = None
        self._compactor_used = False
        # By slot: whose home it is, and who was placed there last. By conversation: its home.
        self._homes: dict[int, _Home] = {}
        self._home_of: dict[str, int] = {}
        self._owner: dict[int, str] = {}
        # By conversation: where it was placed last, and how often lately.
        self._last_slot: Recent[str, int] = Recent(_MAX_CONVERSATIONS)
        self._lately: Recent[str, _Lately] = Recent(_MAX_CONVERSATIONS)

    def place(
        self,
        key: str,
        topology: Topology,
        main: int,
        compactor: int,
        slots: Literal["auto", "main-only"] | tuple[int, ...],
        busy: Container[int],
        now: float,
    ) -> Placed:
        """The slot for the next turn of conversation `key`.

        `main` and `compactor` are the roles' slots on `topology`, `busy` the slots with an exchange in flight.
        """
        if self._layout not in (None, (topology.ids, main, compactor)):
            self.reset()
        self._layout = (topology.ids, main, compactor)
        if slots == "main-only":  # the user's own choice: nothing to warn of
            self.note(key, main, now)
            return Placed(main, shared=False, enough=None)
        home = self._home_of.get(key)
        if home is None or (home != main and not _is_further(home, topology, main, compactor, slots)):
            further = [slot for slot in topology.ids if _is_further(slot, topology, main, compactor, slots)]
            home = self._free_home(topology, main, further, busy, now)
        if home is not None:
            self._move(key, home, now)
            self._ran(key, home, now)
            return Placed(home, shared=False, enough=None)
        slot = self._shared_slot(key, main, compactor, busy, lend=slots == "auto")
        self._leave(key)
        if slot == compactor:
            self._move(key, slot, now)
        self._ran(key, slot, now)
        return Placed(slot, shared=True, enough=self._enough(key, now))

    def note(self, key: str, slot: int, now: float) -> None:
        """The client's own choice was this slot, or the server's. It becomes the conversation's home if it is free."""
        if slot not in self._homes or self._homes[slot].key == key:
            self._move(key, slot, now)
        self._ran(key, slot, now)

    def slot_of(self, key: str) -> int | None:
        """Where the conversation was placed last; None once another one has taken its home."""
        if (slot := self._last_slot.get(key)) is not None:
            return slot
        return self._home_of.get(key)

    def home_at(self, slot: int) -> str | None:
        """The conversation that keeps this slot."""
        home = self._homes.get(slot)
        return home.key if home is not None else None

    def home_of(self, key: str) -> int | None:
        """The slot that is kept for the conversation."""
        return self._home_of.get(key)

    def adopt(
        self,
        topology: Topology,
        main: int,
        compactor: int,
        homes: Mapping[int, tuple[str, float]],
        last: Mapping[str, int],
        compactor_used: bool,
    ) -> None:
        """Go by what several placements know together. `homes`: by slot, whose it is and when that was last there;
        `last`: by conversation, where it was placed last, the latest at the end."""
        self._layout = (topology.ids, main, compactor)
        self._compactor_used = compactor_used
        self._homes = {slot: _Home(key, used) for slot, (key, used) in homes.items()}
        self._home_of = {key: slot for slot, (key, _) in homes.items()}
        self._owner = {slot: key for key, slot in last.items()}
        self._last_slot.clear()
        self._last_slot.update(last)

    def owner(self, slot: int) -> str | None:
        """Who was placed there last: the slot holds that conversation's tokens, once its turn has run."""
        return self._owner.get(slot)

    def compactor_used(self) -> None:
        """A side request has run on the compactor's slot: from now on that is lent to nobody."""
        self._compactor_used = True

    def forget(self, key: str) -> None:
        self._leave(key)
        self._last_slot.pop(key, None)
        self._lately.pop(key, None)
        for slot in [slot for slot, owner in self._owner.items() if owner == key]:
            del self._owner[slot]

    def reset(self) -> None:
        """The server has restarted, or the slots have other ids or roles: nothing is where it was."""
        self._layout = None
        self._compactor_used = False
        self._homes.clear()
        self._home_of.clear()
        self._owner.clear()
        self._last_slot.clear()
        self._lately.clear()

    def _free_home(
        self, topology: Topology, main: int, further: Sequence[int], busy: Container[int], now: float
    ) -> int | None:
        """A slot that is nobody's home, or the one that can best be taken; None where there is none."""
        candidates = list(further)
        holder = self._homes.get(main)
        if holder is None or (now - holder.used > IDLE_LIMIT and main not in busy):
            candidates.append(main)
        # A server that doesn't say is taken to divide its context evenly.
        sizes = {slot.id: slot.n_ctx or 0 for slot in topology.slots}

        def rank(slot: int) -> tuple[bool, int, bool, float, int]:
            home = self._homes.get(slot)
            if home is not None:
                order, within = 3, home.used
            else:
                order, within = (0 if slot == main else 2 if slot in self._owner else 1), -sizes[slot]
            return slot in busy, order, sizes[slot] < sizes[main], within, slot

        return min(candidates, key=rank, default=None)

    def _shared_slot(self, key: str, main: int, compactor: int, busy: Container[int], *, lend: bool) -> int:
        if not lend or self._compactor_used:
            return main
        if self._home_of.get(key) == compactor:
            return compactor
        if self._owner.get(main) == key:
            return main  # its tokens are still there
        return main if compactor in busy and main not in busy else compactor

    def _enough(self, key: str, now: float) -> int:
        """Slots for the conversations seen lately and a compactor; a single request is no conversation yet."""
        lately = (item for item in self._lately.items() if now - item[1].used < IDLE_LIMIT)
        return max(3, sum(seen.turns > 1 or other == key for other, seen in lately) + 1)

    def _move(self, key: str, slot: int, now: float) -> None:
        former = self._homes.get(slot)
        if former is None or former.key != key:
            self._leave(key)
            if former is not None:
                del self._home_of[former.key]
                if self._last_slot.get(former.key) == slot:
                    del self._last_slot[former.key]
            self._home_of[key] = slot
        self._homes[slot] = _Home(key, now)

    def _leave(self, key: str) -> None:
        if (home := self._home_of.pop(key, None)) is not None:
            del self._homes[home]

    def _ran(self, key: str, slot: int, now: float) -> None:
        self._owner[slot] = key
        self._last_slot[key] = slot
        before = self._lately.get(key)
        in_a_row = before is not None and now - before.used < IDLE_LIMIT
        self._lately[key] = _Lately(before.turns + 1 if before is not None and in_a_row else 1, now)


def _is_further(
    slot: int, topology: Topology, main: int, compactor: int, slots: Literal["auto"] | tuple[int, ...]
) -> bool:
    """Whether conversations after the first may have this slot."""
    allowed = slots == "auto" or any(normalise(own, topology.count) == slot for own in slots)
    return allowed and slot not in (main, compactor) and topology.slot(slot) is not None
