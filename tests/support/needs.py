"""Programs that a test can't do without."""

from __future__ import annotations

import pytest

from tests.support.debian import DebianProgram, UnavailableError, debian_program


def needed(program: str, *packages: str) -> DebianProgram:
    """The program; where it is not installed and there is no apt to get it with, the test is skipped and says so."""
    try:
        return debian_program(program, *packages)
    except UnavailableError as problem:
        pytest.skip(str(problem))
