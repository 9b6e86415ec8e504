"""What `slotpin verify` takes of the server."""

from __future__ import annotations

DEFAULT_TOKENS = 1000
LEAST_TOKENS = 100
ANSWER_TOKENS = 16


def cost(tokens: int = DEFAULT_TOKENS) -> int:
    """About how many prompt tokens both runs evaluate where no cache is lost."""
    return 2 * (tokens + tokens // 3 * 2 + 3 * ANSWER_TOKENS)
