"""Pi as a program drives it: commands in, responses and events out, a JSON object a line (Pi's docs/rpc.md)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.pi.install import installed
from tests.support.processes import wait_until

DEADLINE = 60.0
PROVIDER = "slotpin"
# Without tools and with this a model of random weights ends its answers.
SHORT = 'root ::= "ok " [a-z]{3,9}'

Event = dict[str, Any]


class Pi:
    """A session in a folder of its own, which nothing of the developer's gets into. Ended with the block.

    `model` are further members of the model in models.json, `provider` of its provider, and `compaction` of that in
    settings.json; `files` are texts to put there instead, by name.
    """

    def __init__(
        self,
        home: Path,
        base_url: str,
        *flags: str,
        model: Mapping[str, object] | None = None,
        compaction: Mapping[str, object] | None = None,
        provider: Mapping[str, object] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.events: list[Event] = []
        self._commands = 0
        self._stderr = home / "pi.stderr"
        self.folder = home / "work"
        self.agent = home / "agent"
        for folder in (self.folder, self.agent):
            folder.mkdir(parents=True, exist_ok=True)
        models = {"providers": {PROVIDER: _provider(base_url, model or {}, provider or {})}}
        settings = {"compaction": {"reserveTokens": 1024, **(compaction or {})}}
        written = {"models.json": json.dumps(models), "settings.json": json.dumps(settings), **(files or {})}
        for name, content in written.items():
            (self.agent / name).write_text(content)
        found = installed()
        command = [str(found.node), str(found.cli), "--mode", "rpc", "--no-session", "-nc", "-ns"]
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--provider", PROVIDER, "--model", "local", *flags],
                cwd=self.folder,
                env=_environment(home, self.agent),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()

    def call(self, command: str, **fields: object) -> Event:
        """The response to a command."""
        self._commands += 1
        id_ = f"c{self._commands}"
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": id_, "type": command, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        return self.wait(lambda event: event["type"] == "response" and event.get("id") == id_, f"{command} is answered")

    def prompt(self, text: str) -> Sequence[Event]:
        """The events of a whole run."""
        since = self.begin(text)
        self.settled(since)
        return self.events[since:]

    def begin(self, text: str) -> int:
        """Start a run; where its events begin."""
        since = len(self.events)
        accepted = self.call("prompt", message=text)
        assert accepted["success"], accepted
        return since

    def settled(self, since: int) -> Event:
        """Pi goes on with nothing by itself any more."""
        return self.wait(lambda event: event["type"] == "agent_settled", "Pi has settled", since)

    def wait(self, condition: Callable[[Event], bool], what: str, since: int = 0) -> Event:
        """The first event, from number `since` on, of which `condition` holds."""

        def said() -> bool:
            assert self.process.poll() is None, f"Pi ended with {self.process.returncode}: {self._stderr.read_text()}"
            return self._find(condition, since) is not None

        wait_until(said, what, DEADLINE)
        event = self._find(condition, since)
        assert event is not None
        return event

    def _find(self, condition: Callable[[Event], bool], since: int) -> Event | None:
        return next((event for event in self.events[since:] if condition(event)), None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))


def answers(events: Sequence[Event]) -> list[Event]:
    """The assistant's messages among them; `stopReason` is "stop", "toolUse", "length", "aborted" or "error"."""
    ended = [event["message"] for event in events if event["type"] == "message_end"]
    return [message for message in ended if message["role"] == "assistant"]


def text(message: Event) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _provider(base_url: str, model: Mapping[str, object], provider: Mapping[str, object]) -> dict[str, object]:
    defaults = {"id": "local", "contextWindow": 16384, "maxTokens": 2048}
    known = {"baseUrl": f"{base_url}/v1", "api": "openai-completions", "apiKey": "none"}
    return {**known, "models": [{**defaults, **model}], **provider}


def _environment(home: Path, agent: Path) -> dict[str, str]:
    switches = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PI_CODING_AGENT_DIR": str(agent), **switches}
