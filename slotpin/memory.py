"""Memory that is not used any more goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

TRIM_SECONDS = 30.0


def settle() -> None:
    """What is here now stays: to look through it again and again for garbage stops every stream for 40 ms."""
    gc.collect()
    gc.freeze()


async def keep_small() -> None:
    """glibc keeps what large bodies took, in case there are more: 26 MB after one of 20 MB, for ever.

    Thresholds of its own would give it back at once (mallopt(3)), and a large body would take up to a third longer.
    """
    trim = _malloc_trim()
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        gc.collect(1)  # what holds a body in a circle
        trim(0)


def _malloc_trim() -> Callable[[int], int] | None:
    """Only glibc has it."""
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
    return trim
