"""A real llama-server and a real `slotpin serve`, for tests that are plain functions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer, free_port, server_args
from tests.real.client import Answer, fetch
from tests.support.llama import HOST, patched_binary, stock_binary
from tests.support.processes import wait_until
from tests.support.program import Program
from tests.support.tiny_model import full_attention

SELECTED = re.compile(r"id +(\d+) \| task -?\d+ \| selected slot by (.+?)(?: \(|,|$)", re.MULTILINE)


class Llama:
    """`api_key` is for the looks of the tests themselves."""

    def __init__(self, server: LlamaServer, api_key: str) -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = server.base_url

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)

    @property
    def slots(self) -> list[dict[str, Any]]:
        answer = fetch(f"{self.url}/slots", headers=self._headers)
        assert answer.status == 200, answer
        slots: list[dict[str, Any]] = answer.json
        return slots

    @property
    def idle(self) -> bool:
        return not any(slot["is_processing"] for slot in self.slots)

    @property
    def last_slot(self) -> int:
        """The slot that ran the last task."""
        used = [slot for slot in self.slots if "id_task" in slot]
        slot: int = max(used, key=lambda slot: slot["id_task"])["id"]
        return slot

    @property
    def selections(self) -> list[tuple[int, str]]:
        """From its log: each slot that it chose for a task, and by what ("id", "LRU", "LCP similarity")."""
        return [(int(found[1]), found[2]) for found in SELECTED.finditer(self._server.log_path.read_text())]

    def chosen_since(self, count: int, tasks: int = 1) -> list[tuple[int, str]]:
        """What `selections` has after its first `count`; waits for as many `tasks`."""
        wait_until(lambda: len(self.selections) >= count + tasks, "llama-server logs its choice")
        return self.selections[count:]


@contextmanager
def llama(
    *flags: str, port: int | None = None, api_key: str = "", loaded: bool = True, patched: bool = False
) -> Iterator[Llama]:
    """A llama-server with the tiny full-attention model. `loaded` False: not waited for."""
    port = port or free_port(HOST, 0)
    # One thread: two would wait for each other at every layer while the tests' own processes have a core.
    flags = ("--threads", "1", *flags, *(("--api-key", api_key) if api_key else ()))
    with asyncio.Runner() as runner:
        log = server_log(port)
        args = server_args(full_attention(), HOST, port, parallel=2, extra=flags)
        server = LlamaServer(patched_binary() if patched else stock_binary(), args, HOST, port, log)
        try:
            runner.run(server.start())
            if loaded:
                runner.run(server.wait_ready())
            yield Llama(server, api_key)
        finally:
            runner.run(server.stop())


class Router:
    """A llama-server without a model of its own, which starts one for each that is asked for."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def loaded(self) -> set[str]:
        models = fetch(f"{self.url}/models").json["data"]
        return {model["id"] for model in models if model["status"]["value"] == "loaded"}


@contextmanager
def router(models: Path) -> Iterator[Router]:
    """In front of the models that lie in a folder."""
    port = free_port(HOST, 0)
    own = ("--host", HOST, "--port", str(port), "--models-dir", str(models), "--models-max", "4")
    each = ("--threads", "1", "--parallel", "2", "--ctx-size", "8192", "--kv-unified", "--no-cache-idle-slots")
    with asyncio.Runner() as runner:
        server = LlamaServer(stock_binary(), [*own, *each], HOST, port, server_log(port))
        try:
            runner.run(server.start())
            runner.run(server.wait_ready())
            yield Router(server.base_url)
        finally:
            runner.run(server.stop())


class Slotpin:
    """A running `slotpin serve`; its log is JSON."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.url = program.url

    def post(self, path: str, body: object, **headers: str) -> Answer:
        return fetch(self.url + path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = fetch(f"{self.url}/slotpin/status").json
        return status

    @property
    def bindings(self) -> tuple[int, int]:
        """How many are open, and how many are kept after their message's end."""
        found = self.status["bindings"]
        return found["open"], found["ended"]

    def decision(self, request: str) -> dict[str, Any]:
        """What the log has of a request whose answer has ended."""
        wait_until(lambda: bool(self.program.events("exchange", request=request)), "the decision is logged")
        (event,) = self.program.events("exchange", request=request)
        return event

    def outcome(self, request: str) -> str:
        wait_until(lambda: bool(self.program.events("exchange", request=request)), "the exchange is logged")
        (event,) = self.program.events("exchange", request=request)
        outcome: str = event["outcome"]
        return outcome


@contextmanager
def slotpin(home: Path, upstream: str, **config: Any) -> Iterator[Slotpin]:
    """In front of `upstream`, with `write_config(..., **config)`."""
    write_config(home, upstream, **config)
    with Program(home, "serve", "--config", "slotpin.json") as program:
        yield Slotpin(program)
        assert program.process.poll() is None
        assert "Traceback" not in program.err, program.err
        assert program.events("bug") == []


def write_config(
    home: Path,
    upstream: str,
    *,
    compactor: str | None = None,
    api_key: str = "none",
    connect_seconds: float = 10,
    **slots: object,
) -> None:
    """slotpin.json in `home`, replaced in one step. `slots` are keys of `llamaCppSlots`."""
    content = {
        "listen": {"port": 0},
        "main": {"baseUrl": f"{upstream}/v1"},
        "compactor": {"baseUrl": f"{compactor or upstream}/v1", "apiKey": api_key},
        "llamaCppSlots": {"enabled": "auto"} | slots,
        "log": {"format": "json"},
        "timeouts": {"connectSeconds": connect_seconds},
    }
    new = home / "slotpin.json.new"
    new.write_text(json.dumps(content))
    new.replace(home / "slotpin.json")
