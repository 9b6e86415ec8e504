"""What a slotpin that serves has in memory, since it stays there for days."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.real.client import fetch
from tests.real.prompts import chat
from tests.support.program import Program

NOBODY = "http://127.0.0.1:9/v1"
# Each costs a megabyte or more, or belongs to another command.
HEAVY = tuple(
    f"{name}."
    for name in (
        "aiohttp",
        "http.client",
        "multiprocessing",
        "opentelemetry",
        "prometheus_client",
        "pygments",
        "redis",
        "requests",
        "rich.console",  # rich alone is listed too: structlog looks for it, in vain
        "rich.text",
        "slotpin.checks.doctor",
        "slotpin.checks.verify",
        "slotpin.llama.build",
        "slotpin.observe.screen",
        "slotpin.pi",
        "tarfile",
        "urllib.request",
    )
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
