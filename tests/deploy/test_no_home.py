"""A user id that no file knows and that has no home, as containers have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.program import DEADLINE, command, environment

UNSHARE = ("unshare", "--user", "--map-user=12345")


def run_without_home(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in environment(folder).items() if name in ("PATH", "PYTHONPATH")}
    return subprocess.run(
        [*UNSHARE, *command(*arguments)], cwd=folder, env=kept, capture_output=True, text=True, timeout=DEADLINE
    )


@pytest.fixture(autouse=True)
def _possible() -> None:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody take another user id")


def test_no_home_is_needed(tmp_path: Path) -> None:
    for arguments in (("config", "show"), ("--version",)):
        done = run_without_home(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_needs_a_cache_says_so(tmp_path: Path) -> None:
    done = run_without_home(tmp_path, "build")
    assert done.returncode == 2
    assert done.stderr == "slotpin: this user has no home folder for the cache; set SLOTPIN_CACHE_DIR\n"
