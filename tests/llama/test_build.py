"""Builds of a few-line project that looks like llama.cpp to slotpin, with the real cmake and compiler."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama.build import BuildOptions, build_server, compiler_identity, server_key, telling_error
from slotpin.llama.series import Series
from slotpin.llama.source import find_source, tree_digest
from tests.support.llama import stock_binary
from tests.support.processes import is_alive, start_python, wait_until

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(GREETING "hello" CACHE STRING "")
add_executable(llama-server tools/server/server.cpp)
target_compile_definitions(llama-server PRIVATE GREETING="${GREETING}")
"""

SERVER = """
#include <cstdio>
int main() { std::puts(GREETING); }
"""

# A source file that the program needs and a script generates, which waits for a file to appear.
SLOW_CMAKE = """
add_custom_command(OUTPUT slow.cpp COMMAND sh ${CMAKE_SOURCE_DIR}/slow.sh slow.cpp)
target_sources(llama-server PRIVATE slow.cpp)
"""

SLOW_SCRIPT = """
echo $$ > "$SLOW_DIR/pid"
while [ ! -e "$SLOW_DIR/go" ]; do sleep 0.05; done
echo "int slow = 0;" > "$1"
"""

SLOW_SERVER = """
#include <cstdio>
extern int slow;
int main() { std::puts(GREETING); return slow; }
"""

BUILD = """
import pathlib, sys
from slotpin.llama.build import BuildOptions, build_server
build_server(BuildOptions(patches="none", source=pathlib.Path(sys.argv[1])), lambda line: None)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    (folder / "tools/server").mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "tools/server/server.cpp").write_text(SERVER)
    return folder


@pytest.fixture
def slow_checkout(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its build stops in the middle until `$SLOW_DIR/go` exists."""
    (checkout / "CMakeLists.txt").write_text(CMAKE + SLOW_CMAKE)
    (checkout / "tools/server/server.cpp").write_text(SLOW_SERVER)
    (checkout / "slow.sh").write_text(SLOW_SCRIPT)
    monkeypatch.setenv("SLOW_DIR", str(tmp_path))
    return checkout


def run(server: Path) -> str:
    return subprocess.run([server], capture_output=True, text=True, check=True).stdout.strip()


def test_it_builds_once_and_leaves_the_checkout_as_it_was(cache: Path, checkout: Path) -> None:
    before = tree_digest(checkout)
    first = build_server(BuildOptions(patches="none", source=checkout), print)
    assert run(first.path) == "hello"
    assert not first.cached
    assert first.path.is_relative_to(cache)
    assert tree_digest(checkout) == before
    second = build_server(BuildOptions(patches="none", source=checkout), pytest.fail)
    assert second == dataclasses.replace(first, cached=True)


def test_cmake_arguments_reach_the_build_and_get_a_server_of_their_own(cache: Path, checkout: Path) -> None:
    plain = build_server(BuildOptions(patches="none", source=checkout), print)
    other = build_server(BuildOptions(patches="none", source=checkout, cmake_args=("-DGREETING=bonjour",)), print)
    assert (run(plain.path), run(other.path)) == ("hello", "bonjour")


def test_an_edited_checkout_is_built_again_and_both_servers_stay(cache: Path, checkout: Path) -> None:
    before = build_server(BuildOptions(patches="none", source=checkout), print)
    (checkout / "tools/server/server.cpp").write_text(SERVER.replace("GREETING)", 'GREETING " again")'))
    after = build_server(BuildOptions(patches="none", source=checkout), print)
    assert (run(before.path), run(after.path)) == ("hello", "hello again")
    assert len(list((cache / "builds").iterdir())) == 1  # the second build was incremental


