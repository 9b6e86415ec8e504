"""The patch series on a few-line tree: choosing, applying, laying out, and builds that share their objects."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama import series
from slotpin.llama.build import BuildOptions, build_server, check_patches
from slotpin.llama.series import Series, apply, check, choose
from slotpin.llama.source import tree_digest
from slotpin.llama.tree import lay_out

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(tiny CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(llama-server tools/server/server.cpp tools/server/other.cpp)
target_compile_definitions(llama-server PRIVATE COMMIT="${LLAMA_BUILD_COMMIT}")
"""
SERVER = """#include <cstdio>
int other();

int main() {
    std::printf("%s %s", "one", COMMIT);
    return other();
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = tmp_path / "llama.cpp"
    (tree / "tools/server").mkdir(parents=True)
    (tree / "CMakeLists.txt").write_text(CMAKE)
    (tree / "tools/server/server.cpp").write_text(SERVER)
    (tree / "tools/server/other.cpp").write_text("int other() {\n    return 0;\n}\n")
    return tree


@pytest.fixture
def patches(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three patches in the order of their numbers; the last one adds a file and needs the first."""
    folder = tmp_path / "patches"
    folder.mkdir()
    steps = [
        ("0001-two", {"tools/server/server.cpp": SERVER.replace('"one"', '"two"')}),
        ("0002-other", {"tools/server/other.cpp": "int other() {\n    return 0; // still\n}\n"}),
        ("0003-added", {"tools/server/server.cpp": SERVER.replace('"one"', '"three"'), "docs/added.md": "new\n"}),
    ]
    work = tmp_path / "work"
    subprocess.run(["cp", "-r", str(source), str(work)], check=True)
    git = ["git", "-C", str(work), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name, files in [("base", {}), *steps]:
        for path, text in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        if files:
            diff = subprocess.run([*git, "format-patch", "-1", "--stdout"], check=True, capture_output=True).stdout
            (folder / f"{name}.patch").write_bytes(diff)
    monkeypatch.setattr(series, "FOLDER", folder)
    monkeypatch.setattr(series, "GROUPS", {"both": ("two", "added")})
    return folder


def server_text(tree: Path) -> str:
    return (tree / "tools/server/server.cpp").read_text()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", ("two", "other", "added")),
        ("none", ()),
        ("other", ("other",)),
        ("added,two", ("two", "added")),
        ("both", ("two", "added")),
        ("other,both", ("two", "other", "added")),
    ],
)
def test_patches_are_chosen_by_name_and_kept_in_order(patches: Path, text: str, names: tuple[str, ...]) -> None:
    assert choose(text).names == names


@pytest.mark.parametrize("text", ["", "nothing", "two,", "All"])
def test_an_unknown_name_is_said_with_those_that_there_are(patches: Path, text: str) -> None:
    with pytest.raises(UserError, match="use all, none, or two, other, added"):
        choose(text)


def test_the_digest_changes_with_choice_order_and_content(patches: Path) -> None:
    chosen = [choose(text).digest for text in ("none", "two", "other", "all")]
    reverse = Series(tuple(reversed(choose("all").patches))).digest
    (patches / "0002-other.patch").write_text((patches / "0002-other.patch").read_text() + "\n")
    assert len({*chosen, reverse, choose("all").digest}) == 6
    assert chosen[0] == ""


