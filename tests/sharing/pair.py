"""Several slotpins in front of one llama-server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slotpin.llama.cache import server_log
from tests.real.client import Answer
from tests.real.servers import Llama, Slotpin, write_config
from tests.support.processes import wait_until
from tests.support.program import Program

LEASE = 2.0
CHAT = "/v1/chat/completions"


@contextmanager
def slotpins(home: Path, upstream: str, *settings: str, redis: str = "", count: int = 2) -> Iterator[list[Slotpin]]:
    """`redis`: its URL, empty for none. Each may be killed by the test."""
    with ExitStack() as stack:
        running = [stack.enter_context(_started(home / str(n), upstream, redis, settings)) for n in range(count)]
        if redis:
            all_share(running)
        yield running
        for each in running:
            assert "Traceback" not in each.program.err, each.program.err
            assert each.program.events("bug") == []
            assert each.program.events("library") == []


@contextmanager
def _started(home: Path, upstream: str, redis: str, settings: Sequence[str]) -> Iterator[Slotpin]:
    home.mkdir(parents=True)
    write_config(home, upstream)
    if redis:
        path = home / "slotpin.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"sharing": {"redisUrl": redis, "leaseSeconds": LEASE}}))
    options = [text for each in settings for text in ("--set", each)]
    cache = str(home.parent / "cache")
    with Program(home, "serve", "--config", "slotpin.json", *options, SLOTPIN_CACHE_DIR=cache) as program:
        yield Slotpin(program)


def sharing(proxy: Slotpin) -> dict[str, Any]:
    found: dict[str, Any] = proxy.status["sharing"]
    return found


def all_share(proxies: Sequence[Slotpin]) -> None:
    def share() -> bool:
        found = [sharing(each) for each in proxies]
        return all(each["state"] == "on" and each["otherSlotpins"] == len(proxies) - 1 for each in found)

    wait_until(share, "all slotpins share the slots")


def warned(proxy: Slotpin, cause: str) -> list[dict[str, Any]]:
    return proxy.program.events("warning", cause=cause)


_CAME, _DONE = "selected slot by", "stop processing"
_STEP = re.compile(rf"id +(\d+) \| task -?\d+ \| ({_CAME}|{_DONE})")


class ServerLog:
    """What a llama-server's log says from now on of requests that come to its slots and are done there."""

    def __init__(self, server: Llama) -> None:
        self._path = server_log(int(server.url.rpartition(":")[2]))
        self._offset = 0
        wait_until(lambda: not self._steps or self._steps[-1][1] == _DONE, "the server is done")
        self._offset = self._path.stat().st_size

    @property
    def _steps(self) -> list[tuple[str, str]]:
        return _STEP.findall(self._path.read_text()[self._offset :])

    def assert_never_met(self) -> None:
        """No request came for a slot before the one in it was done, left by its client or not."""
        wait_until(lambda: self._steps[-1][1] == _DONE, "the last request is done")
        steps = self._steps
        assert len(steps) > 2
        for number in {slot for slot, _ in steps}:
            of_slot = [step for slot, step in steps if slot == number]
            assert of_slot == [_CAME, _DONE] * (len(of_slot) // 2), (number, of_slot, self._path)


class Talk:
    """A conversation, turn by turn, through whichever slotpin."""

    def __init__(self, opening: str, tokens: int = 8, **headers: str) -> None:
        self.messages: list[dict[str, str]] = []
        self._opening = opening
        self._tokens = tokens
        self._headers = headers

    def turn(self, proxy: Slotpin, text: str = "") -> Answer:
        self.messages.append({"role": "user", "content": text or self._opening})
        body = {"messages": self.messages, "max_tokens": self._tokens, "temperature": 0}
        answer = proxy.post(CHAT, body, **self._headers)
        assert answer.status == 200, answer
        self.messages.append(answer.json["choices"][0]["message"])
        return answer
