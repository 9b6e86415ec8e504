"""0007 and 0009: a broken slot file is an error; the server lives and the slot is as it was."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.patches.client import Answer, Client, ServerError, llama_server, prompt, run
from tests.support.llama import patched_binary, stock_binary
from tests.support.tiny_model import FULL, Shape, full_attention, sliding_window, tiny_model

LENGTH = 40
ANSWER = 4
CHECKSUM = 16  # bytes at the end of a slot file
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


async def next_answer(client: Client) -> Answer:
    """The next answer in slot 0; all is re-used, with a sliding window up to the last checkpoint."""
    answer = await client.complete(prompt(1, LENGTH), 0, ANSWER)
    assert answer.prompt_n <= 5
    return answer


async def assert_unchanged(client: Client, expected: Answer) -> None:
    assert await client.slot_tokens() == [LENGTH + ANSWER - 1, 0]
    assert await next_answer(client) == expected


def truncated(good: bytes) -> Iterator[bytes]:
    """In all of the header and the cells' positions, then now and then; and a file that is too long.

    Cut off before the checksum it would be a complete file of an older server.
    """
    for length in [*range(0, 800, 3), *range(800, len(good), len(good) // 50), len(good) - 1]:
        if length != len(good) - CHECKSUM:
            yield good[:length]
    yield good + b"\0"


@pytest.mark.parametrize("flags", LAYOUTS, ids=" ".join)
@pytest.mark.parametrize("model", MODELS)
def test_a_file_of_the_wrong_length_changes_nothing(
    model: Callable[[], Path], flags: tuple[str, ...], tmp_path: Path
) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), model(), tmp_path, *flags) as client:
            expected = await next_answer(client)
            for data in truncated((tmp_path / "good").read_bytes()):
                for slot in (0, 1):
                    assert not await restore(client, tmp_path, slot, data), f"{len(data)} bytes, slot {slot}"
            await assert_unchanged(client, expected)

    run(proof())


def test_a_missing_file_changes_nothing(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), full_attention(), tmp_path) as client:
            expected = await next_answer(client)
            with pytest.raises(ServerError, match="Unable to restore slot"):
                await client.slot_action(0, "restore", "nowhere")
            await assert_unchanged(client, expected)

    run(proof())


def test_a_file_of_another_model_changes_nothing(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), tiny_model(OTHER_MODEL), tmp_path):
            foreign = (tmp_path / "good").read_bytes()
        async with two_slots(patched_binary(), full_attention(), tmp_path) as client:
            expected = await next_answer(client)
            assert not await restore(client, tmp_path, 0, foreign)
            await assert_unchanged(client, expected)

    run(proof())


def damaged(good: bytes, source: random.Random) -> bytes:
    """One to four 32-bit words are other ones; mostly early in the file, where everything but the numbers is."""
    data = bytearray(good)
    for _ in range(source.choice((1, 1, 4))):
        offset = 4 * source.randrange(source.choice((60, 200, len(good) // 4)))
        value = source.choice((0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF, source.getrandbits(32)))
        struct.pack_into("=I", data, offset, value)
    return bytes(data)


def state(data: bytes) -> bytes:
    """What follows the tokens (llama_context::state_seq_save_file)."""
    return data[12 + 4 * struct.unpack_from("=I", data, 8)[0] :]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_refused_or_harmless(model: Callable[[], Path], seed: int, tmp_path: Path) -> None:
    """A wrong token is harmless: the prompt that comes has another one there, and nothing behind it is re-used."""

    async def proof() -> None:
        source = random.Random(seed)
        async with two_slots(patched_binary(), model(), tmp_path) as client:
            good = (tmp_path / "good").read_bytes()
            right = (await client.complete(prompt(0, LENGTH), 1, ANSWER, cache_prompt=False)).tokens
            await client.post("/slots/1?action=erase", {})
            expected = await next_answer(client)
            for _ in range(100):
                data = damaged(good, source)
                if await restore(client, tmp_path, 0, data):
                    assert state(data) == state(good)
                    assert (await client.complete(prompt(0, LENGTH), 0, ANSWER)).tokens == right
                    await client.complete(prompt(1, LENGTH), 0, ANSWER)
                    expected = await next_answer(client)
                else:
                    await assert_unchanged(client, expected)
            await client.slot_action(1, "restore", "good")
            assert (await client.complete(prompt(0, LENGTH), 1, ANSWER)).tokens == right

    run(proof())


def test_a_file_without_checksum_is_accepted(tmp_path: Path) -> None:
    """As a server without the patch writes it."""

    async def proof() -> None:
        async with two_slots(stock_binary(), full_attention(), tmp_path):
            older = (tmp_path / "good").read_bytes()
        async with two_slots(patched_binary(), full_attention(), tmp_path) as client:
            assert len((tmp_path / "good").read_bytes()) > len(older)
            assert await restore(client, tmp_path, 1, older)
            assert (await client.complete(prompt(0, LENGTH), 1, ANSWER)).cache_n == LENGTH - 1

    run(proof())


def test_stock_server_reads_a_file_with_checksum(tmp_path: Path) -> None:
    async def proof() -> None:
        async with two_slots(patched_binary(), full_attention(), tmp_path):
            newer = (tmp_path / "good").read_bytes()
        async with two_slots(stock_binary(), full_attention(), tmp_path) as client:
            assert await restore(client, tmp_path, 1, newer)
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
