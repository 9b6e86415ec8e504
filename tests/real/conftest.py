from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.servers import Llama, Slotpin, llama, slotpin

# Token ids of the tiny model for /infill, which it has no tokens of its own for.
FIM = {"pre": 3, "suf": 4, "mid": 5}
INFILL = ",".join(f"tokenizer.ggml.fim_{name}_token_id=int:{id}" for name, id in FIM.items())


@pytest.fixture(scope="module")
def two_slots() -> Iterator[Llama]:
    with llama("--override-kv", INFILL) as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path, two_slots: Llama) -> Iterator[Slotpin]:
    """enabled: auto, in front of `two_slots`; nothing has been asked of it yet."""
    with slotpin(tmp_path, two_slots.url) as running:
        yield running
