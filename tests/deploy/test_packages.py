"""The wheel and the sdist as people get them: built, and the wheel installed where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotpin import __version__
from slotpin.llama.series import choose
from tests.real.client import fetch
from tests.support.processes import wait_until
from tests.support.program import DEADLINE, TOP


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", TOP / "constraints.txt", wheel]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=clean(folder.parent))
    assert done.returncode == 0, done.stderr
    return folder


def clean(home: Path) -> dict[str, str]:
    """Nothing of the developer's but how pip reaches its registry."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_CONSTRAINT"}
    return {"PATH": os.defpath, "HOME": str(home)} | pip


def tracked() -> Iterator[str]:
    listed = subprocess.run(["git", "-C", str(TOP), "ls-files"], capture_output=True, text=True, check=True)
    return (name for name in listed.stdout.splitlines() if not name.startswith("."))


def test_the_sdist_has_all_files(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in tracked() if name not in names] == []


def test_the_wheel_has_all_of_the_package_and_the_man_page(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in tracked() if name.startswith("slotpin/") and name not in names] == []
    assert f"slotpin-{__version__}.data/data/share/man/man1/slotpin.1" in names
    assert "slotpin/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "slotpin",
        f"slotpin-{__version__}.data",
        f"slotpin-{__version__}.dist-info",
    }


def test_the_installed_program_knows_its_patches(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "bin/slotpin", "--version"], cwd=tmp_path, env=clean(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"slotpin {__version__}\nllama.cpp ")
    assert f"+slotpin.{choose('all').digest}," in done.stdout
    assert (installed / "share/man/man1/slotpin.1").is_file()


def test_the_installed_program_serves(installed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [installed / "bin/slotpin", "serve", "--port", "0"], cwd=tmp_path, env=clean(tmp_path), stdout=file
        )
    try:
        wait_until(lambda: "listens on http://" in output.read_text(), "it says where it listens", DEADLINE)
        url = output.read_text().split("listens on ")[1].split()[0]
        assert fetch(f"{url}/slotpin/health").status == 200
    finally:
        process.kill()
        process.wait()


def test_what_it_runs_at_run_time_is_among_its_dependencies(installed: Path) -> None:
    """pipx and uv make environments without pip, and `slotpin build` downloads with it."""
    metadata = next((installed / "lib").glob("python*/site-packages/slotpin-*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: pip" in metadata
