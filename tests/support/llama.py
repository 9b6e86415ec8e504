"""A real llama-server for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from slotpin.llama.build import BuildOptions, build_server
from slotpin.llama.cache import server_log
from slotpin.llama.launch import LlamaServer, free_port, server_args

HOST = "127.0.0.1"


@cache
def stock_binary() -> Path:
    """The packaged source's llama-server without patches, from the cache or built now (minutes)."""
    return build_server(BuildOptions(patches="none"), print).path


@cache
def patched_binary() -> Path:
    """The same with all patches. Both share their objects."""
    stock_binary()  # first, so that what they share is built once
    return build_server(BuildOptions(), print).path


@asynccontextmanager
async def running_server(
    model: Path, *flags: str, binary: Path | None = None, port: int | None = None
) -> AsyncIterator[LlamaServer]:
    """A llama-server that has loaded `model`, with two slots, then `flags`, which win; stopped at the end.

    Without `binary` it is the stock one, without `port` it gets one that is free; `base_url` has no `/v1`.
    """
    port = port or free_port(HOST, 0)
    args = server_args(model, HOST, port, parallel=2, extra=flags)
    server = LlamaServer(binary or stock_binary(), args, HOST, port, server_log(port))
    try:
        await server.start()
        await server.wait_ready()
        yield server
    finally:
        await server.stop()
