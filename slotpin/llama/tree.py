"""A tree to build: what a source holds, with a patch series applied, and as few files written as that takes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from slotpin.llama.series import Series, apply

# Where a tree keeps the names of its files that are not as in its source.
_RECORD = ".slotpin-patched"


def lay_out(series: Series, source: Path, names: Iterable[str], tree: Path, *, link: bool) -> None:
    """Make `tree` hold the files `names` of `source`, with `series` applied, whatever was laid out there before.

    A file whose content stays is not written, so that the next build is incremental. Nothing is touched where a patch
    does not apply (UserError). `link`: hard links do, because nothing ever writes into `source`.
    """
    with tempfile.TemporaryDirectory() as folder:
        patched = Path(folder)
        apply(series, source, patched)
        before = _recorded(tree)
        wanted = set(names) | series.touched
        tree.mkdir(parents=True, exist_ok=True)
        _record(tree, before | series.touched)  # first, so that the next run can put a killed one right
        for name in _names_in(tree) - wanted:
            (tree / name).unlink()
        for name in wanted - before - series.touched:
            _mirror(source / name, tree / name, link=link)
        for name in before | series.touched:
            _put(patched / name if name in series.touched else source / name, tree / name)
        _record(tree, series.touched)


def _names_in(tree: Path) -> set[str]:
    found = (Path(folder, name) for folder, _, files in os.walk(tree) for name in files)
    return {path.relative_to(tree).as_posix() for path in found} - {_RECORD}


def _mirror(new: Path, target: Path, *, link: bool) -> None:
    """Time and size tell whether a file is the same: a mirrored one has its source's time."""
    if os.path.lexists(target):
        old, current = target.lstat(), new.lstat()
        if (old.st_mtime_ns, old.st_size, old.st_mode) == (current.st_mtime_ns, current.st_size, current.st_mode):
            return
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(new, target, follow_symlinks=False)
        except OSError:  # not on every file system
            pass
        else:
            return
    shutil.copy2(new, target, follow_symlinks=False)


def _put(new: Path, target: Path) -> None:
    """Give `target` the content of `new`, in a file of its own: the old one may be a link into the source."""
    if not new.exists():
        target.unlink(missing_ok=True)
    elif not target.exists() or target.read_bytes() != new.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(new, target)


def _recorded(tree: Path) -> frozenset[str]:
    try:
        return frozenset((tree / _RECORD).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return frozenset()


def _record(tree: Path, names: Iterable[str]) -> None:
    (tree / _RECORD).write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
