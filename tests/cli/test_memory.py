"""What a slotpin that serves has in memory, since it stays there for days."""

from __future__ import annotations

import asyncio
import platform
import signal
from pathlib import Path

import psutil
import pytest

from slotpin import memory
from tests.real.client import fetch
from tests.real.prompts import chat
from tests.support.program import Program
from tests.support.proxy import on_loop, until

NOBODY = "http://127.0.0.1:9/v1"
# Each costs a megabyte or more, or belongs to another command. rich alone is listed too, as structlog looks for it.
HEAVY = (
    *("aiohttp.", "http.client.", "multiprocessing.", "opentelemetry.", "prometheus_client.", "pygments.", "redis."),
    *("requests.", "rich.console.", "rich.text.", "tarfile.", "urllib.request."),
    *("slotpin.checks.doctor.", "slotpin.checks.verify.", "slotpin.llama.build.", "slotpin.observe.screen."),
    "slotpin.pi.",
)


def test_serving_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    arguments = ("serve", "--port", "0", "--enabled", "auto", "--upstream", NOBODY)
    with Program(tmp_path, *arguments, PYTHONPROFILEIMPORTTIME="1") as program:
        fetch(f"{program.url}/v1/chat/completions", chat())
        fetch(f"{program.url}/slotpin/status")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        # import time:       123 |        456 |   the.module
        loaded = {line.rpartition("|")[2].strip() for line in program.err.splitlines() if "import time:" in line}
    assert {"slotpin.proxy.app", "slotpin.proxy.probe", "asyncio"} <= loaded
    assert sorted(name for name in loaded if f"{name}.".startswith(HEAVY)) == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no large blocks")
@on_loop
async def test_what_a_large_body_took_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 24 * 1024 * 1024
    process = psutil.Process()
    for _ in range(2):  # the first one makes glibc keep what the next ones take
        bytearray(b"x") * size
    before = process.memory_info().rss
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.01)
    keeper = asyncio.create_task(memory.keep_small())
    await until(lambda: process.memory_info().rss < before - size / 2, "the memory is given back")
    keeper.cancel()
