"""Work on the llama.cpp patch series as commits.

    python tools/llama_patches.py tree DIR     a git repository in DIR: the packaged source, then one commit a patch
    python tools/llama_patches.py write DIR    the commits of DIR after the first one, written back as the series

A patch keeps the file name that it has in the series; a new one is called after its subject.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slotpin.llama.series import FOLDER, choose, patch_name
from slotpin.llama.source import ensure_tree, find_source

PACKAGED = "llama.cpp as packaged"
AUTHOR = ("-c", "user.name=slotpin", "-c", "user.email=slotpin@users.noreply.invalid")


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *AUTHOR, *arguments], check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout


def make_tree(tree: Path) -> None:
    if tree.exists():
        raise SystemExit(f"{tree} is there already; name a folder that is not")
    source = ensure_tree(find_source(None), lambda line: print(line, file=sys.stderr))
    shutil.copytree(source, tree, symlinks=True)
    git(tree, "init", "--quiet", "--initial-branch", "slotpin")
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--message", PACKAGED)
    for patch in choose("all").patches:
        git(tree, "am", "--quiet", str(patch))
        print(f"applied {patch.name}")


def write_series(tree: Path) -> None:
    first = first_commit(tree)
    if git(tree, "status", "--porcelain"):
        raise SystemExit(f"{tree} has changes that are not committed; commit or drop them first")
    with tempfile.TemporaryDirectory() as folder:
        form = ("--zero-commit", "--no-signature", "--no-numbered", "--unified=2", "--output-directory", folder)
        git(tree, "format-patch", *form, f"{first}..HEAD")
        names = {subject(patch): patch_name(patch) for patch in choose("all").patches}
        written = {}
        for patch in sorted(Path(folder).iterdir()):
            name = names.get(subject(patch), patch_name(patch))
            written[f"{patch.name[:4]}-{name}.patch"] = patch.read_text(encoding="utf-8")
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    for patch in FOLDER.glob("*.patch"):
        if patch.name not in written:
            patch.unlink()
            print(f"removed {patch.name}")


def first_commit(tree: Path) -> str:
    """Of a tree that `make_tree` has made: another repository's commits are no series."""
    try:
        top = git(tree, "rev-parse", "--show-toplevel").strip()
        first = git(tree, "rev-list", "--max-parents=0", "HEAD").strip()
        subject = git(tree, "show", "--no-patch", "--format=%s", first).strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        raise SystemExit(f"{tree} is no git repository; make one with: llama_patches.py tree {tree}") from None
    if Path(top).resolve() != tree.resolve() or subject != PACKAGED:
        raise SystemExit(f"{tree} was not made by: llama_patches.py tree {tree}")
    return first


def subject(patch: Path) -> str:
    """The first line of the commit message; git folds a long one."""
    found = re.search(r"^Subject: \[PATCH\] (.+(?:\n .+)*)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{patch} is not in git's format-patch form")
    return " ".join(found[1].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("tree", "write"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.command == "tree":
        make_tree(options.folder)
    else:
        write_series(options.folder)


if __name__ == "__main__":
    main()
