"""What the pages say to run does what they show: their commands and programs, on a real server on another port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotpin.config import load
from tests.real.prompts import chat
from tests.real.servers import Slotpin, llama, slotpin

PAGES = Path(__file__).parents[2] / "docs" / "clients"
NAMES = ("pi-reasoning-zip", "opencode", "claude-code", "open-webui", "openai-sdk")
REQUEST = re.compile(r"(X-Slotpin-Request:) [0-9a-f]{12}")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slotpin]:
    """In front of slotpin's own llama-server; one turn has gone through."""
    flags = ("--parallel", "4", "--kv-unified", "--no-cache-idle-slots")
    with llama(*flags, patched=True) as server, slotpin(tmp_path_factory.mktemp("pages"), server.url) as running:
        assert running.post("/v1/chat/completions", chat("hello")).slot == 0
        yield running


def blocks(name: str, language: str) -> list[str]:
    text = (PAGES / f"{name}.md").read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' commands are curl's, and this machine has none")
@pytest.mark.parametrize("name", [name for name in NAMES if blocks(name, "console")])
def test_commands_print_what_is_shown(proxy: Slotpin, name: str) -> None:
    for block in blocks(name, "console"):
        command, shown = re.split(r"\n(?=X-)", block.removeprefix("$ "), maxsplit=1)
        command = command.replace("http://127.0.0.1:8484", proxy.url)
        ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        printed = ran.stdout.replace("\r", "")
        assert REQUEST.sub(r"\1", printed).strip() == REQUEST.sub(r"\1", shown).strip()


def test_python_programs_run(proxy: Slotpin, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part.replace("http://127.0.0.1:8484", proxy.url) for part in blocks("openai-sdk", "python")]
    by_anthropic = parts.pop(1)  # the other parts go on with the first one's client
    namespace: dict[str, object] = {}
    for part in (*parts, by_anthropic):
        exec(compile(part, "openai-sdk.md", "exec"), namespace)
    assert re.search(r"^\d pinned$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("name", "block"), [(name, block) for name in NAMES for block in blocks(name, "json")])
def test_files_are_json_and_slotpins_own_load(name: str, block: str, tmp_path: Path) -> None:
    value = json.loads(block)
    if not value.keys() <= {"recognisers", "reasoningZip"}:
        return
    path = tmp_path / "slotpin.json"
    path.write_text(block)
    settings = load(path, {}, {}).settings
    assert settings.recognisers.custom or settings.compactor.base_url.endswith("/compactor/v1"), name
