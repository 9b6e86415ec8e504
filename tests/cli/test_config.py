from __future__ import annotations

import json
from pathlib import Path

from tests.support.program import assert_lines, run

SECRET = "sk-very-secret"


def write(folder: Path, content: object) -> None:
    (folder / "slotpin.json").write_text(json.dumps(content))


def test_check_of_a_valid_file(tmp_path: Path) -> None:
    write(tmp_path, {"llamaCppSlots": {"enabled": "auto"}})
    done = run(tmp_path, "config", "check", "slotpin.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "slotpin.json: valid\n", "")


def test_check_of_the_file_in_force(tmp_path: Path) -> None:
    done = run(tmp_path, "config", "check")
    assert (done.returncode, done.stdout) == (0, "no configuration file, the defaults are in force\n")
    write(tmp_path, {"listen": {"port": 99999}})
    done = run(tmp_path, "config", "check")
    assert done.returncode == 2
    assert_lines(done.stderr, str(tmp_path / "slotpin.json"))
    write(tmp_path, {})
    assert run(tmp_path, "config", "check").stdout == f"{tmp_path / 'slotpin.json'}: valid\n"


def test_check_of_the_example_that_the_project_ships(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "config.example.json"
    assert run(tmp_path, "config", "check", str(example)).returncode == 0


def test_check_notes_what_is_legal_but_odd(tmp_path: Path) -> None:
    write(tmp_path, {"llamaCppSlots": {"enabled": "auto", "mainIdSlot": 1, "compactorIdSlot": 1}})
    done = run(tmp_path, "config", "check", "slotpin.json")
    assert done.returncode == 0
    note, valid = done.stdout.splitlines()
    assert note.startswith("slotpin.json: note: llamaCppSlots.mainIdSlot and llamaCppSlots.compactorIdSlot are both 1")
    assert valid == "slotpin.json: valid"


def test_check_takes_pi_settings_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, {"reasoningZip": {"enabled": True, "llamaCppSlots": {"enabled": "auto"}}})
    done = run(tmp_path, "config", "check", "slotpin.json")
    assert done.returncode == 0
    assert "note:" in done.stdout


def test_check_of_an_invalid_file(tmp_path: Path) -> None:
    write(tmp_path, {"listen": {"port": "80"}, "log": {"level": "loud"}, "x": 1})
    done = run(tmp_path, "config", "check", "slotpin.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 3
    assert all(line.startswith("slotpin: slotpin.json: $.") for line in done.stderr.splitlines())


def test_check_of_a_missing_file(tmp_path: Path) -> None:
    done = run(tmp_path, "config", "check", "nowhere.json")
    assert done.returncode == 2
    assert_lines(done.stderr, "nowhere.json: does not exist")


def test_check_looks_at_the_file_alone(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert run(tmp_path, "config", "check", "slotpin.json", SLOTPIN_LISTEN_PORT="x").returncode == 0


def test_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    write(tmp_path, {"listen": {"host": "::1", "port": 1}, "main": {"baseUrl": "http://gpu:8080"}})
    done = run(
        tmp_path,
        *("config", "show", "--port", "3", "--set", "llamaCppSlots.mainIdSlot=7"),
        SLOTPIN_LISTEN_PORT="2",
        SLOTPIN_LLAMA_CPP_SLOTS_ENABLED="auto",
    )
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head == f"# file: {tmp_path / 'slotpin.json'}"
    shown = {}
    for line in lines:
        key, _, rest = line.partition(" = ")
        shown[key.strip()] = " ".join(rest.split())
    assert shown["listen.host"] == '"::1" (file)'
    assert shown["listen.port"] == "3 (flag)"
    assert shown["main.baseUrl"] == '"http://gpu:8080" (file)'
    assert shown["compactor.baseUrl"] == '"http://gpu:8080" (default: main.baseUrl)'
    assert shown["llamaCppSlots.enabled"] == '"auto" (env SLOTPIN_LLAMA_CPP_SLOTS_ENABLED)'
    assert shown["llamaCppSlots.mainIdSlot"] == "7 (flag)"
    assert shown["llamaCppSlots.compactorIdSlot"] == "1 (default)"


def test_show_never_prints_a_secret(tmp_path: Path) -> None:
    rule = {"name": "mine", "apiKey": SECRET}
    write(tmp_path, {"compactor": {"apiKey": SECRET}, "recognisers": {"custom": [rule]}})
    for more in ((), ("--json",)):
        done = run(tmp_path, "config", "show", *more)
        assert done.returncode == 0
        assert SECRET not in done.stdout + done.stderr
        assert "********" in done.stdout


def test_show_as_json(tmp_path: Path) -> None:
    write(tmp_path, {"listen": {"port": 1}})
    shown = json.loads(run(tmp_path, "config", "show", "--json", "--enabled", "auto").stdout)
    assert shown["file"] == str(tmp_path / "slotpin.json")
    assert shown["settings"]["listen"]["port"] == 1
    assert shown["settings"]["llamaCppSlots"]["enabled"] == "auto"
    assert shown["origins"]["listen.port"] == "file"
    assert shown["origins"]["listen.host"] == "default"
    assert shown["origins"]["llamaCppSlots.enabled"] == "flag"


def test_show_without_a_file(tmp_path: Path) -> None:
    assert run(tmp_path, "config", "show").stdout.startswith("# file: none\n")
    assert json.loads(run(tmp_path, "config", "show", "--json").stdout)["file"] is None


def test_the_file_in_the_user_s_config_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "slotpin"
    folder.mkdir(parents=True)
    write(folder, {"listen": {"port": 4711}})
    assert json.loads(run(tmp_path, "config", "show", "--json").stdout)["settings"]["listen"]["port"] == 4711


def test_the_file_that_the_variable_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"listen": {"port": 4712}}')
    write(tmp_path, {"listen": {"port": 1}})
    shown = json.loads(run(tmp_path, "config", "show", "--json", SLOTPIN_CONFIG="other.json").stdout)
    assert shown["settings"]["listen"]["port"] == 4712


def test_show_reports_problems_like_serve(tmp_path: Path) -> None:
    write(tmp_path, {"listen": {"port": -1}})
    done = run(tmp_path, "config", "show")
    assert (done.returncode, done.stdout) == (2, "")
    assert_lines(done.stderr, f"{tmp_path / 'slotpin.json'}: $.listen.port: -1 is not allowed")