def test_apply_gives_the_touched_files_only(patches: Path, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    apply(choose("all"), source, target)
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert names == ["docs/added.md", "tools/server/other.cpp", "tools/server/server.cpp"]
    assert '"three"' in server_text(target)
    assert '"one"' in server_text(source)


def test_a_hunk_that_does_not_apply_is_named(patches: Path, source: Path) -> None:
    (source / "tools/server/server.cpp").write_text(SERVER.replace('"one"', '"another"'))
    before = tree_digest(source)
    with pytest.raises(UserError) as caught:
        check(choose("all"), source)
    assert str(caught.value) == "0001-two.patch does not apply: tools/server/server.cpp, the hunk at line 2"
    assert caught.value.exit_code == 1
    assert tree_digest(source) == before


def test_a_missing_file_is_named(patches: Path, source: Path) -> None:
    (source / "tools/server/other.cpp").unlink()
    with pytest.raises(UserError, match=r"0002-other\.patch does not apply: .*tools/server/other\.cpp"):
        check(choose("all"), source)


@pytest.mark.parametrize("link", [True, False])
def test_a_tree_becomes_what_is_asked_for_and_nothing_else_is_written(
    patches: Path, source: Path, tmp_path: Path, link: bool
) -> None:
    tree = tmp_path / "tree"
    names = ["CMakeLists.txt", "tools/server/server.cpp", "tools/server/other.cpp"]
    before = tree_digest(source)
    texts = []
    for choice in ("none", "all", "two", "none", "all"):
        kept = (tree / "CMakeLists.txt").stat() if tree.exists() else None
        lay_out(choose(choice), source, names, tree, link=link)
        texts.append((server_text(tree).split('"')[3], (tree / "docs/added.md").exists()))
        assert kept is None or (tree / "CMakeLists.txt").stat() == kept
    assert texts == [("one", False), ("three", True), ("two", False), ("one", False), ("three", True)]
    assert tree_digest(source) == before


def test_laying_out_again_writes_nothing(patches: Path, source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = ["CMakeLists.txt", "tools/server/server.cpp", "tools/server/other.cpp"]
    lay_out(choose("all"), source, names, tree, link=True)
    files = [path for path in tree.rglob("*") if path.is_file() and not path.name.startswith(".")]
    before = [path.stat() for path in files]
    lay_out(choose("all"), source, names, tree, link=True)
    assert [path.stat() for path in files] == before


def test_a_tree_follows_its_source(patches: Path, source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    lay_out(choose("none"), source, ["CMakeLists.txt", "tools/server/other.cpp"], tree, link=False)
    (source / "CMakeLists.txt").write_text(CMAKE + "# more\n")
    lay_out(choose("none"), source, ["CMakeLists.txt"], tree, link=False)
    assert (tree / "CMakeLists.txt").read_text().endswith("# more\n")
    assert not (tree / "tools/server/other.cpp").exists()


def test_a_killed_run_is_put_right(patches: Path, source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = ["CMakeLists.txt", "tools/server/server.cpp", "tools/server/other.cpp"]
    lay_out(choose("all"), source, names, tree, link=True)
    (tree / "tools/server/other.cpp").write_text("half writ")
    lay_out(choose("none"), source, names, tree, link=True)
    assert (tree / "tools/server/other.cpp").read_bytes() == (source / "tools/server/other.cpp").read_bytes()


def test_stock_and_patched_share_their_objects(patches: Path, source: Path, cache: Path) -> None:
    subprocess.run(["git", "-C", str(source), "init", "-q"], check=True)
    before = tree_digest(source)
    patched = build_server(BuildOptions(source=source, patches="two"), print)
    more = build_server(BuildOptions(source=source, patches="both"), print)
    assert run(patched.path).startswith("two ")
    assert run(more.path).startswith("three ")
    assert len(list((cache / "builds").iterdir())) == 1
    assert tree_digest(source) == before
    assert build_server(BuildOptions(source=source, patches="two"), pytest.fail).path == patched.path


def test_a_patched_server_says_which_series_it_has(patches: Path, source: Path, cache: Path) -> None:
    built = build_server(BuildOptions(source=source, patches="two"), print)
    assert run(built.path).endswith(f"+slotpin.{choose('two').digest}")


def test_a_source_that_the_patches_do_not_fit_leaves_the_cache_alone(patches: Path, source: Path, cache: Path) -> None:
    (source / "tools/server/server.cpp").write_text(SERVER.replace('"one"', '"another"'))
    with pytest.raises(UserError, match=r"0001-two\.patch does not apply"):
        build_server(BuildOptions(source=source), print)
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_check_builds_nothing(patches: Path, source: Path, cache: Path) -> None:
    assert check_patches(BuildOptions(source=source), print).names == ("two", "other", "added")
    assert not cache.exists()


def run(server: Path) -> str:
    return subprocess.run([os.fspath(server)], capture_output=True, text=True, check=True).stdout
