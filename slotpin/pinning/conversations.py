"""Which conversation a request belongs to: by its client's session id, else by what its messages have in common.

A session id that is known decides. Otherwise, among the conversations of the same model,

1. the one whose last turn's messages the request begins with, the longest such;
2. else the one with the longest run of messages in common, wherever the run stands in either: after a compaction the
   client keeps its last messages and puts a summary in front of them.

Not every run is enough, because conversations often open alike ("hi", a file of instructions). Enough is
- all that the shorter of the two has: a retry, a rewind, a first message sent again;
- from both fronts: two messages or more that are all but the last of the request (a message was edited), or three or
  more that are most of the shorter (the client rewrote its latest messages);
- anywhere else: two messages. They came from within a conversation, where messages seldom repeat.
On a tie the most recently used one is taken. System text and tools never count.

A compaction may leave less: the last message and the answer to it, or the answer alone, which nobody here has seen. A
request that begins with a client's summary and was not found goes on with a conversation under the same system text
and tools: one that has any late message in common with it, else the most recently used one.

A client may send the session's id with its sub-agents too. What has neither the opening nor any message of the id's
conversation is a conversation of its own, known by the id and its opening.

An id that changes with every request is no identity. A new id on a known conversation is taken for such as long as no
id from that source has been seen there on two turns; after that it means a fork, which is a conversation of its own.
When two conversations were taken for one in this way, the id that comes back first keeps it, and the other is a fork.
Only `X-Slotpin-Session` is believed at once: who sets it means slotpin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from slotpin.pinning.recent import Recent
from slotpin.pinning.request import Body, read_member
from slotpin.pinning.turn import Turn

if TYPE_CHECKING:
    from slotpin.pinning.reuse import Left

# Where session ids stand that stay the same over a conversation, most trusted first.
SESSION_HEADERS = ("x-slotpin-session", "x-session-affinity", "session_id", "x-claude-code-session-id")
SESSION_FIELDS = ("prompt_cache_key", "session_id", "metadata.user_id")
# Claude Code's sub-agents carry their session's id, and this one of their own.
_AGENT_HEADER = b"x-claude-code-agent-id"
# opencode's child sessions have ids of their own, and their parent's here.
_PARENT_HEADER = b"x-parent-session-id"

SessionId = tuple[str, str]  # source, value

# Who sets this one says to slotpin which session it is: another value is another session from the first turn on.
_OWN_HEADER = "x-slotpin-session"

_LONGEST_ID = 200
# Claude Code puts its session into the user's id: `user_…_account_…_session_…`, or the text of a JSON object.
_USER_SESSION = re.compile(r"session(?:_id)?[^0-9A-Za-z]+([0-9A-Za-z-]{8,})")

# Messages at a conversation's end by which it is found again after its front was cut off or replaced.
_TAIL = 8
# A message that so many conversations have in common ("continue") tells nothing, unless it is the first.
_COMMONPLACE = 32


class Sources:
    """Where session ids stand, most trusted first: names of headers, and of fields, each a member of the body or of an
    object in it ("metadata.user_id")."""

    __slots__ = ("fields", "headers")

    def __init__(self, headers: Iterable[str] = SESSION_HEADERS, fields: Iterable[str] = SESSION_FIELDS) -> None:
        # With the name to look a header up by, and the path to a field's value.
        self.headers = tuple((name, name.lower().encode()) for name in headers)
        self.fields = tuple((name, *_path(name)) for name in fields)


def _path(name: str) -> tuple[str, Sequence[str]]:
    outer, *inner = name.split(".")
    return outer, inner


_USUAL = Sources()


def session_ids(
    header: Callable[[bytes], bytes | None], body: Body | None, sources: Sources = _USUAL
) -> list[SessionId]:
    """The ids that a request carries, most trusted first. `header` looks one up by its name in lower case.

    A user's id is not a session's: of `metadata.user_id` only the session in it counts. A sub-agent that has its own id
    has the session's together with that.
    """
    ids = _session_ids(header, body, sources)
    agent = header(_AGENT_HEADER)
    return [(source, _short(f"{value} {agent.decode('latin-1')}")) for source, value in ids] if agent else ids


def parent_ids(
    header: Callable[[bytes], bytes | None], body: Body | None, sources: Sources = _USUAL
) -> list[SessionId]:
    """The ids of the conversation that started the one which a request is of; empty where it names none."""
    if parent := header(_PARENT_HEADER):
        return [(name, _short(parent.decode("latin-1"))) for name, _ in sources.headers]
    return _session_ids(header, body, sources) if header(_AGENT_HEADER) else []


def _session_ids(header: Callable[[bytes], bytes | None], body: Body | None, sources: Sources) -> list[SessionId]:
    found: dict[str, str] = {}
    for name, lowered in sources.headers:
        if raw := header(lowered):
            found.setdefault(name, _short(raw.decode("latin-1")))
    if body is not None:
        for name, outer, inner in sources.fields:
            if value := _field(body, name, outer, inner):
                found.setdefault(name, _short(value))
    return list(found.items())


def _field(body: Body, name: str, outer: str, inner: Sequence[str]) -> str:
    value: Any = read_member(body, outer)
    if value is None:
        return ""
    for part in inner:
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str):
        return str(value) if type(value) is int else ""
    if name == "metadata.user_id":
        session = _USER_SESSION.search(value)
        return session[1] if session else ""
    return value


def _shortened(ids: Sequence[SessionId]) -> Sequence[SessionId]:
    return [(source, _short(value)) for source, value in ids] if ids else ()


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_ID else xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))


@dataclass(slots=True)
class _Seen:
    """A conversation's latest id from a source, and on how many of its turns that was seen, retries apart: they may
    well repeat an id that is new for every request."""

    value: str
    turns: int = 1

    @property
    def stable(self) -> bool:
        return self.turns > 1


@dataclass(slots=True)
class Conversation:
    """`key` is the short name that people see. `turn` is of its last main request.

    `left` is what that turn left in its slot; the caller sets it.
    """

    key: str
    model: str | None
    turn: Turn
    turns: int
    last_used: float
    left: Left | None = None
    ids: dict[str, _Seen] = field(default_factory=dict, repr=False)


class Conversations:
    """The conversations of one server: real ones, and requests that may be the first turn of one.

    They have separate bounds, so that any number of single requests pushes out no real conversation.
    """

    def __init__(
        self, max_known: int = 256, max_passing: int = 256, on_forget: Callable[[str], None] = lambda _: None
    ) -> None:
        self._on_forget = on_forget
        self._all: dict[str, Conversation] = {}
        # Only the order of use.
        self._known: Recent[str, None] = Recent(max_known)
        self._passing: Recent[str, None] = Recent(max_passing)
        # The latest id of each conversation from each source; and the ids that it had before.
        self._by_id: dict[SessionId, str] = {}
        self._earlier: Recent[SessionId, str] = Recent(max_known + max_passing)
        # Digest of a first or late message -> the conversations that have it, and where in their messages.
        self._landmarks: dict[int, dict[str, int]] = {}
        self._count = 0

    def find(self, ids: Sequence[SessionId], turn: Turn, model: str | None) -> Conversation | None:
        """The conversation that a main request goes on with; None for a new one."""
        ids = self._own_ids(ids, turn)
        if named := self._named(ids):
            return named
        appended_to = self._begun_by(turn, model, len(turn.messages), ids)
        found = appended_to or self._most_in_common(turn, model, ids)
        return self._compacted(turn, model, ids) if found is None and turn.compacted else found

    def take(
        self, conversation: Conversation | None, ids: Sequence[SessionId], turn: Turn, model: str | None, now: float
    ) -> Conversation:
        """Take over a main request that was found to go on with this conversation; None: it opens one."""
        ids = self._own_ids(ids, turn)
        if conversation is None:
            self._count += 1
            conversation = Conversation(f"c{self._count}", model, turn, 0, now)
            self._all[conversation.key] = conversation
        retried = conversation.turns > 0 and turn.messages == conversation.turn.messages != ()
        self._take_ids(conversation, ids, retried)
        self._unmark(conversation)
        conversation.turn, conversation.model, conversation.last_used = turn, model, now
        conversation.turns += 1
        self._mark(conversation)
        self._file(conversation)
        return conversation

    def named(self, ids: Sequence[SessionId]) -> Conversation | None:
        """The conversation of the most trusted id that is known."""
        return self._named(_shortened(ids))

    def _named(self, ids: Sequence[SessionId]) -> Conversation | None:
        for source, value in ids:
            conversation = self._all.get(self._key_of((source, value)))
            if conversation and _compatible(conversation, source, value):
                return conversation
        return None

    def extended_by(self, turn: Turn, model: str | None) -> Conversation | None:
        """The conversation of which `turn` has all messages, the same opening, and more messages."""
        return self._begun_by(turn, model, len(turn.messages) - 1, opening=turn.opening)

    def forget(self, key: str) -> None:
        if conversation := self._all.pop(key, None):
            self._unmark(conversation)
            for source, seen in conversation.ids.items():
                self._drop_id((source, seen.value), key)
            self._known.pop(key, None)
            self._passing.pop(key, None)
            self._on_forget(key)

    def get(self, key: str) -> Conversation | None:
        return self._all.get(key)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(tuple(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def _own_ids(self, ids: Sequence[SessionId], turn: Turn) -> Sequence[SessionId]:
        """A sub-agent under its parent's ids gets ids of its own: theirs, and its opening."""
        ids = _shortened(ids)
        parent = self._named(ids)
        if parent is None or _related(parent.turn, turn):
            return ids
        return [(source, _short(f"{value} {turn.opening:x}")) for source, value in ids]

    def _key_of(self, session: SessionId) -> str:
        return self._by_id.get(session) or self._earlier.get(session) or ""

    def _begun_by(
        self,
        turn: Turn,
        model: str | None,
        longest: int,
        ids: Sequence[SessionId] = (),
        opening: int | None = None,
    ) -> Conversation | None:
        """The conversation with the most messages, at most `longest`, with all of which `turn` begins.

        The search begins at the end: a usual turn adds few messages, so it takes few steps.
        """
        for end in range(longest, 0, -1):
            if turn.messages[end - 1] not in self._landmarks:
                continue
            found = [
                conversation
                for conversation, position in self._marked(turn.messages[end - 1], model, ids)
                if position == end - 1
                and len(conversation.turn.messages) == end
                and conversation.turn.messages == turn.messages[:end]
                and opening in (None, conversation.turn.opening)
            ]
            if found:
                return max(found, key=lambda conversation: conversation.last_used)
        return None

    def _most_in_common(self, turn: Turn, model: str | None, ids: Sequence[SessionId]) -> Conversation | None:
        best: Conversation | None = None
        best_rank = (0, 0.0)
        # Conversation and shift of its messages against ours -> where the run that was last seen there ends.
        ends: dict[tuple[str, int], int] = {}
        tried: Counter[int] = Counter()
        for index, digest in enumerate(turn.messages):
            if digest not in self._landmarks or (index and len(self._landmarks[digest]) > _COMMONPLACE):
                continue
            tried[digest] += 1
            if tried[digest] > _COMMONPLACE:
                continue  # equal messages by the thousand tell no more than a few
            for conversation, position in self._marked(digest, model, ids):
                alignment = (conversation.key, index - position)
                if index < ends.get(alignment, 0):
                    continue
                run = _Run.around(conversation.turn.messages, position, turn.messages, index)
                ends[alignment] = run.start + run.length
                rank = (run.length, conversation.last_used)
                if rank > best_rank and run.is_enough:
                    best, best_rank = conversation, rank
        return best

    def _compacted(self, turn: Turn, model: str | None, ids: Sequence[SessionId]) -> Conversation | None:
        """The conversation that this may be the rest of."""
        messages = set(turn.messages)
        candidates = [
            conversation
            for conversation in self._all.values()
            if conversation.turn.opening == turn.opening and _may_be_meant(conversation, model, ids)
        ]
        return max(
            candidates,
            key=lambda each: (not messages.isdisjoint(each.turn.messages[-_TAIL:]), each.last_used),
            default=None,
        )

    def _marked(self, digest: int, model: str | None, ids: Sequence[SessionId]) -> Iterator[tuple[Conversation, int]]:
        """The conversations that have `digest` as a landmark and may be meant, and where they have it."""
        for key, position in self._landmarks.get(digest, {}).items():
            conversation = self._all[key]
            if _may_be_meant(conversation, model, ids):
                yield conversation, position

    def _mark(self, conversation: Conversation) -> None:
        for position, digest in _landmarks(conversation.turn):
            self._landmarks.setdefault(digest, {})[conversation.key] = position

    def _unmark(self, conversation: Conversation) -> None:
        for _, digest in _landmarks(conversation.turn):
            if at := self._landmarks.get(digest):
                at.pop(conversation.key, None)
                if not at:
                    del self._landmarks[digest]

    def _take_ids(self, conversation: Conversation, ids: Sequence[SessionId], retried: bool) -> None:
        for source, value in ids:
            seen = conversation.ids.get(source)
            if seen is not None and seen.value == value:
                seen.turns += not retried
            else:
                came_back = self._key_of((source, value)) == conversation.key
                if seen is not None:
                    self._drop_id((source, seen.value), conversation.key)
                    self._earlier[source, seen.value] = conversation.key
                conversation.ids[source] = _Seen(value, 2 if came_back and not retried else 1)
            self._by_id[source, value] = conversation.key

    def _drop_id(self, session: SessionId, key: str) -> None:
        if self._by_id.get(session) == key:
            del self._by_id[session]

    def _file(self, conversation: Conversation) -> None:
        """Note its use, in the segment that it belongs to; the one used longest ago makes room."""
        key = conversation.key
        is_known = key in self._known or conversation.turns > 1 or self._count == 1
        if is_known:
            self._passing.pop(key, None)
        segment = self._known if is_known else self._passing
        if key not in segment and len(segment) >= segment.size:
            self.forget(next(iter(segment)))
        segment[key] = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal messages in a row: `start` in the new turn, `old_start` in the old one."""

    start: int
    old_start: int
    length: int
    total: int
    old_total: int

    @classmethod
    def around(cls, old: Sequence[int], position: int, new: Sequence[int], index: int) -> _Run:
        """The run that `old[position]`, which equals `new[index]`, belongs to."""
        before = 1
        while before <= min(position, index) and old[position - before] == new[index - before]:
            before += 1
        after = 1
        rest = min(len(old) - position, len(new) - index)
        while after < rest and old[position + after] == new[index + after]:
            after += 1
        start = index - before + 1
        return cls(start, position - before + 1, before + after - 1, len(new), len(old))

    @property
    def is_enough(self) -> bool:
        shorter = min(self.total, self.old_total)
        if self.length == shorter:
            return True
        if self.start or self.old_start:
            return self.length >= 2
        return self.length >= max(2, self.total - 1) or self.length >= max(3, shorter // 2 + 1)


def _related(one: Turn, other: Turn) -> bool:
    return one.opening == other.opening or not set(one.messages).isdisjoint(other.messages)


def _may_be_meant(conversation: Conversation, model: str | None, ids: Sequence[SessionId]) -> bool:
    return conversation.model == model and all(_compatible(conversation, *session) for session in ids)


def _compatible(conversation: Conversation, source: str, value: str) -> bool:
    """Whether a request with this id may belong to the conversation."""
    seen = conversation.ids.get(source)
    return seen is None or seen.value == value or not (seen.stable or source.lower() == _OWN_HEADER)


def _landmarks(turn: Turn) -> Iterable[tuple[int, int]]:
    """Position and digest of the first message and the last ones. Of equal ones the last position comes last."""
    messages = turn.messages
    late = len(messages) - _TAIL
    return ((0, messages[0]), *enumerate(messages[late:], late)) if late > 0 else enumerate(messages)
