"""Programs of Debian packages without root: from PATH, else unpacked into the cache folder by the machine's own apt.

    nginx = debian_program("nginx")
    subprocess.Popen([nginx.path, …], env=os.environ | nginx.environment)

`python -m tests.support.debian PROGRAM [PACKAGE …]` prints where one is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from slotpin.llama.cache import cache_dir, locked, publish

# Daemons lie where a user's PATH often does not lead.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_SYSTEM_LISTS = Path("/var/lib/apt/lists")


class UnavailableError(Exception):
    """The program is not here and can't be had; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class DebianProgram:
    """`environment`: variables that it needs on top of one's own. `root`: where its packages are unpacked; None where
    the program is the machine's own."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None


@cache
def debian_program(program: str, *packages: str) -> DebianProgram:
    """The program, of the packages that it needs; they default to the one that is called as it is.

    Raises UnavailableError.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS])
    if (found := shutil.which(program, path=search)) is not None:
        return DebianProgram(Path(found))
    return unpacked_program(program, *packages)


def unpacked_program(program: str, *packages: str) -> DebianProgram:
    """The same, also where the machine has it."""
    root = _unpacked(packages or (program,))
    for folder in ("usr/bin", "usr/sbin", "bin", "sbin", f"usr/lib/{program}", f"usr/libexec/{program}"):
        path = root / folder / program
        if path.is_file() and _is_binary(path):  # what stands in PATH may be a script with paths of an installation
            return DebianProgram(path, _environment(root), root)
    raise UnavailableError(f"there is no program {program} in the Debian packages {' '.join(packages or (program,))}")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _environment(root: Path) -> dict[str, str]:
    libraries = sorted({path.parent for path in root.glob("**/lib/**/lib*.so*") if path.is_file()})
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": os.pathsep.join([*(str(root / folder) for folder in ("usr/bin", "usr/sbin")), os.environ["PATH"]]),
    }
    if (root / "etc/fonts").is_dir():
        environment |= {"FONTCONFIG_PATH": str(root / "etc/fonts"), "XDG_DATA_HOME": str(root / "usr/share")}
    return environment


def _unpacked(packages: Sequence[str]) -> Path:
    """A folder with the files of these packages and of all that they depend on and that is not installed."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError(f"{' '.join(packages)}: not in PATH, and this machine has no apt-get to get it with")
    home = cache_dir() / "debian"
    with locked("debian", print):
        (home / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        options = _options(home, packages)
        files = sorted(_file_names(options, packages))
        key = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
        root = home / f"{packages[0]}-{key}"
        if not root.is_dir():
            _run("apt-get", *options, "install", "--reinstall", "--download-only", *packages)
            with publish(root) as staging:
                for file in files:
                    _run("dpkg-deb", "--extract", str(home / "archives" / file), str(staging))
            shutil.rmtree(home / "archives")
    return root


def _options(home: Path, packages: Sequence[str]) -> list[str]:
    """Options of apt-get with which it writes into `home` alone. The lists of packages are the machine's own, or new
    ones where those don't know the packages."""
    common = ["--yes", "--no-install-recommends", "-o", f"Dir::Cache={home}", "-o", "Debug::NoLocking=true"]
    if os.getuid() == 0:
        common += ["-o", "APT::Sandbox::User=root"]  # its own user may not write there
    for lists in (_SYSTEM_LISTS, home / "lists"):
        options = [*common, "-o", f"Dir::State::lists={lists}/"]
        if lists.is_dir() and _knows(options, packages):
            return options
    (home / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    _run("apt-get", *options, "update")
    return options


def _knows(options: Sequence[str], packages: Sequence[str]) -> bool:
    command = ["apt-get", *options, "install", "--print-uris", "--quiet=2", *packages]
    return subprocess.run(command, capture_output=True).returncode == 0


def _file_names(options: Sequence[str], packages: Sequence[str]) -> list[str]:
    """With their versions. A line says: 'URI' file size hash."""
    lines = _run("apt-get", *options, "install", "--reinstall", "--print-uris", "--quiet=2", *packages).splitlines()
    return [line.split()[1] for line in lines if line.startswith("'")]


def _run(*command: str) -> str:
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg-deb:"))]
        raise UnavailableError(f"{command[0]} {command[-1]}: {said[0] if said else 'it said nothing'}")
    return done.stdout


if __name__ == "__main__":
    found = debian_program(*sys.argv[1:])
    print(found.path, *(f"{name}={value}" for name, value in found.environment.items()))
