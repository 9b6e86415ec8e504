"""Small requests that end after a few tokens and always give the same answer."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "that",
    "with",
    "his",
    "they",
    "from",
    "this",
    "have",
    "not",
)


def chat(text: str = "hello", tokens: int = 4, **more: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, **more}


def prose(words: int, seed: int | str) -> str:
    """Words of about one token each, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))
