"""What the pages say to run does what they show, on a real server on another port.

The blocks that need a client's own program are run beside this file: test_pi.py, test_opencode.py, test_claude_code.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slotpin.config import load
from tests.clients.pages import NAMES, URL, all_blocks, blocks
from tests.real.prompts import chat
from tests.real.servers import Slotpin, llama, slotpin, write_config
from tests.support.processes import wait_until
from tests.support.program import Program

REQUEST = re.compile(r"(X-Slotpin-Request:) [0-9a-f]{12}")
CONSOLE = [name for name in NAMES if blocks(name, "console")]
RULES = [
    (name, block) for name in NAMES for block in blocks(name, "json") if json.loads(block).keys() == {"recognisers"}
]
ELSEWHERE = {
    ("pi", "sh"): 2,
    ("pi", "json"): 2,
    ("pi", ""): 1,
    ("opencode", "json"): 1,
    ("claude-code", "sh"): 2,
    # Docker, and 7 GB of packages: tried by hand, as the page says.
    ("open-webui", "sh"): 2,
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slotpin]:
    """In front of slotpin's own llama-server; one turn has gone through."""
    flags = ("--parallel", "4", "--kv-unified", "--no-cache-idle-slots")
    with llama(*flags, patched=True) as server, slotpin(tmp_path_factory.mktemp("pages"), server.url) as running:
        assert running.post("/v1/chat/completions", chat("hello")).slot == 0
        yield running


def test_every_block_of_every_page_is_run() -> None:
    here = Counter({(name, "console"): len(blocks(name, "console")) for name in CONSOLE})
    here += Counter((name, "json") for name, _ in RULES)
    here[("openai-sdk", "python")] = 4
    here[("pi-reasoning-zip", "json")] = 1
    assert Counter((name, language) for name in NAMES for language, _ in all_blocks(name)) == here + Counter(ELSEWHERE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' commands are curl's, and this machine has none")
@pytest.mark.parametrize("name", CONSOLE)
def test_commands_print_what_is_shown(proxy: Slotpin, name: str) -> None:
    for block in blocks(name, "console"):
        command, shown = re.split(r"\n(?=X-)", block.removeprefix("$ "), maxsplit=1)
        command = command.replace(URL, proxy.url)
        ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        printed = ran.stdout.replace("\r", "")
        assert REQUEST.sub(r"\1", printed).strip() == REQUEST.sub(r"\1", shown).strip()


def test_python_programs_run(proxy: Slotpin, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part.replace(URL, proxy.url) for part in blocks("openai-sdk", "python")]
    by_anthropic = parts.pop(1)  # the other parts go on with the first one's client
    namespace: dict[str, Any] = {}
    for part in (*parts, by_anthropic):
        if part is by_anthropic:
            namespace["client"].close()
        exec(compile(part, "openai-sdk.md", "exec"), namespace)
    namespace["client"].close()
    assert re.search(r"^\d pinned$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("name", "block"), RULES)
def test_rules_recognise_what_they_are_for(proxy: Slotpin, tmp_path: Path, name: str, block: str) -> None:
    (rule,) = json.loads(block)["recognisers"]["custom"]
    write_config(tmp_path, proxy.url)
    settings = tmp_path / "slotpin.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | json.loads(block)))
    with Program(tmp_path, "serve", "--config", "slotpin.json") as program:
        asked = chat(f"{rule.get('user', '')}, please", model=rule.get("model", "any"))
        Slotpin(program).post("/v1/chat/completions", asked)
        Slotpin(program).post("/v1/chat/completions", chat("please"))
        wait_until(lambda: len(program.events("exchange")) == 2, "both are logged")
        found = [event["found_by"] for event in program.exchanges()]
    assert found == [rule["name"], "default"], name


def test_pis_own_settings_are_read(tmp_path: Path) -> None:
    (block,) = blocks("pi-reasoning-zip", "json")
    path = tmp_path / "slotpin.json"
    path.write_text(block)
    assert load(path, {}, {}).settings.compactor.base_url.endswith("/compactor/v1")
