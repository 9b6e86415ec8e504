"""Pi's agent folder (docs/configuration.md of Pi), and what slotpin keeps there to undo its set-up."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slotpin.errors import UserError

MODELS = "models.json"
SETTINGS = "settings.json"
EXTENSION = "extensions/slotpin.ts"
BACKUP = "slotpin-backup"
_RECORD = f"{BACKUP}/setup.json"


def agent_folder(environ: Mapping[str, str]) -> Path:
    folder = environ.get("PI_CODING_AGENT_DIR")
    return Path(folder).expanduser() if folder else Path.home() / ".pi" / "agent"


class Part(msgspec.Struct, frozen=True):
    """One member that the set-up wrote."""

    path: list[str]
    value: Any


class Entry(msgspec.Struct, frozen=True):
    """`before` is the file as it was, in base64, None if it was not there; `written` is the digest of what the set-up
    made of it."""

    before: str | None
    written: str
    parts: list[Part] = []

    @property
    def original(self) -> bytes | None:
        return None if self.before is None else base64.b64decode(self.before)

    def is_untouched(self, content: bytes | None) -> bool:
        return content is not None and digest(content) == self.written


class Record(msgspec.Struct, frozen=True):
    """`files` by their names in the agent folder; `folders` are those that the set-up made, the outermost first."""

    files: dict[str, Entry] = {}
    folders: list[str] = []


def entry(before: bytes | None, written: bytes, parts: list[Part]) -> Entry:
    return Entry(None if before is None else base64.b64encode(before).decode(), digest(written), parts)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes | None:
    """None: there is none. Raises UserError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def read_record(folder: Path) -> Record:
    content = read_file(folder / _RECORD)
    if content is None:
        return Record()
    try:
        return msgspec.json.decode(content, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UserError(f"{folder / _RECORD}: is not what slotpin wrote; remove slotpin's parts by hand") from None


def write_record(folder: Path, record: Record) -> None:
    """Also the files as they were, for people."""
    for name, known in record.files.items():
        if known.original is not None:
            write_file(folder / BACKUP / Path(name).name, known.original)
    write_file(folder / _RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def drop_record(folder: Path, record: Record) -> None:
    """And the folders that the set-up made, as far as they are empty."""
    for name in (*(Path(name).name for name in record.files), Path(_RECORD).name):
        (folder / BACKUP / name).unlink(missing_ok=True)
    for each in (str(folder / BACKUP), *reversed(record.folders)):
        with contextlib.suppress(OSError):
            Path(each).rmdir()


def missing_folders(folder: Path) -> list[str]:
    """Those that have to be made for the set-up, the outermost first."""
    wanted = (folder / EXTENSION).parent
    return [str(each) for each in reversed([wanted, *wanted.parents]) if not each.exists()]


def write_file(path: Path, content: bytes) -> None:
    """In one step. A link stays a link, and the mode what it was; a new file is its owner's alone. Raises UserError."""
    path = path.resolve()
    new = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            if path.exists():
                os.fchmod(number, path.stat().st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(number)
        Path(new).replace(path)
    except OSError as error:
        if new is not None:
            Path(new).unlink(missing_ok=True)
        raise UserError(f"{path}: {error.strerror or error}", 1) from None
