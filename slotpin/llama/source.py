"""The llama.cpp tree to build: the one inside a pinned Python sdist, or the user's own checkout."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotpin.errors import UserError
from slotpin.llama.cache import Report, cache_dir, locked, publish
from slotpin.llama.packages import Package, fetch, sha256

SDIST = Package(
    name="llama-cpp-python",
    version="0.3.36",
    filename="llama_cpp_python-0.3.36.tar.gz",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
TREE_IN_SDIST = "llama_cpp_python-0.3.36/vendor/llama.cpp/"


@dataclass(frozen=True, slots=True)
class Source:
    """A llama.cpp tree."""

    tree: Path
    name: str
    """For people: what it is and which version."""
    key: str
    """Changes with every change of content."""
    objects: str
    """What compiled objects may be shared by: an edited checkout keeps its own, so that it builds incrementally."""
    owned: bool
    """The tree is ours, in the cache, and can be fetched."""


def find_source(directory: Path | None) -> Source:
    """The user's checkout in `directory`, or with None the packaged source, which may not be downloaded yet.

    Raises UserError where `directory` holds no llama.cpp.
    """
    return _packaged() if directory is None else _checkout(directory)


def ensure_tree(source: Source, report: Report) -> Path:
    """`source.tree`, downloaded and unpacked first if it is ours and not there."""
    if source.owned and not source.tree.is_dir():
        with locked("source", report):
            if not source.tree.is_dir():
                _download(source.tree, report)
    return source.tree


def file_names(source: Source) -> list[str]:
    """The files of `source.tree`, relative to its top; of a git checkout those that git tracks or does not ignore."""
    if not source.owned:
        try:
            listed = _git(source.tree, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        except (OSError, subprocess.CalledProcessError):
            pass
        else:
            names = {os.fsdecode(name) for name in listed.split(b"\0") if name}
            return sorted(name for name in names if os.path.lexists(source.tree / name))
    return [path.relative_to(source.tree).as_posix() for path in _walk(source.tree)]


def _packaged() -> Source:
    name = f"{SDIST.name}-{SDIST.version}"
    tree = cache_dir() / "sources" / f"{name}-{SDIST.sha256[:12]}"
    return Source(tree=tree, name=name, key=SDIST.sha256, objects=SDIST.sha256, owned=True)


def _download(tree: Path, report: Report) -> None:
    report(f"downloading the llama.cpp source ({SDIST}, 77 MB)")
    archive = fetch(SDIST, cache_dir() / "downloads", "or give a llama.cpp checkout with --source DIR")
    report("unpacking it")
    with publish(tree) as staging:
        unpack(archive, TREE_IN_SDIST, staging)
    archive.unlink()


def unpack(archive: Path, prefix: str, target: Path) -> None:
    """Unpack what lies under `prefix` in a tar archive into `target`.

    llama.cpp's `.git` is left out: it is a submodule's pointer into a repository that isn't there.
    """
    with tarfile.open(archive) as tar:
        # Python 3.11.0 to 3.11.3 have no filters; the archive's hash is pinned in any case.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(target, members=_under(tar, prefix))


def _under(tar: tarfile.TarFile, prefix: str) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        name = member.name.removeprefix(prefix)
        if name != member.name and name != ".git":
            member.name = name
            yield member


def _checkout(directory: Path) -> Source:
    tree = directory.expanduser().resolve()
    for wanted in ("CMakeLists.txt", "tools/server"):
        if not (tree / wanted).exists():
            raise UserError(f"--source {directory}: no {wanted} there; give the top folder of a llama.cpp checkout")
    key = _git_digest(tree) or tree_digest(tree)
    return Source(tree=tree, name=str(tree), key=key, objects=str(tree), owned=False)


def _git_digest(tree: Path) -> str | None:
    """Digest of HEAD, the changes against it and the untracked files; None if `tree` is no repository's top."""
    try:
        if Path(os.fsdecode(_git(tree, "rev-parse", "--show-toplevel").rstrip(b"\n"))).resolve() != tree:
            return None
        head = _git(tree, "rev-parse", "HEAD")
        changes = _git(tree, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        untracked = _git(tree, "ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError):
        return None
    digest = hashlib.sha256(head + changes)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        _add_file(digest, name, tree / os.fsdecode(name))
    return digest.hexdigest()


def _git(tree: Path, *arguments: str) -> bytes:
    # Without optional locks git doesn't rewrite the index, so the checkout stays as it is.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, env=environment).stdout


def tree_digest(tree: Path) -> str:
    """Digest of all files' paths and contents under `tree`, `.git` left out."""
    digest = hashlib.sha256()
    for path in _walk(tree):
        _add_file(digest, os.fsencode(path.relative_to(tree)), path)
    return digest.hexdigest()


def _walk(tree: Path) -> Iterator[Path]:
    """All files under `tree`, always in the same order, `.git` left out."""
    for folder, folders, files in os.walk(tree):
        folders[:] = sorted(name for name in folders if name != ".git")
        yield from (Path(folder, name) for name in sorted(files))


def _add_file(digest: hashlib._Hash, name: bytes, path: Path) -> None:
    if path.is_symlink():
        content = os.fsencode(path.readlink())
    elif path.is_file():
        content = sha256(path).encode()
    else:
        content = b"-"
    digest.update(name + b"\0" + content + b"\0")
