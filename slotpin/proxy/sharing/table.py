"""The conversations that several slotpins serve, and their slots: what each knows of all of them. No I/O."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from slotpin.pinning.conversations import Conversation, SessionId
from slotpin.pinning.turn import Difference, Turn

# As many as Redis keeps (scripts.COMMIT).
_MOST = 256
# Not a conversation: whether a side request has used the compactor's slot.
COMPACTOR_USED = "!"


class Entry(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A conversation after its last main request. Names and texts are digests.

    `ids`: by source the session's id, and whether it has been the same on two turns. `count` messages were sent, of
    which `digest` is the digest; `home` is the slot that is kept for it, `last` where it was placed last, None for a
    slot of the server's choice; `used` is in seconds of Redis's clock. `by`: the slotpin that it came through.
    """

    ids: dict[str, tuple[str, bool]]
    model: str
    opening: int
    first: int
    count: int
    digest: int
    home: int | None = None
    last: int | None = None
    used: float = 0.0
    by: str = ""

    def begins(self, turn: Turn) -> bool:
        """Whether all of its messages stand at the front of `turn`."""
        return 0 < self.count <= len(turn.messages) and self.digest == digest(turn.messages[: self.count])

    def related(self, turn: Turn) -> bool:
        return self.opening == turn.opening or self.first == _first(turn)

    def compatible(self, ids: Sequence[tuple[str, str]]) -> bool:
        """Whether a request with these ids may belong to it."""
        return all(source not in self.ids or self.ids[source] in ((value, True), (value, False))
                   or not self.ids[source][1] for source, value in ids)  # fmt: skip

    def difference(self, turn: Turn) -> Difference | None:
        """Where `turn` is no append of its last one; which message is not known here."""
        if self.opening != turn.opening:
            return Difference(None, "system text or tools")
        return None if self.begins(turn) else Difference(None, "an earlier message", compacted=turn.compacted)


class Table:
    """Entries by the names that all slotpins use, `global`; `conversation` is this slotpin's own name for one."""

    def __init__(self) -> None:
        self.version = 0
        self.compactor_used = False
        self._entries: dict[str, Entry] = {}
        self._global: dict[str, str] = {}
        self._local: dict[str, str] = {}

    def update(self, version: int, anew: bool, news: Sequence[str]) -> None:
        """What was written since the last version, oldest first; `anew`: all that there is."""
        if anew:
            self._entries.clear()
            self.compactor_used = False
        for name, text in zip(news[::2], news[1::2], strict=True):
            self._entries.pop(name, None)  # so that the oldest stand first
            if name == COMPACTOR_USED:
                self.compactor_used = True
            elif text:
                self._entries[name] = _decoder.decode(text)
        self.version = version
        for name in list(self._entries)[:-_MOST]:
            self.forget(name)

    def forget(self, name: str) -> None:
        self._entries.pop(name, None)
        if (local := self._local.pop(name, None)) is not None:
            self._global.pop(local, None)

    def forget_local(self, key: str) -> None:
        if (name := self._global.pop(key, None)) is not None:
            self._local.pop(name, None)

    def name_of(self, conversation: str) -> str | None:
        return self._global.get(conversation)

    def local(self, name: str) -> str:
        """This slotpin's own name of it; of one that never came through here, one that no conversation has."""
        return self._local.get(name) or f"~{name}"

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def items(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def identify(self, conversation: Conversation) -> str:
        """The global name of a conversation with this last turn, which may be new.

        The session's id decides, else that the turn begins with all messages of the other's last turn. Two slotpins
        that each named it while they could not know of the other take the name that was used last.
        """
        own = self._global.get(conversation.key)
        ids = digests(ids_of(conversation))
        found = self.find(ids, conversation.turn, conversation.model)
        is_free = found is not None and self._local.get(found) in (None, conversation.key)
        if found is not None and is_free and (own is None or self._used(found) > self._used(own)):
            self.forget_local(conversation.key)
            own = found
        if own is None:
            own = secrets.token_hex(6)
        self._global[conversation.key], self._local[own] = own, conversation.key
        return own

    def find(self, ids: Sequence[tuple[str, str]], turn: Turn, model: str | None) -> str | None:
        for source, value in ids:
            for name, entry in self._entries.items():
                if entry.ids.get(source, ("",))[0] == value and entry.related(turn):
                    return name
        begun = [
            (entry.count, name)
            for name, entry in self._entries.items()
            if entry.model == (model or "") and entry.compatible(ids) and entry.begins(turn)
        ]
        return max(begun)[1] if begun else None

    def extended_by(self, turn: Turn, model: str | None) -> Entry | None:
        """The conversation of which `turn` has all messages, the same opening, and more messages."""
        found = [
            entry
            for entry in self._entries.values()
            if entry.model == (model or "")
            and entry.count < len(turn.messages)
            and entry.opening == turn.opening
            and entry.begins(turn)
        ]
        return max(found, key=lambda entry: entry.count, default=None)

    def with_ids(self, ids: Sequence[tuple[str, str]]) -> list[tuple[str, Entry]]:
        """Those that a side request with these ids may belong to; without ids any."""
        if not ids:
            return list(self._entries.items())
        return [
            (name, entry)
            for source, value in ids
            for name, entry in self._entries.items()
            if entry.ids.get(source, ("",))[0] == value
        ][:1]

    def homes(self) -> dict[int, tuple[str, float]]:
        """By slot: this slotpin's name of whose home it is, and when that was last there."""
        return {entry.home: (self.local(name), entry.used) for name, entry in self._entries.items()
                if entry.home is not None}  # fmt: skip

    def last(self) -> dict[str, int]:
        return {self.local(name): entry.last for name, entry in self._entries.items() if entry.last is not None}

    def _used(self, name: str) -> float:
        entry = self._entries.get(name)
        return entry.used if entry is not None else 0.0


def entry_of(conversation: Conversation, used: float, by: str) -> Entry:
    """Without its slots."""
    turn = conversation.turn
    ids = {source: (_id(source, seen.value), seen.stable) for source, seen in conversation.ids.items()}
    return Entry(
        ids=ids,
        model=conversation.model or "",
        opening=turn.opening,
        first=_first(turn),
        count=len(turn.messages),
        digest=digest(turn.messages),
        used=used,
        by=by,
    )


def encode(entry: Entry) -> str:
    return msgspec.json.encode(entry).decode()


def ids_of(conversation: Conversation) -> list[SessionId]:
    return [(source, seen.value) for source, seen in conversation.ids.items()]


def digests(ids: Sequence[SessionId]) -> list[tuple[str, str]]:
    """No id of a client's is shown to Redis."""
    return [(source, _id(source, value)) for source, value in ids]


def digest(messages: Sequence[int]) -> int:
    return xxh3_64_intdigest(array("Q", messages).tobytes())


def _id(source: str, value: str) -> str:
    return xxh3_64_hexdigest(f"{source}\n{value}".encode("utf-8", "surrogatepass"))


def _first(turn: Turn) -> int:
    return turn.messages[0] if turn.messages else 0


_decoder = msgspec.json.Decoder(Entry)
