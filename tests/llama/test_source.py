from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama.source import find_source, tree_digest, unpack


def make_checkout(folder: Path) -> Path:
    (folder / "tools/server").mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text("project(llama)\n")
    (folder / "tools/server/server.cpp").write_text("int main() {}\n")
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def commit_all(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--message", "change", "--allow-empty")


def edit(checkout: Path) -> None:
    (checkout / "tools/server/server.cpp").write_text("int main() { return 1; }\n")


def add_untracked(checkout: Path) -> None:
    (checkout / "new.cpp").write_text("new\n")


def remove(checkout: Path) -> None:
    (checkout / "tools/server/server.cpp").unlink()


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("change", [edit, add_untracked, remove])
def test_the_key_of_a_checkout_changes_with_its_files(
    tmp_path: Path, in_git: bool, change: Callable[[Path], None]
) -> None:
    checkout = make_checkout(tmp_path)
    if in_git:
        git(checkout, "init")
        commit_all(checkout)
    before = find_source(checkout)
    assert find_source(checkout) == before
    change(checkout)
    after = find_source(checkout)
    assert after.key != before.key
    assert after.objects == before.objects


def test_untracked_content_counts(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    git(checkout, "init")
    commit_all(checkout)
    add_untracked(checkout)
    before = find_source(checkout).key
    (checkout / "new.cpp").write_text("newer\n")
    assert find_source(checkout).key != before


def test_the_key_changes_with_a_commit_but_not_with_ignored_files(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    git(checkout, "init")
    (checkout / ".gitignore").write_text("build/\n")
    commit_all(checkout)
    before = find_source(checkout).key
    (checkout / "build").mkdir()
    (checkout / "build/object.o").write_text("object")
    assert find_source(checkout).key == before
    commit_all(checkout)
    assert find_source(checkout).key != before


def test_finding_the_key_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    git(checkout, "init")
    commit_all(checkout)
    (checkout / "CMakeLists.txt").touch()  # git would refresh its index now
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    find_source(checkout)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_a_folder_inside_another_repository_is_keyed_by_its_own_files(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("vendor/\n")
    checkout = make_checkout(tmp_path / "vendor/llama.cpp")
    commit_all(tmp_path)
    assert find_source(checkout).key == tree_digest(checkout)
    before = find_source(checkout).key
    edit(checkout)
    assert find_source(checkout).key != before


@pytest.mark.parametrize("missing", ["CMakeLists.txt", "tools/server"])
def test_a_source_without_llama_cpp_is_a_users_error(tmp_path: Path, missing: str) -> None:
    checkout = make_checkout(tmp_path)
    (checkout / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"no {missing} there") as caught:
        find_source(checkout)
    assert caught.value.exit_code == 2


def test_the_packaged_source_is_found_without_a_download(cache: Path) -> None:
    source = find_source(None)
    assert source.name == "llama-cpp-python-0.3.36"
    assert source.tree.is_relative_to(cache)
    assert not cache.exists()


def test_only_the_tree_is_unpacked_and_its_git_pointer_is_left_out(tmp_path: Path) -> None:
    names = [
        "top/README",
        "top/vendor/llama.cpp/.git",
        "top/vendor/llama.cpp/src/a.cpp",
        "top/vendor/llama.cpp/.gitignore",
    ]
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))
    target = tmp_path / "tree"
    unpack(tmp_path / "sdist.tar.gz", "top/vendor/llama.cpp/", target)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == [".gitignore", "src/a.cpp"]


def test_a_member_that_leaves_the_tree_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "sdist.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("top/../../outside"), io.BytesIO())
    with pytest.raises(tarfile.FilterError):
        unpack(tmp_path / "sdist.tar", "top/", tmp_path / "tree")
