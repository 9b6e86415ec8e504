"""`slotpin pi setup` and `slotpin pi remove`: what to write, and writing it.

A set-up starts from the files as they were before the last one: so it can be repeated, and undone byte for byte.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slotpin.errors import UserError
from slotpin.pi import folder as agent
from slotpin.pi.folder import EXTENSION, MODELS, SETTINGS, Entry, Part, Record
from slotpin.pi.json_edit import MISSING, BadJsonError, Document, find, put, put_back, read
from slotpin.pi.served import Found, Served
from slotpin.pi.wanted import NO_KEY, PROVIDER, PROVIDER_PATH, compaction_parts, merged, provider

_LENIENT = {MODELS: True, SETTINGS: False}  # Pi allows comments in the first only
_EMPTY = {MODELS: '{\n  "providers": {}\n}\n', SETTINGS: "{}\n"}


@dataclass(frozen=True, slots=True)
class Change:
    """One file's. `after` None: it goes."""

    path: Path
    before: bytes | None
    after: bytes | None

    @property
    def is_one(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Plan:
    """`record` is what the next removal needs, None after a removal; `notes` are for people."""

    folder: Path
    changes: Sequence[Change]
    record: Record | None
    notes: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not any(change.is_one for change in self.changes)


# From the file as it was, as it is, and what the last set-up wrote: what this one writes.
_PartsOf = Callable[[Document, Document, Entry | None], list[Part]]


def known_key(folder: Path) -> str | None:
    """The API key that Pi has for slotpin already, as models.json writes it. Raises UserError."""
    path = folder / MODELS
    key = find(_document(path, MODELS, agent.read_file(path)), (*PROVIDER_PATH, "apiKey"))
    return key if isinstance(key, str) and key != NO_KEY else None


def key_sent(key: str | None, environ: Mapping[str, str]) -> str | None:
    """What Pi will send for this `apiKey` of models.json; None where that is not known here.

    It may name variables, or begin with `!` and be a command, which is Pi's to run.
    """
    if key is None or key.startswith("!"):
        return None
    parts = [(found[1] or found[2], found[3]) for found in _VARIABLE.finditer(key)]
    if any(name and not environ.get(name) for name, _ in parts):
        return None
    return _VARIABLE.sub(lambda found: found[3] or environ[found[1] or found[2]], key)


# `$NAME`, `${NAME}`, and `$$` and `$!` for the signs themselves (its core/resolve-config-value.ts).
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\}|([$!]))")


def plan_setup(folder: Path, url: str, api_key: str | None, found: Found) -> Plan:
    """For the slotpin at `url`. Raises UserError."""
    record = agent.read_record(folder)
    files = dict(record.files)
    notes: list[str] = []
    if found.unloaded:
        notes.append(f"not loaded, so left out: {', '.join(found.unloaded)}; run this again when they are")
    ours = provider(url, api_key or NO_KEY, found.models)
    changes = [
        _json_change(folder / MODELS, MODELS, files, _provider_part(ours)),
        _json_change(folder / SETTINGS, SETTINGS, files, _settings_parts(found.models, notes)),
        _extension_change(folder / EXTENSION, files, notes),
    ]
    return Plan(folder, changes, Record(files, record.folders or agent.missing_folders(folder)), notes)


def _json_change(path: Path, name: str, files: dict[str, Entry], parts_of: _PartsOf) -> Change:
    """`files` has the last set-up, and then this one."""
    current, known = agent.read_file(path), files.get(name)
    start = _before(path, name, current, known)
    document, mine = _document(path, name, start), _document(path, name, current)
    try:
        parts = parts_of(document, mine, known)
        for part in parts:
            document = put(document, part.path, part.value)
    except BadJsonError as error:
        raise UserError(f"{path}: {error}; nothing was changed") from None
    same = current is not None and document.value == mine.value
    after = current if same else document.text.encode() if parts else start
    if not parts:
        files.pop(name, None)
    elif after is not None and after != current:
        files[name] = agent.entry(start, after, parts)
    return Change(path, current, after)


def _before(path: Path, name: str, current: bytes | None, known: Entry | None) -> bytes | None:
    """The file as it would be without a set-up."""
    if known is None or current is None:
        return current
    return known.original if known.is_untouched(current) else _stripped(path, name, current, known)


def _stripped(path: Path, name: str, current: bytes, known: Entry) -> bytes:
    """Without the parts of the last set-up; what the user has changed since stays."""
    document, original = _document(path, name, current), _document(path, name, known.original)
    try:
        for part in known.parts:
            document = put_back(document, part.path, original)
    except BadJsonError as error:
        raise UserError(f"{path}: {error}; nothing was changed") from None
    return document.text.encode()


