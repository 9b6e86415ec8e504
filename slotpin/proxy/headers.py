"""Message heads: what is forwarded, what is hop-by-hop, and how a head is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Header = tuple[bytes, bytes]
Headers = list[Header]

# RFC 9110 section 7.6.1, and the proxy credentials of section 11.7, which are meant for one hop too.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Ours to write (Host, Content-Length) or ours to answer (Expect).
_REQUEST_REWRITTEN = frozenset({b"host", b"content-length", b"expect"})
_OWN_PREFIX = b"x-slotpin-"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request line and its headers, as sent. `target` is in origin form: path and query."""

    method: str
    target: bytes
    headers: Headers
    http10: bool
    keep_alive: bool

    def get(self, name: bytes) -> bytes | None:
        """First value of a header; `name` in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def content_length(self) -> int | None:
        return framing(self.headers)[0]


def end_to_end(headers: Headers) -> Headers:
    """The headers without the hop-by-hop ones, also without those that `Connection` names."""
    dropped = HOP_BY_HOP
    for name, value in headers:
        if name.lower() == b"connection":
            dropped = dropped.union(token.strip().lower() for token in value.split(b","))
            dropped -= {b"content-length"}  # the framing is nobody's to drop
    return [header for header in headers if header[0].lower() not in dropped]


def upstream_head(
    head: RequestHead, target: bytes, host: bytes, body_length: int | None, authorization: bytes | None = None
) -> bytes:
    """The request head for the server. `body_length` None means that the body follows in chunks.

    `authorization` replaces the client's own credentials.
    """
    lines = [b"%s %s HTTP/1.1\r\nHost: %s" % (head.method.encode(), target, host)]
    for name, value in end_to_end(head.headers):
        lowered = name.lower()
        if lowered in _REQUEST_REWRITTEN or lowered.startswith(_OWN_PREFIX):
            continue
        if authorization is not None and lowered in (b"authorization", b"x-api-key"):
            continue
        lines.append(name + b": " + value)
    if authorization is not None:
        lines.append(b"Authorization: " + authorization)
    if body_length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif body_length or head.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(b"Content-Length: %d" % body_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def response_head(status: int, reason: bytes, headers: Iterable[Header]) -> bytes:
    lines = [b"HTTP/1.1 %d %s" % (status, reason)]
    lines.extend(name + b": " + value for name, value in headers)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def framing(headers: Headers) -> tuple[int | None, bool]:
    """Content-Length and whether the body is chunked, of a head that the parser has accepted."""
    length = None
    chunked = False
    for name, value in headers:
        match name.lower():
            case b"content-length":
                length = int(value)
            case b"transfer-encoding":
                chunked = True
    return length, chunked
