"""Requests with odd bytes, and what a proxy makes of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from tests.support.proxy import Client, Running, request
from tests.support.stub_upstream import LAST_CHUNK, Connection, Request, answer, chunk

BODY = b'{"messages":[{"role":"user","content":"h\\u00e9\xc3\xa9"}],"id_slot":-1,"stream":true}'
_CHUNKED = [b"Transfer-Encoding: chunked", b"Trailer: X-T"]
TEMPLATES = (
    request(
        "POST", "/v1/chat/completions?a=%20", BODY, [b"Authorization: Bearer k", b"Content-Type: application/json"]
    ),
    request("POST", "/main/v1/completions", None, _CHUNKED)
    + chunk(BODY[:20])
    + chunk(BODY[20:])
    + LAST_CHUNK.replace(b"\r\n\r\n", b"\r\nX-T: 1\r\n\r\n"),
    request("PUT", "/upload", BODY, [b"Connection: X-A, keep-alive", b"X-A: b", b"Expect: 100-continue"]),
    request("GET", "http://localhost/v1/models", None, [b"Connection: Upgrade", b"Upgrade: h2c"]),
    request("GET", "/slotpin/status", None, [b"X-Slotpin-Session: s"]) + request("OPTIONS", "*"),
)
ODD = (*(bytes([byte]) for byte in b"\0\t\n\r :,;%0/\x7f\x80\xff"), b"\r\n", b"\r\n\r\n", b"\r\n0\r\n\r\n")


def every_position() -> Iterator[bytes]:
    """Each odd piece put before, or in the place of, each byte of each template; and each byte left out."""
    for whole in TEMPLATES:
        for at in range(len(whole)):
            yield whole[:at] + whole[at + 1 :]
            for odd in ODD:
                yield whole[:at] + odd + whole[at:]
                yield whole[:at] + odd + whole[at + 1 :]


def at_random(chance: random.Random) -> Iterator[bytes]:
    while True:
        whole = bytearray(chance.choice(TEMPLATES))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(whole) + 1)
            match chance.randrange(5):
                case 0:
                    whole[at : at + 1] = chance.randbytes(1)
                case 1:
                    del whole[at : at + chance.randrange(1, 20)]
                case 2:  # a piece doubled
                    whole[at:at] = whole[at : at + chance.randrange(1, 60)]
                case 3:
                    whole[at:at] = chance.choice(ODD)
                case _:
                    whole[at:at] = chance.randbytes(chance.randrange(1, 40))
        yield bytes(whole)


def requests(count: int, seed: int) -> Iterator[bytes]:
    """As many at random as at every position; the latter are a sample where `count` is small."""
    chance = random.Random(seed)
    everywhere = list(every_position())
    yield from chance.sample(everywhere, min(count // 2, len(everywhere)))
    yield from islice(at_random(chance), count - min(count // 2, len(everywhere)))


async def clean(connection: Connection, got: Request) -> None:
    """The stub's script: whatever a client sends, the server gets nothing that it could read in two ways."""
    lines = got.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines), got.head
    assert len(got.get_all(b"host")) == 1, got.head
    assert len(got.get_all(b"content-length") + got.get_all(b"transfer-encoding")) <= 1, got.head
    await connection.send(answer())


async def throw(running: Running, data: bytes, patience: float) -> str:
    """One connection: its answer's status, "closed" or "incomplete". An answer has to be well-formed, and a connection
    that the client ends has to end on the other side too."""
    client = await Client.connect(running.port)
    try:
        client.send_nowait(data)
        method = data.partition(b" ")[0].decode("latin-1")
        try:
            async with asyncio.timeout(patience):
                while (response := await client.read_response(method)).status == 100:
                    pass
            return (
                f"{response.status} {response.get(b'X-Slotpin-Reason') or b''!r}"
                if response.status >= 500
                else str(response.status)
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"
        except TimeoutError:
            client.finish_sending()
            await asyncio.wait_for(client.read_all(), 5)
            return "incomplete"
    finally:
        client.leave()


def wrong(results: Counter[str]) -> dict[str, int]:
    """Connections without an answer to what was complete, and errors that are neither the server's nor a refusal."""
    return {
        name: count
        for name, count in results.items()
        if name == "closed" or (name.startswith("5") and "no_binding" not in name)
    }


async def throw_all(running: Running, attack: Iterator[bytes], patience: float, at_once: int = 32) -> Counter[str]:
    """How often each result came."""
    results: Counter[str] = Counter()

    async def worker() -> None:
        for data in attack:
            try:
                results[await throw(running, data, patience)] += 1
            except BaseException as problem:
                problem.add_note(repr(data))
                raise

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return results
