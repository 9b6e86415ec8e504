"""0001 and 0002: KV memory follows its use, and not one token or probability changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches.client import Client, JsonObject, completion, llama_server, prompt, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import Shape, full_attention, sliding_window, tiny_model

# KV of 32 KiB a token, so that blocks of it can be told from noise.
HEAVY = Shape(arch="llama", layers=8, heads=8, kv_heads=8, head_dim=128, embd=128, ff=128)
CONFIGURATIONS = [
    ("--flash-attn", "on", "--kv-unified"),
    ("--flash-attn", "on", "--no-kv-unified"),
    ("--flash-attn", "off", "--kv-unified"),
    ("--flash-attn", "off", "--no-kv-unified"),
    ("--flash-attn", "on", "--kv-unified", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
]
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


async def with_probabilities(client: Client, tokens: list[int], slot: int) -> JsonObject:
    """The greedy continuation with its probabilities, and how much was re-used."""
    answer = await client.post("/completion", completion(tokens, slot, 12) | {"n_probs": 3})
    return {key: answer[key] for key in ("tokens", "completion_probabilities")} | {
        "cache_n": answer["timings"]["cache_n"]
    }


async def story(client: Client) -> list[JsonObject]:
    """Two slots that grow in turn over several doublings, one saved, erased and restored, and one used again."""
    first, second = prompt(1, 1500), prompt(2, 900)
    answers = [
        await with_probabilities(client, first[:20], 0),
        await with_probabilities(client, first[:700], 0),
        await with_probabilities(client, second[:300], 1),
        await with_probabilities(client, first, 0),
        await with_probabilities(client, second, 1),
    ]
    await client.slot_action(0, "save", "slot")
    await client.slot_action(0, "erase", "slot")
    answers.append(await with_probabilities(client, second + first[:50], 1))
    await client.slot_action(0, "restore", "slot")
    answers.append(await with_probabilities(client, first + second[:100], 0))
    await client.slot_action(1, "erase", "slot")
    answers.append(await with_probabilities(client, first[:900], 1))
    return answers


@pytest.mark.parametrize("model", [full_attention, sliding_window], ids=["full", "sliding"])
@pytest.mark.parametrize("flags", CONFIGURATIONS, ids=lambda flags: "-".join(flags).replace("--", ""))
def test_every_token_and_probability_is_the_same(tmp_path: Path, model: Any, flags: tuple[str, ...]) -> None:
    stories = []

    async def tell(binary: Path, *more: str) -> None:
        folder = ("--slot-save-path", str(tmp_path), "--cache-ram", "0", "--no-cache-idle-slots")
        async with llama_server(binary, model(), "--ctx-size", "8192", *folder, *flags, *more) as client:
            stories.append(await story(client))

    run(tell(stock_binary()))
    for initial in ("0", "256", "1000"):
        run(tell(patched_binary(), "--slot-initial-ctx", initial))
    assert stories[0][3]["cache_n"] > 0
    for other in stories[1:]:
        assert other == stories[0]


def test_context_shift_is_the_same() -> None:
    answers = []

    async def tell(binary: Path, *more: str) -> None:
        flags = ("--ctx-size", "1024", "--no-kv-unified", "--parallel", "2", "--context-shift", *more)
        async with llama_server(binary, full_attention(), *flags) as client:
            answers.append((await client.complete(prompt(5, 400), 0, n_predict=400)).tokens)

    run(tell(stock_binary()))
    run(tell(patched_binary(), "--slot-initial-ctx", "256"))
    assert len(answers[0]) == 400
    assert answers[1] == answers[0]


def anonymous_mib(client: Client) -> float:
    text = Path(f"/proc/{client.server.pid}/smaps_rollup").read_text()
    found = re.search(r"^Anonymous: +(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@needs_proc
@pytest.mark.parametrize("attention", ["on", "off"])
def test_memory_follows_use_and_comes_back(tmp_path: Path, attention: str) -> None:
    context = 65536
    whole = context * 32 / 1024  # MiB
    flags = ("--ctx-size", str(context), "--flash-attn", attention, "--cache-ram", "0")

    async def proof() -> None:
        folder = ("--slot-save-path", str(tmp_path))
        async with llama_server(stock_binary(), tiny_model(HEAVY), *flags, *folder) as client:
            stock = anonymous_mib(client)
        lazy = ("--slot-initial-ctx", "4096", "--verbosity", "4")
        async with llama_server(patched_binary(), tiny_model(HEAVY), *flags, *folder, *lazy) as client:
            ready = anonymous_mib(client)
            assert ready < stock - 0.98 * whole
            await client.complete(prompt(1, 6000), 0, n_predict=1)
            used = anonymous_mib(client)
            assert used > ready + 6000 * 32 / 1024 * 0.9
            assert used < stock - 0.5 * whole
            await client.slot_action(0, "erase", "slot")
            assert anonymous_mib(client) < used - 6000 * 32 / 1024 * 0.6
            log = client.log()
        assert re.search(r"stream 0: 4096 -> \d+ cells \(batch\)", log), "growth is in the log"
        assert "slot erased, released" in log

    run(proof())


@needs_proc
def test_without_the_flag_nothing_changes() -> None:
    async def ready(binary: Path) -> float:
        async with llama_server(binary, tiny_model(HEAVY), "--ctx-size", "32768", "--cache-ram", "0") as client:
            return anonymous_mib(client)

    figures: list[float] = []

    async def proof() -> None:
        figures.append(await ready(stock_binary()))
        figures.append(await ready(patched_binary()))

    run(proof())
    assert abs(figures[0] - figures[1]) < 0.02 * figures[0]


@pytest.mark.parametrize("value", ["-1", "many", "99999999999"])
def test_an_absurd_value_is_an_error(value: str) -> None:
    command = [str(patched_binary()), "--model", str(full_attention()), "--slot-initial-ctx", value]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "slot-initial-ctx" in done.stderr


def test_the_server_says_that_it_is_patched() -> None:
    shown = [
        subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        for binary in (stock_binary(), patched_binary())
    ]
    texts = [done.stdout + done.stderr for done in shown]
    assert ["+slotpin." in text for text in texts] == [False, True]
