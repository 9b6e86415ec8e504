"""Message heads: what is forwarded, what is hop-by-hop, and how a head is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class RequestHead:
    """A request line and its headers, as sent. `target` is in origin form: path and query."""

    method: str
    target: bytes
    headers: Headers
    http10: bool
    keep_alive: bool
    host: bytes = b""
    _first: dict[bytes, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._first = {name.lower(): value for name, value in reversed(self.headers)}

    def get(self, name: bytes) -> bytes | None:
        """First value of a header; `name` in lower case."""
        return self._first.get(name)

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

    `authorization` replaces the client's own credentials; empty, it takes them away.
    """
    lines = [b"%s %s HTTP/1.1\r\nHost: %s" % (head.method.encode(), target, host)]
    for name, value in end_to_end(head.headers):
        lowered = name.lower()
        if lowered in _REQUEST_REWRITTEN or lowered.startswith(_OWN_PREFIX):
            continue
        if authorization is not None and lowered in (b"authorization", b"x-api-key"):
            continue
        lines.append(name + b": " + value)
    if authorization:
        lines.append(b"Authorization: " + authorization)
    if body_length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif body_length or head.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(b"Content-Length: %d" % body_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def with_forwarded(head: RequestHead, peer: str) -> RequestHead:
    """The head with who asked, and for which host: the de-facto X-Forwarded-* headers. `peer` is the client's address.

    What a proxy before slotpin has said is kept.
    """
    sent = {name.lower() for name, _ in head.headers}
    route = [value for name, value in head.headers if name.lower() == b"x-forwarded-for"]
    headers = [header for header in head.headers if header[0].lower() != b"x-forwarded-for"]
    if route or peer:
        headers.append((b"X-Forwarded-For", b", ".join([*route, peer.encode()] if peer else route)))
    for name, value in ((b"X-Forwarded-Host", head.host), (b"X-Forwarded-Proto", b"http")):
        if value and name.lower() not in sent:
            headers.append((name, value))
    return replace(head, headers=headers)


def via(http10: bool) -> Header:
    """RFC 9110 section 7.6.3: the version is the one that the message came in."""
    return b"Via", b"1.0 slotpin" if http10 else b"1.1 slotpin"


def check_request(headers: Headers, http10: bool) -> tuple[bytes, bool]:
    """The host, and whether the client waits for `100 Continue`. Raises ValueError for a head that another server could
    read in another way: RFC 9112 sections 3.2 (one Host) and 6.1 (no coding but chunked, and that not in HTTP/1.0)."""
    hosts: list[bytes] = []
    expects = False
    for name, value in headers:
        match name.lower():
            case b"host":
                hosts.append(value.strip())
            case b"expect":
                expects = not http10 and value.strip().lower() == b"100-continue"
            case b"transfer-encoding" if http10 or value.strip().lower() != b"chunked":
                raise ValueError("this Transfer-Encoding is not served")
    if len(hosts) > 1 or not (hosts or http10):
        raise ValueError("there has to be one Host header")
    return hosts[0] if hosts else b"", expects


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