def test_another_generator_finds_the_same_server(cache: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_server(BuildOptions(patches="none", source=checkout), print)
    monkeypatch.setenv("CMAKE_GENERATOR", "Unix Makefiles")
    assert build_server(BuildOptions(patches="none", source=checkout), pytest.fail).path == first.path


@pytest.mark.parametrize("generator", ["Ninja", "Unix Makefiles"])
def test_a_build_that_was_killed_leaves_no_compiler_and_is_finished_by_the_next_run(
    cache: Path, slow_checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: str
) -> None:
    if shutil.which({"Ninja": "ninja", "Unix Makefiles": "make"}[generator]) is None:
        pytest.skip(f"no {generator} here")
    monkeypatch.setenv("CMAKE_GENERATOR", generator)
    stop_in_the_middle(slow_checkout, tmp_path, signal.SIGKILL)
    assert not (cache / "servers").exists()
    (objects,) = (cache / "builds").iterdir()
    (objects / "slow.cpp").write_text("")  # what a power failure leaves half written
    (tmp_path / "go").touch()
    assert run(build_server(BuildOptions(patches="none", source=slow_checkout), print).path) == "hello"


def test_an_interrupted_build_leaves_no_compiler(cache: Path, slow_checkout: Path, tmp_path: Path) -> None:
    stop_in_the_middle(slow_checkout, tmp_path, signal.SIGINT)
    (tmp_path / "go").touch()
    assert run(build_server(BuildOptions(patches="none", source=slow_checkout), print).path) == "hello"


def stop_in_the_middle(checkout: Path, slow_dir: Path, number: signal.Signals) -> None:
    """Build in a process of its own and send it a signal while the build's script waits; the script must end too."""
    pid_file = slow_dir / "pid"
    with start_python(BUILD, str(checkout)) as process:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the slow script runs")
        script = int(pid_file.read_text())
        assert is_alive(script)
        process.send_signal(number)
        process.wait()
    wait_until(lambda: not is_alive(script), "the build's script is gone")


def test_a_source_that_cmake_refuses_is_one_line_with_the_log(cache: Path, checkout: Path) -> None:
    (checkout / "CMakeLists.txt").write_text(CMAKE + 'message(FATAL_ERROR "no such backend")\n')
    error = expect_failure(checkout)
    assert error.startswith(
        "llama-server could not be configured: CMake Error at CMakeLists.txt:8 no such backend (log: "
    )


def test_a_source_that_does_not_compile_is_one_line_with_the_log(cache: Path, checkout: Path) -> None:
    (checkout / "tools/server/server.cpp").write_text("int main() { return nonsense; }\n")
    error = expect_failure(checkout)
    assert error.startswith("llama-server could not be built: ")
    assert "nonsense" in error
    (checkout / "tools/server/server.cpp").write_text(SERVER)
    assert run(build_server(BuildOptions(patches="none", source=checkout), print).path) == "hello"


def expect_failure(checkout: Path) -> str:
    with pytest.raises(UserError) as caught:
        build_server(BuildOptions(patches="none", source=checkout), print)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in message
    log = Path(message.rpartition("(log: ")[2].removesuffix(")"))
    assert "error" in log.read_text().lower()
    return message


def test_missing_tools_are_named_with_their_debian_package(
    cache: Path, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(UserError, match=r"no compiler found \(tried cc, gcc, clang\).*apt install build-essential"):
        build_server(BuildOptions(patches="none", source=checkout), print)
    for name in ("cc", "c++"):
        (tools / name).write_text("#!/bin/sh\necho compiler\n")
        (tools / name).chmod(0o755)
    with pytest.raises(UserError, match=r"no cmake found.*apt install cmake"):
        build_server(BuildOptions(patches="none", source=checkout), print)


def test_the_key_changes_with_each_input(checkout: Path, tmp_path: Path) -> None:
    patch = tmp_path / "0001-first.patch"
    patch.write_text("first")
    changed = tmp_path / "0001-changed.patch"
    changed.write_text("changed")
    source = find_source(checkout)
    keys = [
        server_key(source, Series(), ("-DA=1",), "gcc"),
        server_key(dataclasses.replace(source, key="other"), Series(), ("-DA=1",), "gcc"),
        server_key(source, Series((patch,)), ("-DA=1",), "gcc"),
        server_key(source, Series((changed,)), ("-DA=1",), "gcc"),
        server_key(source, Series((patch, changed)), ("-DA=1",), "gcc"),
        server_key(source, Series((changed, patch)), ("-DA=1",), "gcc"),
        server_key(source, Series(), ("-DA=2",), "gcc"),
        server_key(source, Series(), ("-DA=1", "-DB=1"), "gcc"),
        server_key(source, Series(), (), "-DA=1gcc"),
        server_key(source, Series(), ("-DA=1",), "clang"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == server_key(source, Series(), ("-DA=1",), "gcc")


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_another_compiler_or_other_flags_are_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    other = tmp_path / "compiler"
    other.write_text("#!/bin/sh\necho other\n")
    other.chmod(0o755)
    usual = compiler_identity(())
    by_option = compiler_identity((f"-DCMAKE_{'C' if variable == 'CC' else 'CXX'}_COMPILER:PATH={other}",))
    monkeypatch.setenv("CXXFLAGS", "-O1")
    by_flags = compiler_identity(())
    monkeypatch.delenv("CXXFLAGS")
    monkeypatch.setenv(variable, str(other))
    by_environment = compiler_identity(())
    assert by_option == by_environment
    assert len({usual, by_flags, by_environment}) == 3


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("[1/2] x\n/a.cpp:3:5: error: no\n/b.cpp:1:1: error: later\nninja: build stopped\n", "/a.cpp:3:5: error: no"),
        (
            "CMake Error at a/CMakeLists.txt:3 (message):\n\n  why\n\n-- Incomplete\n",
            "CMake Error at a/CMakeLists.txt:3 why",
        ),
        ("something\nlast words\n\n", "last words"),
        ("", "no output"),
    ],
)
def test_the_first_error_is_the_telling_one(output: str, error: str) -> None:
    assert telling_error(output) == error


def test_the_real_server_says_which_source_it_was_built_from() -> None:
    done = subprocess.run([stock_binary(), "--version"], capture_output=True, text=True, check=True)
    assert "llama-cpp-python-0.3.36" in done.stdout + done.stderr


def test_the_real_server_comes_from_the_cache_the_second_time() -> None:
    assert build_server(BuildOptions(patches="none"), pytest.fail).path == stock_binary()
    assert os.access(stock_binary(), os.X_OK)
