from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import slotpin.pi as package
from tests.checks.servers import web_server
from tests.real.servers import llama, slotpin
from tests.support.program import Program, assert_lines, command, environment, run

OTHERS = """\
{
    // mine
    "$schema": "https://pi.dev/schemas/models.schema.json",
    "providers": {
        "cloud": {"baseUrl": "https://example.com/v1", "apiKey": "sk-very-secret", "unknown": [1, 2.50]}, // dear
    },
}
"""
SETTINGS = '{"theme":"dark", "compaction": {"enabled": true}}'
EXTENSION = (Path(package.__path__[0]) / "extension" / "slotpin.ts").read_bytes()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a slotpin in front of a server with 16384 tokens a slot."""
    home = tmp_path_factory.mktemp("proxy")
    flags = ("--kv-unified", "--ctx-size", "16384", "--alias", "tiny")
    with llama(*flags) as server, slotpin(home, server.url) as proxy:
        yield str(urlsplit(proxy.url).port)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    return tmp_path / ".pi" / "agent"


def pi(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(home, "pi", *arguments, **variables)


def fill(agent: Path, models: str = OTHERS, settings: str = SETTINGS) -> None:
    agent.mkdir(parents=True)
    (agent / "models.json").write_bytes(models.encode())
    (agent / "settings.json").write_text(settings)


def tree(folder: Path) -> Mapping[str, bytes | None]:
    """Every file with its bytes; None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_an_empty_agent_folder(tmp_path: Path, agent: Path, port: str) -> None:
    done = pi(tmp_path, "setup", "--port", port, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\ndone; now run: pi --model slotpin/tiny\n")
    provider = json.loads((agent / "models.json").read_text())["providers"]["slotpin"]
    assert provider["baseUrl"] == f"http://127.0.0.1:{port}/v1"
    assert provider["compat"]["sendSessionAffinityHeaders"] is True
    assert provider["models"] == [{"id": "tiny", "contextWindow": 16384, "maxTokens": 4096}]
    settings = json.loads((agent / "settings.json").read_text())
    overrides = {"slotpin/tiny": {"reserveTokens": 4096, "keepRecentTokens": 4096}}
    assert settings == {"compaction": {"modelOverrides": overrides}}
    assert (agent / "extensions" / "slotpin.ts").read_bytes() == EXTENSION
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert not (tmp_path / ".pi").exists()


def test_the_agent_folder_that_the_variable_names(tmp_path: Path, port: str) -> None:
    (tmp_path / "other").mkdir()
    done = pi(tmp_path, "setup", "--port", port, "--yes", PI_CODING_AGENT_DIR="~/other")
    assert done.returncode == 0
    assert (tmp_path / "other" / "models.json").exists()
    assert pi(tmp_path, "remove", "--yes", PI_CODING_AGENT_DIR="~/other").returncode == 0
    assert tree(tmp_path / "other") == {}


def test_what_is_there_stays_and_comes_back_byte_for_byte(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent)
    (agent / "models.json").chmod(0o640)
    before = tree(agent)
    done = pi(tmp_path, "setup", "--port", port, "--yes")
    assert done.returncode == 0
    assert "sk-very-secret" not in done.stdout
    text = (agent / "models.json").read_text()
    head, tail = OTHERS.split(", // dear")
    assert text.startswith(f'{head},\n        "slotpin": {{\n            "baseUrl"')
    assert text.endswith(f", // dear{tail}")
    assert json.loads((agent / "settings.json").read_text())["theme"] == "dark"
    assert (agent / "slotpin-backup" / "models.json").read_bytes() == before["models.json"]
    assert (agent / "models.json").stat().st_mode & 0o777 == 0o640
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert tree(agent) == before
    assert (agent / "models.json").stat().st_mode & 0o777 == 0o640


def test_the_second_time_changes_nothing(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent)
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    before = tree(agent)
    done = pi(tmp_path, "setup", "--port", port)
    assert (done.returncode, done.stdout) == (0, "set up already: nothing to change\n")
    assert tree(agent) == before


def test_another_server_the_second_time_and_back(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent)
    before = tree(agent)
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    flags = ("--kv-unified", "--ctx-size", "8192", "--alias", "smaller")
    (tmp_path / "second").mkdir()
    with llama(*flags) as server, slotpin(tmp_path / "second", server.url) as proxy:
        assert pi(tmp_path, "setup", "--port", str(urlsplit(proxy.url).port), "--yes").returncode == 0
    text = (agent / "models.json").read_text()
    assert '"contextWindow": 8192' in text
    assert "tiny" not in text
    settings = json.loads((agent / "settings.json").read_text())
    assert list(settings["compaction"]["modelOverrides"]) == ["slotpin/smaller"]
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert tree(agent) == before


def test_removal_keeps_what_the_user_has_changed_since(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent)
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    edited = (agent / "models.json").read_text().replace("// mine", "// still mine").replace("2.50", "3.50")
    (agent / "models.json").write_text(edited)
    # As Pi writes it, when one chooses a model.
    settings = json.loads((agent / "settings.json").read_text()) | {"defaultModel": "tiny"}
    (agent / "settings.json").write_text(json.dumps(settings, indent=2))
    assert pi(tmp_path, "setup", "--port", port, "--yes").stdout == "set up already: nothing to change\n"
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert (agent / "models.json").read_text() == OTHERS.replace("// mine", "// still mine").replace("2.50", "3.50")
    kept = {"theme": "dark", "compaction": {"enabled": True}, "defaultModel": "tiny"}
    assert (agent / "settings.json").read_text() == json.dumps(kept, indent=2)
    assert set(tree(agent)) == {"models.json", "settings.json"}


def test_an_extension_that_the_user_has_changed_stays(tmp_path: Path, agent: Path, port: str) -> None:
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    (agent / "extensions" / "slotpin.ts").write_text("// mine now\n")
    assert "stays" in pi(tmp_path, "setup", "--port", port, "--yes").stdout
    assert "stays" in pi(tmp_path, "remove", "--yes").stdout
    assert tree(agent) == {"extensions": None, "extensions/slotpin.ts": b"// mine now\n"}


def test_a_provider_that_was_pasted_by_hand_keeps_its_own_members(tmp_path: Path, agent: Path, port: str) -> None:
    mine = {
        "baseUrl": "http://localhost:1/v1",
        "api": "openai-completions",
        "apiKey": "$KEY",
        "headers": {"X-Mine": "1"},
        "models": [{"id": "old"}, {"id": "tiny", "name": "Tiny", "contextWindow": 4096}],
    }
    fill(agent, json.dumps({"providers": {"slotpin": mine}}))
    before = tree(agent)
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    provider = json.loads((agent / "models.json").read_text())["providers"]["slotpin"]
    assert provider["baseUrl"] == f"http://127.0.0.1:{port}/v1"
    assert (provider["apiKey"], provider["headers"]) == ("$KEY", {"X-Mine": "1"})
    assert provider["compat"]["sendSessionAffinityHeaders"] is True
    old, tiny = provider["models"]
    assert old == {"id": "old"}
    assert (tiny["name"], tiny["contextWindow"]) == ("Tiny", 4096)
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert tree(agent) == before


def test_compaction_settings_of_the_user_s_stay(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent, settings='{"compaction": {"reserveTokens": 1000}}')
    done = pi(tmp_path, "setup", "--port", port, "--yes")
    assert "compaction.reserveTokens of settings.json is yours and stays\n" in done.stdout
    compaction = json.loads((agent / "settings.json").read_text())["compaction"]
    assert compaction == {"reserveTokens": 1000, "modelOverrides": {"slotpin/tiny": {"keepRecentTokens": 4096}}}


@pytest.mark.parametrize("more", [("--dry-run",), ("--print",), ("--dry-run", "--yes"), ()], ids=" ".join)
def test_it_changes_nothing_unasked(tmp_path: Path, agent: Path, port: str, more: tuple[str, ...]) -> None:
    fill(agent)
    before = tree(agent)
    done = pi(tmp_path, "setup", "--port", port, *more)
    assert tree(agent) == before
    if not more:
        assert (done.returncode, done.stdout) == (2, "")
        assert_lines(done.stderr, "this changes Pi's files: run it on a terminal, which asks first, or with --yes")
        return
    assert (done.returncode, done.stderr) == (0, "")
    if more == ("--print",):
        assert done.stdout.startswith(f"// {agent / 'models.json'}\n{OTHERS[:10]}")
        assert EXTENSION.decode() in done.stdout
    else:
        assert '+        "slotpin": {\n' in done.stdout
        assert "sk-very-secret" not in done.stdout
        assert done.stdout.endswith("nothing was changed (--dry-run)\n")


@pytest.mark.parametrize(("answer", "agrees"), [("y", True), ("n", False), ("", False), ("\x04", False)])
def test_on_a_terminal_it_asks(tmp_path: Path, agent: Path, port: str, answer: str, agrees: bool) -> None:
    fill(agent)
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode() if answer != "\x04" else answer.encode())
        done = subprocess.run(
            command("pi", "setup", "--port", port),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert "Change these files? [y/N] " in done.stdout
    assert ("slotpin" in (agent / "models.json").read_text()) is agrees
    assert done.stdout.endswith("now run: pi --model slotpin/tiny\n" if agrees else "nothing was changed\n")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("models.json", '{\n  "providers": {\n    "a": {"b": }\n  }\n}', "line 3, column 16: "),
        ("models.json", "[]", "is not a JSON object; nothing was changed"),
        ("models.json", '{"providers": "none"}', "$.providers is not an object; nothing was changed"),
        ("models.json", '{"providers": {}} x', "line 1, column 19: "),
        ("settings.json", '{"a": 1, // no\n}', "line 1, column 10: "),
        ("settings.json", '{"compaction": {"modelOverrides": []}}', "$.compaction.modelOverrides is not an object"),
    ],
)
def test_a_broken_file(tmp_path: Path, agent: Path, port: str, name: str, text: str, problem: str) -> None:
    fill(agent, **{name.partition(".")[0]: text})
    before = tree(agent)
    done = pi(tmp_path, "setup", "--port", port, "--yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert_lines(done.stderr, f"{agent / name}: {problem}")
    assert tree(agent) == before


def test_a_link_stays_a_link(tmp_path: Path, agent: Path, port: str) -> None:
    fill(agent)
    (agent / "models.json").rename(tmp_path / "dotfile.json")
    (agent / "models.json").symlink_to(tmp_path / "dotfile.json")
    assert pi(tmp_path, "setup", "--port", port, "--yes").returncode == 0
    assert (agent / "models.json").is_symlink()
    assert "slotpin" in (tmp_path / "dotfile.json").read_text()
    assert pi(tmp_path, "remove", "--yes").returncode == 0
    assert (tmp_path / "dotfile.json").read_text() == OTHERS


def test_nothing_to_remove(tmp_path: Path, agent: Path) -> None:
    done = pi(tmp_path, "remove", "--yes")
    assert done.returncode == 1
    assert_lines(done.stderr, f"{agent}: there is no set-up of slotpin's to undo")


def test_no_slotpin_there(tmp_path: Path, agent: Path) -> None:
    done = pi(tmp_path, "setup", "--port", "1", "--yes")
    assert done.returncode == 1
    assert_lines(done.stderr, "http://127.0.0.1:1: nothing listens there; start slotpin with slotpin serve")
    with web_server(404, b"") as url:
        done = pi(tmp_path, "setup", "--port", str(urlsplit(url).port), "--yes")
    assert done.returncode == 1
    assert_lines(done.stderr, f"{url} is not slotpin; ")
    assert not agent.exists()


def test_a_slotpin_that_wants_a_key(tmp_path: Path, agent: Path) -> None:
    flags = ("--port", "0", "--set", 'listen.apiKeys=["k$"]')
    with (
        llama("--alias", "tiny") as server,
        Program(tmp_path, "serve", *flags, "--upstream", f"{server.url}/v1") as proxy,
    ):
        setup = ("setup", "--port", str(urlsplit(proxy.url).port), "--yes")
        for more in [(), ("--api-key", "$SLK")]:
            done = pi(tmp_path, *setup, *more, SLK="another")
            assert done.returncode == 2
            assert_lines(done.stderr, f"slotpin runs on {proxy.url} and wants a key: set SLOTPIN_LISTEN_API_KEYS=")
            assert "--api-key '$NAME'" in done.stderr
        done = pi(tmp_path, *setup, SLOTPIN_LISTEN_API_KEYS='["k$"]')
        assert_lines(done.stderr, f"the slotpin on {proxy.url} wants an API key: give Pi one with --api-key '$NAME'")
        assert not agent.exists()
        for key, value in [("$SLK", "k$"), ("${SLK}$$", "k"), ("k$$", "")]:
            assert pi(tmp_path, *setup, "--api-key", key, SLK=value).returncode == 0
            assert json.loads((agent / "models.json").read_text())["providers"]["slotpin"]["apiKey"] == key


def test_a_server_that_wants_a_key(tmp_path: Path, agent: Path) -> None:
    (tmp_path / "proxy").mkdir()
    with llama("--alias", "tiny", api_key="k") as server, slotpin(tmp_path / "proxy", server.url) as proxy:
        setup = ("setup", "--port", str(urlsplit(proxy.url).port), "--yes")
        done = pi(tmp_path, *setup)
        assert done.returncode == 1
        assert "SLOTPIN_COMPACTOR_API_KEY" in done.stderr
        done = pi(tmp_path, *setup, SLOTPIN_COMPACTOR_API_KEY="k")
        assert done.returncode == 2
        assert_lines(done.stderr, f"the llama-server behind {proxy.url} wants an API key: give Pi one with --api-key")
        assert not agent.exists()
        done = pi(tmp_path, *setup, "--api-key", "$LLAMA_KEY", SLOTPIN_COMPACTOR_API_KEY="k")
        assert done.returncode == 0
        assert json.loads((agent / "models.json").read_text())["providers"]["slotpin"]["apiKey"] == "$LLAMA_KEY"
        done = pi(tmp_path, *setup, SLOTPIN_COMPACTOR_API_KEY="k")
        assert done.stdout == "set up already: nothing to change\n"
