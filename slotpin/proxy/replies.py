"""Answers of slotpin's own, in OpenAI's error shape, which every client of llama-server understands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from slotpin.pinning.decision import Decision
from slotpin.pinning.message_end import Shape
from slotpin.pinning.reasons import EXPLANATIONS, explain
from slotpin.proxy.headers import Header

# A refusal that passes is gone with the next main request; asking sooner than this is no use.
RETRY_AFTER_SECONDS = 2

_PHRASES = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    409: b"Conflict",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
}


# Of an error text that is no JSON.
_SHOWN_BYTES = 2000


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    headers: tuple[Header, ...] = ()

    @property
    def phrase(self) -> bytes:
        return _PHRASES[self.status]


def error(status: int, code: str, message: str, headers: tuple[Header, ...] = ()) -> Reply:
    body = msgspec.json.encode(
        {"error": {"message": f"slotpin: {message}", "type": "slotpin_error", "param": None, "code": code}}
    )
    return Reply(status, body, ((b"Content-Type", b"application/json"), *headers))


BUG = error(500, "bug", "an error of slotpin's own; its log has the details")


def late_error(shape: Shape, status: int, body: bytes) -> bytes:
    """An error as an event, the way llama-server sends those that come up in a stream (format_error,
    tools/server/server-context.cpp). `body` is the error answer that the client can't get any more."""
    try:
        said = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:_SHOWN_BYTES].decode("utf-8", "replace")
        said = {"code": status, "message": text or f"HTTP{status}", "type": "server_error"}
    if shape is Shape.ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(said)
    return b"data: %b\n\n" % msgspec.json.encode({"error": said})


def refusal(decision: Decision) -> Reply:
    """409 for what only a person can change, 503 for what passes.

    The openai and anthropic packages try a 409 again unless told not to (`_should_retry` in their base client).
    """
    message = explain(decision.reason, decision.detail)
    if EXPLANATIONS[decision.reason].passes:
        return error(503, decision.reason, message, ((b"Retry-After", b"%d" % RETRY_AFTER_SECONDS),))
    return error(409, decision.reason, message, ((b"X-Should-Retry", b"false"),))
