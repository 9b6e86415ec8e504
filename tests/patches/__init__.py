"""Proofs of the patches 0003 and later: each fails on the stock llama-server and passes on the patched one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.support import llama


def patched_binary() -> Path:
    """The llama-server with the patches: `$SLOTPIN_PATCHED_SERVER`, else from the cache or built now."""
    return _binary("SLOTPIN_PATCHED_SERVER", "patched_binary")


def stock_binary() -> Path:
    """The llama-server without patches: `$SLOTPIN_STOCK_SERVER`, else from the cache or built now."""
    return _binary("SLOTPIN_STOCK_SERVER", "stock_binary" if hasattr(llama, "stock_binary") else "server_binary")


def _binary(variable: str, builder: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named)
    build: Callable[[], Path] = vars(llama)[builder]
    return build()
