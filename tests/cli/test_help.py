from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slotpin import __version__
from slotpin.llama.series import choose
from slotpin.llama.source import find_source
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
    ("completion",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(" ".join(("usage: slotpin", *words)))
    assert done.stderr == ""


def test_help_names_every_command(tmp_path: Path) -> None:
    text = run(tmp_path, "--help").stdout
    named = set(re.findall(r"^    ([a-z]+)(?:  |$)", text, re.MULTILINE))
    assert named == {words[0] for words in COMMANDS if words}


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    source = find_source(None)
    origin = f"{source.name}+slotpin.{choose('all').digest}, source SHA-256 {source.key[:12]}"
    assert done.stdout.splitlines() == [f"slotpin {__version__}", f"llama.cpp {origin}"]
    assert (done.returncode, done.stderr) == (0, "")


BASH = """
. /dev/stdin
complete_as() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_slotpin; echo "${COMPREPLY[*]}"; }
complete_as slotpin se
complete_as slotpin pi set
complete_as slotpin serve --up
complete_as slotpin up --model mod
"""


def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    script = run(tmp_path, "completion", "bash").stdout
    done = subprocess.run(["bash", "-c", BASH], input=script, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["serve", "setup", "--upstream", "model.gguf"], "")


def test_zsh_gets_its_own_script(tmp_path: Path) -> None:
    assert run(tmp_path, "completion", "zsh").stdout.startswith("#compdef slotpin\n")


def test_a_shell_that_is_not_known(tmp_path: Path) -> None:
    done = run(tmp_path, "completion", "ksh")
    assert done.returncode == 2
    assert "choose from" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_a_closed_output_is_no_error(tmp_path: Path, closed: str) -> None:
    line = f'exec "$0" -m slotpin --version {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_an_output_without_room_is_said_in_a_line(tmp_path: Path) -> None:
    line = 'exec "$0" -m slotpin --version > /dev/full'
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "slotpin: the output can't be written: No space left on device\n"
