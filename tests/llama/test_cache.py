from __future__ import annotations

from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama.cache import cache_dir, locked, publish, server_log
from tests.support.processes import read_line, start_python

HOLD_LOCK = """
import time
from slotpin.llama.cache import locked
with locked("build", print):
    print("held")
    time.sleep(600)
"""

DIE_WHILE_PUBLISHING = """
import os, pathlib, signal, sys
from slotpin.llama.cache import publish
with publish(pathlib.Path(sys.argv[1])) as staging:
    (staging / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_environment_names_the_cache_folder(cache: Path) -> None:
    assert cache_dir() == cache
    assert server_log(8080) == cache / "logs" / "llama-server-8080.log"


def test_without_it_the_cache_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLOTPIN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir().name == "slotpin"
    assert cache_dir().is_relative_to(tmp_path)


def test_publish_shows_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with pytest.raises(RuntimeError), publish(target) as staging:
        (staging / "half").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with publish(target) as staging:
        (staging / "whole").write_text("whole")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [target]


def test_publish_replaces_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "result"
    for content in ("old", "new"):
        with publish(target) as staging:
            (staging / content).write_text(content)
    assert [path.name for path in target.iterdir()] == ["new"]


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with start_python(DIE_WHILE_PUBLISHING, str(target)) as process:
        assert process.wait() == -9
    assert len(list(tmp_path.iterdir())) == 1
    assert not target.exists()
    with publish(target) as staging:
        (staging / "whole").write_text("whole")
    assert list(tmp_path.iterdir()) == [target]


def test_a_second_process_waits_for_the_lock_and_gets_it_when_the_first_is_killed(cache: Path) -> None:
    with start_python(HOLD_LOCK) as holder:
        assert read_line(holder) == "held"
        reports: list[str] = []

        def report(line: str) -> None:
            reports.append(line)
            holder.kill()

        with locked("build", report):
            pass
    assert reports == ["waiting for another slotpin process (build)"]


def test_locks_of_other_names_do_not_wait(cache: Path) -> None:
    with locked("build", pytest.fail), locked("model", pytest.fail):
        pass


def test_an_unusable_cache_folder_is_a_users_error(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(UserError, match=r"cache folder .*SLOTPIN_CACHE_DIR") as caught, locked("build", print):
        pass
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
