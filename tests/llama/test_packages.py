from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama.packages import Package, fetch
from tests.llama.wheels import make_wheel


def test_pip_fetches_by_name_version_and_hash(registry: Path, tmp_path: Path) -> None:
    package = make_wheel(registry, "slotpin-test-data", {"data.txt": b"data"})
    wheel = fetch(package, tmp_path / "downloads", "do something")
    assert wheel.read_bytes() == (registry / package.filename).read_bytes()


def test_a_file_that_is_there_already_is_not_fetched_again(registry: Path, tmp_path: Path) -> None:
    package = make_wheel(registry, "slotpin-test-data", {"data.txt": b"data"})
    first = fetch(package, tmp_path / "downloads", "do something")
    shutil.rmtree(registry)
    assert fetch(package, tmp_path / "downloads", "do something") == first


def test_a_half_written_file_is_fetched_again(registry: Path, tmp_path: Path) -> None:
    package = make_wheel(registry, "slotpin-test-data", {"data.txt": b"data"})
    (tmp_path / package.filename).write_bytes(b"half")
    wheel = fetch(package, tmp_path, "do something")
    assert wheel.read_bytes() == (registry / package.filename).read_bytes()


def test_another_hash_is_refused(registry: Path, tmp_path: Path) -> None:
    package = make_wheel(registry, "slotpin-test-data", {"data.txt": b"data"})
    expect_error(dataclasses.replace(package, sha256="0" * 64), tmp_path, "DO NOT MATCH THE HASHES")


def test_an_unknown_package_says_what_was_tried_and_what_to_do(registry: Path, tmp_path: Path) -> None:
    package = Package("slotpin-test-nothing", "1.0.0", "slotpin_test_nothing-1.0.0-py3-none-any.whl", "0" * 64)
    expect_error(package, tmp_path, "No matching distribution found for slotpin-test-nothing==1.0.0")


def expect_error(package: Package, folder: Path, text: str) -> None:
    with pytest.raises(UserError) as caught:
        fetch(package, folder / "downloads", "do something")
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert message.startswith(f"cannot download {package.name} 1.0.0 with ")
    assert text in message
    assert message.endswith("; do something")
    assert "\n" not in message
    assert not (folder / "downloads" / package.filename).exists()
