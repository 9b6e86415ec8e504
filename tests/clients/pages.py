"""The code blocks of the clients' pages, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "clients"
NAMES = tuple(sorted(page.stem for page in PAGES.glob("*.md")))
URL = "http://127.0.0.1:8484"
"""Where slotpin listens on each page."""
MODEL = "gemma-3-270m-q4_k_m"
"""The model's name on each page; a server of the tests gets it by --alias."""
_BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def all_blocks(name: str) -> list[tuple[str, str]]:
    """Each block of a page: its language, empty where it has none, and its lines without their common indent."""
    text = (PAGES / f"{name}.md").read_text()
    return [
        (language, re.sub(rf"^{indent}", "", block, flags=re.MULTILINE))
        for indent, language, block in _BLOCK.findall(text)
    ]


def blocks(name: str, language: str) -> list[str]:
    return [block for found, block in all_blocks(name) if found == language]
