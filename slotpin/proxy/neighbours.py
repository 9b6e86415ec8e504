"""Other slotpins in front of the same llama-server, which know nothing of what this one sends there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import IO

from slotpin.errors import UserError
from slotpin.llama.cache import cache_dir

ALONE = "alone"
# One occasion may be a person who tries something; `slotpin doctor` sends a few requests of its own.
TWICE_SECONDS = 60.0


class Neighbours:
    """Those of this user on this machine: each holds a locked file of its own beside those of the others.

    `sharing`: what the slots are shared by, `ALONE` for nothing. Slotpins with the same know of each other.
    """

    def __init__(self, server: str, sharing: str) -> None:
        self._server = server
        self._sharing = sharing
        self._file: IO[str] | None = None

    def join(self) -> None:
        """Nothing is told where there is no folder to write to."""
        with contextlib.suppress(OSError, UserError):
            folder = cache_dir() / "locks" / f"server-{sha256(self._server.encode()).hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
            file = path.open("w")
            if _lock(file):
                file.write(self._sharing)
                file.flush()
                self._file = file

    def strangers(self) -> list[int]:
        """Process ids of those that don't share the slots with this one, which has joined."""
        if self._file is None:
            return []
        own = Path(self._file.name)
        return [
            int(path.name.partition("-")[0])
            for path, sharing in _living(own.parent).items()
            if path != own and (self._sharing == ALONE or sharing != self._sharing)
        ]

    def leave(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                Path(self._file.name).unlink(missing_ok=True)
            self._file.close()
            self._file = None


class Strangers:
    """Requests at the server that did not come through here. `tell` hears once that there are some."""

    def __init__(self, clock: Callable[[], float], tell: Callable[[], None]) -> None:
        self._clock = clock
        self._tell: Callable[[], None] | None = tell
        self._first_at: float | None = None
        self.passed_on_at = float("-inf")

    def seen(self) -> None:
        """A look showed one, if it is not what slotpin passes on without reading it, as embeddings."""
        now = self._clock()
        if now - self.passed_on_at < TWICE_SECONDS:
            return
        if self._first_at is None:
            self._first_at = now
        elif now - self._first_at >= TWICE_SECONDS and self._tell is not None:
            self._tell()
            self._tell = None


def _living(folder: Path) -> dict[Path, str]:
    """The files of running slotpins, and what these share the slots by."""
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError), path.open("r+") as file:
                if _lock(file):
                    path.unlink(missing_ok=True)  # of one that was killed
                else:
                    found[path] = file.read()
    return found


def _lock(file: IO[str]) -> bool:
    """Whether nobody had it; it is this process's then."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing is told there
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
