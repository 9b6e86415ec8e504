"""What a shell needs to complete slotpin's command line: a script, made once from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

SHELLS = ("bash", "zsh")
# What shtab calls these.
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Every option that takes a path completes files."""
    import shtab  # a slotpin that serves has no use for it

    for action in _actions(parser):
        if action.type is Path:
            action.complete = _FILES  # type: ignore[attr-defined]
    return f"{shtab.complete(parser, shell)}\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                yield from _actions(inner)
        else:
            yield action
