"""The answer through slotpin is the answer of the server, byte by byte."""

from __future__ import annotations

import re

import pytest

from tests.real.client import Answer, fetch
from tests.real.prompts import chat
from tests.real.servers import Llama, Slotpin

CHAT = "/v1/chat/completions"
# What differs from one answer to the next of the server itself.
VOLATILE = [
    rb'"timings":\{[^}]*\}',
    rb'"created(?:_at)?":\d+',
    rb'"completed_at":\d+',
    rb'"(?:id|item_id)":"[^"]*"',
]

OF_A_CONNECTION = {"connection", "keep-alive"}

PLAIN = b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":6,"temperature":0%s}'
ODD = [
    PLAIN % b"",
    b'\t{ "messages" :\r\n[ {"role" : "user", "content":"\\u0068\\u00e9\\ud83d\\ude00\\/ \\"}{"}] ,'
    b'\r"max_tokens":6,\n"temperature" :0}\n ',
    PLAIN % b',"metadata":{"id_slot":7,"cache_prompt":false},"top_p":1e0',
    '{"messages":[{"role":"user","content":"żółw 🐢 日本"}],"max_tokens":6,"temperature":0}'.encode(),
    PLAIN % b',"id_slot":null,"cache_prompt":null',
    PLAIN % b',"max_tokens":5,"seed":18446744073709551615',
    PLAIN % b',"stop":["id_slot\\":1"],"logit_bias":[]',
]
PATHS = {
    CHAT: PLAIN % b"",
    "/v1/completions": b'{"prompt":"hello","max_tokens":6,"temperature":0}',
    "/completion": b'{"prompt":"hello","n_predict":6,"temperature":0}',
    "/v1/responses": b'{"input":"hello","max_output_tokens":6,"temperature":0}',
    "/v1/messages": PLAIN % b"",
}


def normalised(answer: Answer) -> bytes:
    body = answer.body
    for pattern in VOLATILE:
        body = re.sub(pattern, b"", body)
    return body


def streamed(body: bytes) -> bytes:
    return body.replace(b"{", b'{"stream":true,', 1)


def assert_same(proxy: Slotpin, server: Llama, path: str, body: bytes) -> Answer:
    fetch(server.url + path, body.replace(b"{", b'{"id_slot":0,"cache_prompt":true,', 1))  # its prompt is in slot 0 now
    through, direct = fetch(proxy.url + path, body), fetch(server.url + path, body)
    assert through.status == direct.status == 200, through
    assert normalised(through) == normalised(direct)
    ours = {name for name in through.headers if not name.startswith("x-slotpin-")}
    assert ours - OF_A_CONNECTION == direct.headers.keys() - OF_A_CONNECTION
    return through


@pytest.mark.parametrize("path", PATHS)
def test_each_route_s_answer(proxy: Slotpin, two_slots: Llama, path: str) -> None:
    for body in (PATHS[path], streamed(PATHS[path])):
        assert_same(proxy, two_slots, path, body)


@pytest.mark.parametrize("body", ODD)
def test_each_odd_body_s_answer(proxy: Slotpin, two_slots: Llama, body: bytes) -> None:
    for variant in (body, streamed(body)):
        answer = assert_same(proxy, two_slots, CHAT, variant)
        assert (answer.slot, answer.reason) == (0, "pinned")


def test_a_body_that_is_no_json_is_refused_by_the_server(proxy: Slotpin, two_slots: Llama) -> None:
    for body in (b"{", b"", b"[1]", b"hello", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":3,}'):
        through, direct = fetch(proxy.url + CHAT, body), fetch(two_slots.url + CHAT, body)
        assert (through.status, through.body) == (direct.status, direct.body)
        assert through.status >= 400


def test_a_long_head_is_taken_as_by_the_server(proxy: Slotpin, two_slots: Llama) -> None:
    """cpp-httplib takes 100 lines of 8 KiB; what is beyond that is the server's to refuse."""
    for count in (1, 90, 120):
        headers = {f"X-Long-{number}": "v" * 8000 for number in range(count)}
        through, direct = (fetch(f"{each.url}/v1/models", headers=headers) for each in (proxy, two_slots))
        assert through.status == direct.status
        assert (through.status == 200) is (count <= 90)


def test_the_server_s_complaint_of_a_field_comes_through(proxy: Slotpin, two_slots: Llama) -> None:
    body = chat(cache_prompt="yes")
    through, direct = fetch(proxy.url + CHAT, body), fetch(two_slots.url + CHAT, body)
    assert (through.status, through.body) == (direct.status, direct.body)
    assert through.status == 400
    assert proxy.bindings == (0, 0)
