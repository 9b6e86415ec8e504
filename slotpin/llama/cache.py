"""The user's cache folder: where it is, who may write in it now, and how a result appears there all at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from slotpin.errors import UserError

Report = Callable[[str], None]


def cache_dir() -> Path:
    """`$SLOTPIN_CACHE_DIR`, else the platform's user cache folder for slotpin. It may not exist yet.

    Raises UserError for a user without a home folder.
    """
    configured = os.environ.get("SLOTPIN_CACHE_DIR")
    if configured:
        return Path(configured).expanduser().absolute()
    try:
        return user_cache_path("slotpin", appauthor=False)
    except RuntimeError:
        raise UserError("this user has no home folder for the cache; set SLOTPIN_CACHE_DIR") from None


def server_log(port: int) -> Path:
    """Where the llama-server on `port` writes its output."""
    return cache_dir() / "logs" / f"llama-server-{port}.log"


@contextmanager
def locked(name: str, report: Report) -> Iterator[None]:
    """Hold the cache's lock `name` in this process alone; the system drops it when the process dies.

    Any OSError inside becomes a UserError that names the cache folder: a full disk, no permission.
    """
    try:
        with _file_lock(cache_dir() / "locks" / f"{name}.lock", report):
            yield
    except OSError as error:
        raise UserError(
            f"cache folder {cache_dir()}: {error}; make room there or set SLOTPIN_CACHE_DIR to another folder",
            exit_code=1,
        ) from error


@contextmanager
def _file_lock(path: Path, report: Report) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: two runs at once then both do the work
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another slotpin process ({path.stem})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, and put it in `target`'s place if the block ends well.

    The caller holds a lock that covers `target`, so folders that a killed run left behind can be removed here.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}."
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield staging
        if target.exists():
            shutil.rmtree(target)
        staging.replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
