"""Files from the Python package registry, by name, version and hash, with the interpreter's own pip."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slotpin.errors import UserError


@dataclass(frozen=True, slots=True)
class Package:
    """One file of one release: an sdist or a wheel."""

    name: str
    version: str
    filename: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def fetch(package: Package, folder: Path, remedy: str) -> Path:
    """The package's file in `folder`, downloaded unless it lies there already.

    Nothing is installed. For an sdist pip runs the build backend's metadata step (some seconds), not the build.
    Raises UserError (exit 1) that ends with `remedy`.
    """
    path = folder / package.filename
    if path.is_file() and sha256(path) == package.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    _pip_download(package, folder, remedy)
    if not path.is_file() or sha256(path) != package.sha256:
        path.unlink(missing_ok=True)
        raise UserError(f"pip downloaded another file than {package.filename} of {package}; {remedy}", exit_code=1)
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(package: Package, folder: Path, remedy: str) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"cannot download {package}: {sys.executable} has no pip (try: {sys.executable} -m ensurepip); {remedy}",
            exit_code=1,
        )
    form = "--only-binary" if package.filename.endswith(".whl") else "--no-binary"
    with tempfile.TemporaryDirectory(prefix="slotpin-") as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--quiet"]
        command += ["--no-deps", form, package.name, "--dest", str(folder), "-r", str(requirements)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise UserError(
            f"cannot download {package} with {sys.executable} -m pip: {_last_error(done.stderr)}; {remedy}", exit_code=1
        )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # "ERROR: Exception:" heads a traceback, whose last line tells more.
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    last = (errors or lines or ["pip said nothing"])[-1]
    return last.removeprefix("ERROR:").strip().rstrip(".")
