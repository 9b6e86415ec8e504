"""Requests for `bench.fuzz`: whole ones of every route and framing, and ways to damage them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHAT = {"model": "local", "messages": [{"role": "user", "content": "case CASENUMB: what is a slot?"}], "max_tokens": 4}
TEXT = {"model": "local", "prompt": "case CASENUMB: once upon a time", "n_predict": 4, "cache_prompt": True}
ANTHROPIC = {**CHAT, "system": [{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}]}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "temperature": 0.5, "tools": [], "n": 1},
    "/chat/completions": {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    "/main/v1/chat/completions": {**CHAT, "id_slot": 3, "prompt_cache_key": "key-CASENUMB"},
    "/compactor/v1/chat/completions": {**CHAT, "cache_prompt": False},
    "/v1/completions": {**TEXT, "stream": True},
    "/completion": {**TEXT, "id_slot": -1},
    "/infill": {"input_prefix": "def f(", "input_suffix": "):\n    return CASENUMB\n", "n_predict": 4},
    "/v1/responses": {
        "model": "local",
        "input": [{"role": "user", "content": "case CASENUMB"}],
        "instructions": "Be terse.",
    },
    "/v1/messages": {**ANTHROPIC, "metadata": {"user_id": "user_1_account__session_0a1b2c3d-CASENUMB"}},
    "/v1/embeddings": {"input": "case CASENUMB"},
    "/tokenize": {"content": "case CASENUMB"},
    "/slotpin/forget": {},
}
GETS = ("/v1/models", "/slots", "/props", "/health", "/slotpin/status", "/slotpin/health", "/")
COMMON = (b"Host: localhost", b"X-Slotpin-Session: fuzz-CASENUMB", b"Authorization: Bearer sk-fuzz", b"Accept: */*")
SMUGGLED = b"GET /smuggled?case=CASENUMB HTTP/1.1\r\nHost: localhost\r\n\r\n"

# Bytes that mean something to somebody who reads a head, JSON, or text.
ODD_BYTES = tuple(b'\x00\r\n \t:;,"\\{}[]/?%0-\x7f\x80\xc3\xed\xff')
ODD_TEXTS = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\n\n",
        b"\r\n ",
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xc0\xaf",
        b"\\ud800",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"content-length:0\r\n", b"Content-Length : 3\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"transfer-encoding:\x0bchunked\r\n"),
    *(b"Transfer-Encoding: chunked, chunked\r\n", b"Transfer-Encoding: xchunked\r\n", b"TE: trailers\r\n"),
    *(b"Connection: close\r\n", b"Connection: Content-Length, Host\r\n", b"Connection: keep-alive\r\n"),
    *(b"Expect: 100-continue\r\n", b"Expect: \xff\r\n", b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"),
    *(
        b"X-Slotpin-Role: compactor\r\n",
        b"X-Slotpin-Role: \xe9\r\n",
        b"X-Slotpin-Session: \x80\r\n",
        b"Host: other\r\n",
    ),
    *(
        b"99999999999999999999999999",
        b"-1",
        b"0x10",
        b"+5",
        b"1e400",
        b"NaN",
        b"Infinity",
        b"-0",
        b"1_000",
        b"00000000005",
    ),
    *(
        b'"id_slot":1,',
        b'"id_slot":"1",',
        b'"id_slot":1e400,',
        b'"id_slot":99999999999999999999,',
        b'"\\u0069d_slot":2,',
    ),
    *(
        b'"stream":true,',
        b'"n":1000000,',
        b'"messages":null,',
        b'"messages":{},',
        b'"cache_prompt":"x",',
        b'"model":[],',
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b",",
        b":",
        b"null",
        b"true",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        SMUGGLED,
    ),
)
DEPTHS = (10, 1_000, 100_000)


@dataclass(frozen=True, slots=True)
class Seed:
    """A request that is in order. `head` without its empty line; `sized`: its body goes with a Content-Length."""

    head: bytes
    body: bytes = b""
    sized: bool = True

    @property
    def raw(self) -> bytes:
        return self.head + b"\r\n\r\n" + self.body

    def with_body(self, body: bytes) -> Seed:
        """The length, where it is said, made to fit."""
        head = re.sub(rb"(?<=Content-Length: )\d+", b"%d" % len(body), self.head) if self.sized else self.head
        return Seed(head, body, self.sized)


@dataclass(frozen=True, slots=True)
class Case:
    """`complete`: its head is in order and all of its body is there, so that it has to be answered."""

    number: int
    raw: bytes
    kind: str
    complete: bool = False


def seed_of(
    method: bytes, path: str, body: bytes | None = None, *extra: bytes, version: bytes = b"1.1", chunks: bytes = b""
) -> Seed:
    joint = b"&" if "?" in path else b"?"
    lines = [b"%b %b%bcase=CASENUMB HTTP/%b" % (method, path.encode(), joint, version), *COMMON, *extra]
    if chunks:
        return Seed(b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]), chunks, sized=False)
    if body is None:
        return Seed(b"\r\n".join(lines))
    return Seed(b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]), body)


def chunked(body: bytes, *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    pieces = [body[at : at + 40] for at in range(0, len(body), 40)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return framed + b"0\r\n" + trailers + b"\r\n"


def _seeds() -> list[Seed]:
    bodies = {path: json.dumps(body).encode() for path, body in BODIES.items()}
    chat, json_type = bodies["/v1/chat/completions"], b"Content-Type: application/json"
    path = "/v1/chat/completions"
    found = [seed_of(b"POST", each, body, json_type) for each, body in bodies.items()]
    found += [seed_of(b"GET", each) for each in GETS]
    found += [
        seed_of(b"HEAD", "/v1/models"),
        seed_of(b"OPTIONS", path, None, b"Origin: http://x", b"Access-Control-Request-Method: POST"),
        seed_of(b"DELETE", "/v1/x"),
        seed_of(b"GET", "http://fuzz/v1/models"),
        seed_of(b"POST", "/v1/chat%2Fcompletions", chat),
        seed_of(b"POST", path, b""),
        seed_of(b"POST", path, chat, b"Expect: 100-continue"),
        seed_of(b"POST", path, chat, b"Connection: close, x-gone", b"X-Gone: yes"),
        seed_of(b"POST", path, chat, b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AA"),
        seed_of(b"POST", path, chat, b"X-Slotpin-Role: compactor"),
        seed_of(b"POST", path, chat, version=b"1.0"),
        seed_of(b"POST", path, chat, b"Connection: keep-alive", version=b"1.0"),
        seed_of(b"POST", path, chunks=chunked(chat)),
        seed_of(b"POST", path, chunks=chunked(chat, extension=b";name=value", trailers=b"X-Trailer: 1\r\n")),
        seed_of(b"POST", "/tokenize", chunks=chunked(bodies["/tokenize"])),
        seed_of(b"POST", path, chat + b"   \r\n"),
        seed_of(b"POST", path, SMUGGLED),
    ]
    return found


SEEDS: Sequence[Seed] = _seeds()
Damage = Callable[[random.Random, bytearray], None]


def _flip(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] = chance.choice(ODD_BYTES)


def _insert(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(ODD_TEXTS)


def _insert_line(chance: random.Random, data: bytearray) -> None:
    """Where a header line may stand, as far as there are any."""
    ends = [match.end() for match in re.finditer(rb"\r\n", bytes(data))] or [0]
    at = chance.choice(ends)
    data[at:at] = chance.choice(ODD_TEXTS)


def _delete(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 1, 2, 8, 64))]


def _repeat(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    piece = data[at : at + chance.choice((1, 4, 32, 256))]
    data[at:at] = piece * chance.choice((1, 1, 2, 1000))


def _swap(chance: random.Random, data: bytearray) -> None:
    one, other = chance.randrange(len(data)), chance.randrange(len(data))
    data[one], data[other] = data[other], data[one]


def _number(chance: random.Random, data: bytearray) -> None:
    if found := list(re.finditer(rb"\d+", bytes(data))):
        place = chance.choice(found)
        data[place.start() : place.end()] = chance.choice(ODD_TEXTS[-44:-34])


def _nest(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    depth, (opening, closing) = chance.choice(DEPTHS), chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")))
    data[at:at] = opening * depth + b"1" + closing * depth


def _truncate(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(len(data)) :]


DAMAGES: tuple[Damage, ...] = (
    _flip,
    _replace,
    _insert,
    _insert_line,
    _delete,
    _repeat,
    _swap,
    _number,
    _nest,
    _truncate,
)
_WEIGHTS = (4, 4, 4, 4, 3, 2, 1, 3, 0.3, 1)


def make_case(number: int, seed: int) -> Case:
    """The same for the same numbers. Every other case is one odd byte in one place, in such an order that any number
    of cases covers all seeds and places evenly; the rest are damaged in several ways."""
    chance = random.Random(f"{seed}.{number}")
    case = _swept(number // 2, chance) if number % 2 else _damaged(chance)
    return Case(number, case.raw.replace(b"CASENUMB", b"%08d" % number), case.kind, case.complete)


def _swept(index: int, chance: random.Random) -> Case:
    places = [(seed, at) for seed in (SEEDS[index % len(SEEDS)],) for at in range(len(seed.raw))]
    # A step that shares no factor with the count visits every place before any comes again.
    seed, at = places[index // len(SEEDS) * 7919 % len(places)]
    raw = bytearray(seed.raw)
    raw[at] = chance.choice(ODD_BYTES)
    in_body = at >= len(seed.head) + 4
    return Case(0, bytes(raw), "odd byte in the body" if in_body else "odd byte in the head", in_body and seed.sized)


def _damaged(chance: random.Random) -> Case:
    seed = chance.choice(SEEDS)
    damages = chance.choices(DAMAGES, _WEIGHTS, k=chance.choice((1, 1, 2, 3, 5)))
    if seed.body and chance.random() < 0.5:
        body = bytearray(seed.body)
        for damage in damages:
            if body:
                damage(chance, body)
        return Case(0, seed.with_body(bytes(body)).raw, "body damaged, length fits", seed.sized)
    raw = bytearray(seed.raw)
    if chance.random() < 0.1:
        raw += chance.choice((SMUGGLED, chance.choice(SEEDS).raw))
    for damage in damages:
        if raw:
            damage(chance, raw)
    return Case(0, bytes(raw), "damaged anywhere")
