"""`slotpin serve` and `slotpin up` from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path

from slotpin import memory, systemd
from slotpin.config import Loaded
from slotpin.errors import UserError
from slotpin.greeting import Start, greeting
from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer
from slotpin.llama.series import is_patched
from slotpin.observe import log as logs
from slotpin.observe.tracing import tracing
from slotpin.pinning.topology import Topology
from slotpin.proxy.app import Proxy
from slotpin.proxy.discover import discover
from slotpin.proxy.reload import Reloader

Load = Callable[[], Loaded]


async def serve(load: Load, start: Start) -> None:
    """Front a server that is already there, until a signal ends it."""
    with _signals() as stopped:
        async with _proxy(load) as (proxy, loaded):
            systemd.notify("READY=1")
            await _greet(proxy, loaded, start)
            await stopped.wait()


async def up(load: Load, start: Start, binary: Path, args: Sequence[str], host: str, port: int) -> None:
    """Start llama-server and the proxy in front of it; both end together. Raises UserError if the server dies."""
    server = LlamaServer(binary, args, host, port, server_log(port))
    with _signals() as stopped:
        # The proxy's port comes first: a mistake there should not cost the loading of a model.
        async with _proxy(load) as (proxy, loaded):
            try:
                await server.start()
                if not await _first(server.wait_ready(), stopped.wait()):
                    return
                systemd.notify("READY=1")
                await _greet(proxy, loaded, start, (f"  llama-server log  {server.log_path}",))
                if await _first(server.wait(), stopped.wait()):
                    raise UserError(f"llama-server ended with {server.returncode}; log: {server.log_path}", 1)
            finally:
                await proxy.stop()
                await server.stop()


async def _first(one: Coroutine[None, None, object], other: Coroutine[None, None, object]) -> bool:
    """Whether `one` was done before `other`; the one that is late is cancelled."""
    tasks = [asyncio.create_task(one), asyncio.create_task(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _proxy(load: Load) -> AsyncIterator[tuple[Proxy, Loaded]]:
    loaded = load()
    settings = loaded.settings
    logs.configure(settings.log.format, settings.log.level)
    log = logs.get()
    _make_room_for_connections()
    is_patched("")  # reads the patches now: on a request's way there could be no descriptor left for them
    proxy = Proxy(settings, log, systemd.listening_socket())
    keepers = [asyncio.create_task(each) for each in (systemd.keep_watchdog(), memory.keep_small())]
    try:
        await proxy.start()
        for note in loaded.notes:
            log.warning("config_note", note=note)
        watch = asyncio.create_task(Reloader(proxy.state, loaded.path, load, log).watch())
        try:
            async with tracing(proxy.state.observer, os.environ, log):
                yield proxy, loaded
                await proxy.stop()  # so that what ends now is traced too
                log.info("stopped")
        finally:
            watch.cancel()
    finally:
        await proxy.stop()
        for keeper in keepers:
            keeper.cancel()


def _make_room_for_connections() -> None:
    """Raise the limit of open files to what this user may have: each request under way takes two."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says more than it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            os._exit(130)
        stopped.set()
        systemd.notify("STOPPING=1")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _greet(proxy: Proxy, loaded: Loaded, start: Start, more: Sequence[str] = ()) -> None:
    target = proxy.state.running.probe_target
    found = await discover(proxy.state.probe, target)
    if isinstance(found.probed, Topology):
        await proxy.state.probe.build(target)  # for the status
    with contextlib.suppress(OSError):  # a full disk, or nobody reads: no reason not to serve
        print("\n".join([*greeting(proxy.url, loaded, found, start), *more]), flush=True)
    memory.settle()
