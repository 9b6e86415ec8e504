"""The real Claude Code and slotpin's own llama-server, started with the lines of its page."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slotpin.llama.cache import cache_dir
from tests.clients.agents import SHORT, environment
from tests.clients.pages import MODEL, URL, blocks
from tests.support.llama import patched_binary
from tests.support.npm import program
from tests.support.program import Program
from tests.support.tiny_model import full_attention


@contextmanager
def up(home: Path) -> Iterator[Program]:
    """The page's first line, with a model of random weights whose answers are short."""
    patched_binary()
    line = blocks("claude-code", "sh")[0].replace("/path/to/model.gguf", str(full_attention()))
    name, *arguments = shlex.split(line)
    assert name == "slotpin"
    own = ("--alias", MODEL, "--cache-ram", "0", "--threads", "1", *SHORT)
    variables = {
        "SLOTPIN_LISTEN_PORT": "0",
        "SLOTPIN_LOG_FORMAT": "json",
        "SLOTPIN_CACHE_DIR": str(cache_dir()),
    }
    with Program(home, *arguments, *own, **variables) as running:
        yield running


class Claude:
    """Each call is a run of the page's second block, with arguments after its last word, `claude`."""

    def __init__(self, home: Path, url: str) -> None:
        self._home = home
        self._lines = blocks("claude-code", "sh")[1].replace(URL, url).rstrip() + ' "$@"'
        assert self._lines.splitlines()[-1] == 'claude "$@"'
        self._folder = program("claude_code", "@anthropic-ai/claude-code-*/claude").parent

    def say(self, *arguments: str) -> str:
        env = environment(self._home)
        done = subprocess.run(
            ["sh", "-c", self._lines, "sh", *arguments],
            cwd=self._home,
            env=env | {"PATH": f"{self._folder}:{env['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done
        assert "assumes a context window" not in done.stdout + done.stderr
        return done.stdout


def test_turns_a_compaction_and_a_second_session(tmp_path: Path) -> None:
    with up(tmp_path) as proxy:
        claude = Claude(tmp_path, proxy.url)
        assert claude.say("-p", "Which files are here?").startswith("ok ")
        assert claude.say("-p", "-c", "And which are mine?").startswith("ok ")
        claude.say("-p", "-c", "/compact")
        turns = len(proxy.exchanges(role="main"))
        assert claude.say("-p", "-c", "Go on.").startswith("ok ")
        assert claude.say("-p", "Something else.").startswith("ok ")

        main = [(event["conversation"], event["slot"], event["reason"]) for event in proxy.exchanges(role="main")]
        assert main == [("c1", 0, "pinned")] * 3 + [("c2", 2, "pinned")]
        assert turns == 2
        side = proxy.exchanges(role="compactor")
        asked = {(event["found_by"], event["slot"], event["reason"]) for event in side}
        assert asked == {("claude-code-summary", 0, "extends_conversation")}
        first, second, compaction, *_ = proxy.exchanges()
        assert second["cached"] >= first["evaluated"] - 1 > 2000
        assert compaction["cached"] >= second["cached"] + second["evaluated"] - 1
