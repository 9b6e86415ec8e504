from __future__ import annotations

from pathlib import Path

import pytest

from slotpin import __version__
from tests.support.program import run

COMMANDS = [
    (),
    ("serve",),
    ("up",),
    ("build",),
    ("doctor",),
    ("verify",),
    ("status",),
    ("top",),
    ("explain",),
    ("pi",),
    ("pi", "setup"),
    ("pi", "remove"),
    ("config",),
    ("config", "check"),
    ("config", "show"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(" ".join(("usage: slotpin", *words)))
    assert done.stderr == ""


def test_help_names_every_command(tmp_path: Path) -> None:
    text = run(tmp_path, "--help").stdout
    assert all(f"\n    {words[0]} " in text for words in COMMANDS if words)


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"slotpin {__version__}\n", "")
