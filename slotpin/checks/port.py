"""Whether slotpin's port is free: said before anything is built, loaded or started."""

from __future__ import annotations

import asyncio
import errno
import os

from slotpin.config import Listen
from slotpin.errors import UserError
from slotpin.llama.launch import free_port, try_port
from slotpin.proxy.questions import Questions
from slotpin.proxy.upstream import UpstreamError


async def check_port(listen: Listen, by_make: bool) -> None:
    """Raises UserError where somebody listens there. What else is wrong with an address, listening will show."""
    if listen.port == 0 or listen.host.startswith("unix:") or os.environ.get("LISTEN_PID") == str(os.getpid()):
        return
    try:
        try_port(listen.host, listen.port)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise UserError(await _in_use(listen, by_make)) from None


async def _in_use(listen: Listen, by_make: bool) -> str:
    where = f"cannot listen on {listen.host}:{listen.port}"
    other = f"--port {free_port(listen.host, listen.port % 65535 + 1)}"
    choose = f'make run ARGS="{other}"' if by_make else f"{other} or listen.port"
    if await _is_slotpin(listen.url):
        return f"{where}: slotpin already runs there (slotpin status shows it); choose another port with {choose}"
    return f"{where}: the port is in use; choose another with {choose}"


async def _is_slotpin(url: str) -> bool:
    try:
        with Questions() as questions:
            async with asyncio.timeout(LONGEST_SECONDS):
                return (await questions.ask("GET", url, "/slotpin/health")).body == HEALTHY
    except (TimeoutError, UpstreamError):
        return False


# slotpin answers this from memory.
LONGEST_SECONDS = 2.0
HEALTHY = b'{"status": "ok"}'
