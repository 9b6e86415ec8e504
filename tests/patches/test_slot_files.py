"""0007: a broken slot file is an error; the server lives and the slot is as it was."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.patches import patched_binary, stock_binary
from tests.patches.client import Client, ServerError, llama_server, prompt, run
from tests.support.tiny_model import FULL, Shape, full_attention, sliding_window, tiny_model

LENGTH = 40
ANSWER = 4
OTHER_MODEL = Shape(arch=FULL.arch, layers=FULL.layers + 1)
MODELS = [full_attention, sliding_window]
LAYOUTS = [("--kv-unified",), ("--no-kv-unified",), ("--flash-attn", "off")]


@asynccontextmanager
async def two_slots(binary: Path, model: Path, folder: Path, *flags: str) -> AsyncIterator[Client]:
    """Conversation 0 was saved to the file `good`; slot 0 holds conversation 1 now, slot 1 nothing."""
    flags = ("--ctx-size", "1024", "--slot-save-path", f"{folder}/", *flags)
    async with llama_server(binary, model, *flags) as client:
        await client.complete(prompt(0, LENGTH), 0, ANSWER)
        await client.slot_action(0, "save", "good")
        await client.complete(prompt(1, LENGTH), 0, ANSWER)
        yield client


async def restore(client: Client, folder: Path, slot: int, data: bytes) -> bool:
    """Whether the server accepts the file."""
    (folder / "broken").write_bytes(data)
    try:
        await client.slot_action(slot, "restore", "broken")
    except ServerError as refused:
        assert refused.status == 400, refused
        assert "Unable to restore slot" in refused.text
        return False
    return True


async def assert_unchanged(client: Client) -> None:
    assert await client.slot_tokens() == [LENGTH + ANSWER - 1, 0]
    # A prefix of what the slot holds; nothing but the last token is evaluated.
    answer = await client.complete(prompt(1, LENGTH), 0, ANSWER)
    assert (answer.cache_n, answer.prompt_n) == (LENGTH - 1, 1)


def truncated(good: bytes) -> Iterator[bytes]:
    """In all of the header and the cells' positions, then now and then; and a file that is too long."""
    for length in [*range(0, 800, 3), *range(800, len(good), len(good) // 50), len(good) - 1]:
        yield good[:length]
    yield good + b"\0"


@pytest.mark.parametrize("flags", LAYOUTS, ids=" ".join)
@pytest.mark.parametrize("model", MODELS)
def test_a_file_of_the_wrong_length_changes_nothing(
    model: Callable[[], Path], flags: tuple[str, ...], tmp_path: Path
) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), model(), tmp_path, *flags) as client:
            for data in truncated((tmp_path / "good").read_bytes()):
                for slot in (0, 1):
                    assert not await restore(client, tmp_path, slot, data), f"{len(data)} bytes, slot {slot}"
            await assert_unchanged(client)

    run(proof())


def test_a_missing_file_changes_nothing(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), full_attention(), tmp_path) as client:
            with pytest.raises(ServerError, match="Unable to restore slot"):
                await client.slot_action(0, "restore", "nowhere")
            await assert_unchanged(client)

    run(proof())


def test_a_file_of_another_model_changes_nothing(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), tiny_model(OTHER_MODEL), tmp_path):
            foreign = (tmp_path / "good").read_bytes()
        async with two_slots(patched_binary(), full_attention(), tmp_path) as client:
            assert not await restore(client, tmp_path, 0, foreign)
            await assert_unchanged(client)

    run(proof())


def words_of_structure(good: bytes) -> range:
    """Offsets of the 32-bit words before the cells' contents: header, tokens, counts and positions."""
    payload = struct.unpack_from("=I", good, 8)[0]
    cells = 3 * 4 * (LENGTH + ANSWER - 1)
    return range(0, 12 + 4 * payload + 8 + cells, 4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_damage_never_ends_the_server(model: Callable[[], Path], seed: int, tmp_path: Path) -> None:
    """Damage that leaves a well-formed file (another token, another number) can't be noticed: there is no checksum."""

    async def proof() -> None:
        source = random.Random(seed)
        async with two_slots(patched_binary(), model(), tmp_path) as client:
            good = (tmp_path / "good").read_bytes()
            for _ in range(60):
                data = bytearray(good)
                for _ in range(source.choice((1, 1, 4))):
                    offset = source.choice(words_of_structure(good))
                    value = source.choice((0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF, source.getrandbits(32)))
                    struct.pack_into("=I", data, offset, value)
                if await restore(client, tmp_path, 0, bytes(data)):
                    # Use what was restored, then have the old conversation back.
                    await client.complete(prompt(0, LENGTH), 0, ANSWER)
                    await client.complete(prompt(1, LENGTH), 0, ANSWER, cache_prompt=False)
                else:
                    await assert_unchanged(client)
            assert client.alive()
            await client.slot_action(1, "restore", "good")
            assert (await client.complete(prompt(0, LENGTH), 1, ANSWER)).cache_n == LENGTH - 1

    run(proof())


def test_stock_server_dies_of_a_truncated_file(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(stock_binary(), full_attention(), tmp_path) as client:
            good = (tmp_path / "good").read_bytes()
            (tmp_path / "broken").write_bytes(good[: len(good) // 2])
            with pytest.raises(ServerError) as gone:
                await client.slot_action(0, "restore", "broken")
            assert gone.value.status == 0
            await client.server.wait()

    run(proof())


def test_stock_server_clears_the_slot_for_a_missing_file(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(stock_binary(), full_attention(), tmp_path) as client:
            with pytest.raises(ServerError):
                await client.slot_action(0, "restore", "nowhere")
            assert (await client.slot_tokens())[0] == 0

    run(proof())