def _document(path: Path, name: str, content: bytes | None) -> Document:
    try:
        text = content.decode() if content and content.strip() else _EMPTY[name]
        return read(text, lenient=_LENIENT[name])
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; nothing was changed") from None
    except BadJsonError as error:
        raise UserError(f"{path}: {error}; nothing was changed") from None


def _provider_part(ours: dict[str, Any]) -> _PartsOf:
    def parts(start: Document, mine: Document, known: Entry | None) -> list[Part]:
        theirs = find(mine, PROVIDER_PATH)
        if known is not None and [part.value for part in known.parts] == [theirs]:
            theirs = find(start, PROVIDER_PATH)  # what is there now is all ours
        return [Part(list(PROVIDER_PATH), merged(None if theirs is MISSING else theirs, ours))]

    return parts


def _settings_parts(models: Sequence[Served], notes: list[str]) -> _PartsOf:
    def parts(start: Document, mine: Document, known: Entry | None) -> list[Part]:
        found = []
        ours = {tuple(part.path): part.value for part in known.parts} if known is not None else {}
        for path, value in compaction_parts(start, models):
            theirs = find(mine, path)
            changed = theirs is not MISSING and theirs != ours.get(tuple(path))
            found.append(Part(path, theirs if changed else value))
        kept = {
            name for name in ("reserveTokens", "keepRecentTokens") if find(start, ("compaction", name)) is not MISSING
        }
        notes.extend(f"compaction.{name} of settings.json is yours and stays" for name in sorted(kept))
        return found

    return parts


def _extension_change(path: Path, files: dict[str, Entry], notes: list[str]) -> Change:
    current, known = agent.read_file(path), files.get(EXTENSION)
    ours = resources.files("slotpin.pi").joinpath("extension/slotpin.ts").read_bytes()
    if current is not None and known is not None and not known.is_untouched(current):
        notes.append(f"{path} was changed since and stays; delete it to get slotpin's own")
        return Change(path, current, current)
    if ours != current:
        files[EXTENSION] = agent.entry(known.original if known is not None else current, ours, [])
    return Change(path, current, ours)


def plan_removal(folder: Path) -> Plan:
    """Raises UserError, also where there is nothing to undo."""
    record = agent.read_record(folder)
    if not record.files:
        raise UserError(f"{folder}: there is no set-up of slotpin's to undo", 1)
    notes, changes = [], []
    for name, known in record.files.items():
        path, current = folder / name, agent.read_file(folder / name)
        if current is None:
            after = None
        elif known.is_untouched(current):
            after = known.original
        elif name in _LENIENT:
            after = _stripped(path, name, current, known)
        else:
            after = current
            notes.append(f"{path} was changed since and stays; delete it yourself")
        changes.append(Change(path, current, after))
    return Plan(folder, changes, None, notes)


def carry_out(plan: Plan) -> None:
    """Raises UserError. What can undo it is written first."""
    record = agent.read_record(plan.folder)
    if plan.record is not None and not plan.is_empty:
        agent.write_record(plan.folder, plan.record)
    for change in plan.changes:
        if not change.is_one:
            continue
        if change.after is None:
            change.path.unlink(missing_ok=True)
        else:
            agent.write_file(change.path, change.after)
    if plan.record is None:
        agent.drop_record(plan.folder, record)


_KEY = re.compile(r'("apiKey"\s*:\s*)"(?!\$|!|none")(?:\\.|[^"\\])*"')


def differences(plan: Plan) -> list[str]:
    """As `diff -u`; keys masked, and the extension by its length only."""
    return [line for change in plan.changes if change.is_one for line in _difference(change)]


def _difference(change: Change) -> list[str]:
    if change.path.suffix == ".ts":
        if change.after is None:
            return [f"--- {change.path} (removed)"]
        lines = len(change.after.splitlines())
        return [f"+++ {change.path} ({lines} lines: slotpin's companion extension)"]
    old, new = (("/dev/null" if content is None else str(change.path)) for content in (change.before, change.after))
    before, after = ((content or b"").decode().splitlines() for content in (change.before, change.after))
    found = difflib.unified_diff(before, after, old, new, n=1, lineterm="")
    return [_KEY.sub(r'\1"********"', line) for line in found]


def contents(plan: Plan) -> str:
    """The files as they would be, each under a line that names it."""
    return "\n".join(
        f"// {change.path}\n{change.after.decode()}" for change in plan.changes if change.after is not None
    )


def first_model(found: Found) -> str:
    return f"{PROVIDER}/{found.models[0].model}"
