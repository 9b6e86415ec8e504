"""The patch series: which patches there are, what they are called, and whether they apply."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from slotpin.errors import UserError

FOLDER = Path(__file__).parent / "patches"
# The lazy cache needs the buffer type that comes before it.
GROUPS = {"lazy-kv": ("lazy-buffer", "lazy-kv")}


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they are applied; empty for the stock source."""

    patches: tuple[Path, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits that change with the content of any patch; empty for no patches."""
        if not self.patches:
            return ""
        content = hashlib.sha256()
        for patch in self.patches:
            content.update(patch.read_bytes())
        return content.hexdigest()[:12]

    @cached_property
    def touched(self) -> frozenset[str]:
        """The files that the patches change, add or remove, relative to the top of the tree."""
        text = "\n".join(patch.read_text(encoding="utf-8") for patch in self.patches)
        return frozenset(re.findall(r"^diff --git a/\S+ b/(\S+)$", text, re.MULTILINE))

    def stamp(self, source: str) -> str:
        """What a server that is built from a source of this name calls itself."""
        return f"{source}+slotpin.{self.digest}" if self.patches else source

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(patch_name(patch) for patch in self.patches)


def patch_name(patch: Path) -> str:
    """`0003-busy-slot.patch` is `busy-slot`."""
    return re.sub(r"^\d+-", "", patch.stem)


def choose(text: str) -> Series:
    """`all`, `none`, or names of patches and groups with commas between them. Raises UserError."""
    available = {patch_name(patch): patch for patch in sorted(FOLDER.glob("*.patch"))}
    if text == "all":
        return Series(tuple(available.values()))
    if text == "none":
        return Series()
    wanted: set[str] = set()
    for word in text.split(","):
        members = GROUPS.get(word, (word,))
        if unknown := [name for name in members if name not in available]:
            raise UserError(f"--patches {text}: no patch {unknown[0]!r}; use all, none, or {', '.join(available)}")
        wanted.update(members)
    return Series(tuple(patch for name, patch in available.items() if name in wanted))


@cache
def _all_digest() -> str:
    return choose("all").digest


def is_patched(build_info: str) -> bool:
    """Whether a server that says this in `/props` was built with all of this slotpin's patches."""
    return bool(_all_digest()) and build_info.endswith(f"+slotpin.{_all_digest()}")


def check(series: Series, source: Path) -> None:
    """Apply without keeping anything. Raises UserError (exit 1) that names the patch, the file and the hunk."""
    with tempfile.TemporaryDirectory() as folder:
        apply(series, source, Path(folder))


def apply(series: Series, source: Path, folder: Path) -> None:
    """Put the touched files of `source` into `folder`, an empty one, patched. Raises UserError as `check` does."""
    for name in series.touched:
        if (source / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    for patch in series.patches:
        # A repository around the folder must not make git skip what is not in it.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        done = subprocess.run(
            ["git", "apply", "--verbose", str(patch)], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise UserError(f"{patch.name} does not apply: {_failure(done.stderr)}", exit_code=1)


def _failure(stderr: str) -> str:
    """File and hunk from git's words, `error: patch failed: src/llama.cpp:120`."""
    errors = re.findall(r"^error: (.+)$", stderr, re.MULTILINE)
    place = re.search(r"^error: patch failed: (.+):(\d+)$", stderr, re.MULTILINE)
    if place:
        return f"{place[1]}, the hunk at line {place[2]}"
    return errors[0] if errors else "git apply failed"
