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
# Also ours to write (Host, Content-Length) or ours to answer (Expect).
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
# Values of Connection that nearly all have.
_NAMES_NOTHING = frozenset({b"close", b"keep-alive", b"Keep-Alive"})
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_OWN_PREFIX = b"x-slotpin-"
# Two of them could be read in two ways.
_ONCE = frozenset({b"host", b"transfer-encoding"})


@dataclass(slots=True)
class RequestHead:
    """A request line and its headers, as sent. `target` is in origin form: path and query.

    Raises ValueError for a head that another server could read in another way: RFC 9112 sections 3.2 (one Host) and 6.1
    (no coding but chunked, and that not in HTTP/1.0).
    """

    method: str
    target: bytes
    headers: Headers
    http10: bool
    keep_alive: bool
    host: bytes = field(init=False)
    _first: dict[bytes, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._first = first = {}
        for name, value in self.headers:
            lowered = name.lower()
            if lowered not in first:
                first[lowered] = value
            elif lowered == b"connection":
                first[lowered] += b"," + value
            elif lowered in _ONCE:
                raise ValueError(f"there has to be one {name.decode('latin-1')} header")
        coding = first.get(b"transfer-encoding")
        if coding is not None and (self.http10 or coding.strip().lower() != b"chunked"):
            raise ValueError("this Transfer-Encoding is not served")
        host = first.get(b"host")
        if host is None and not self.http10:
            raise ValueError("there has to be one Host header")
        self.host = b"" if host is None else host.strip()

    def get(self, name: bytes) -> bytes | None:
        """First value of a header, of `Connection` all; `name` in lower case."""
        return self._first.get(name)

    @property
    def content_length(self) -> int | None:
        length = self._first.get(b"content-length")
        return None if length is None else int(length)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue`."""
        return not self.http10 and (self._first.get(b"expect") or b"").strip().lower() == b"100-continue"


@dataclass(slots=True)
class ResponseHead:
    """What of an answer's head matters here. `lines` are its end-to-end headers, ready to be sent.

    `length` None with `chunked` False: the body ends with the connection. `event_stream`: one that is not compressed,
    so that the message end can be seen in its bytes.
    """

    lines: bytes
    length: int | None
    chunked: bool
    event_stream: bool


def read_response(headers: Headers, dropped: frozenset[bytes] = HOP_BY_HOP) -> ResponseHead:
    """Of a head that the parser has accepted."""
    lines: list[bytes] = []
    length: int | None = None
    chunked = event_stream = encoded = False
    for name, value in headers:
        lowered = name.lower()
        if lowered in dropped:
            if lowered == b"transfer-encoding":
                chunked = True
            elif lowered == b"connection" and value not in _NAMES_NOTHING and dropped is HOP_BY_HOP:
                return read_response(headers, dropped | _named(v for n, v in headers if n.lower() == lowered))
            continue
        lines.append(name + b": " + value + b"\r\n")
        if lowered == b"content-length":
            length = int(value)
        elif lowered == b"content-type":
            event_stream = value.lower().startswith(b"text/event-stream")
        elif lowered == b"content-encoding":
            encoded = value.strip().lower() != b"identity"
    return ResponseHead(b"".join(lines), length, chunked, event_stream and not encoded)


def _named(values: Iterable[bytes]) -> frozenset[bytes]:
    """What `Connection` names, which is for this hop too. The framing is nobody's to drop."""
    return frozenset(token.strip().lower() for value in values for token in value.split(b",")) - {b"content-length"}


def upstream_head(
    head: RequestHead, target: bytes, host: bytes, body_length: int | None, authorization: bytes | None = None
) -> bytes:
    """The request head for the server. `body_length` None means that the body follows in chunks.

    `authorization` replaces the client's own credentials; empty, it takes them away.
    """
    lines = [b"%b %b HTTP/1.1\r\nHost: %b" % (head.method.encode(), target, host)]
    dropped = _NOT_FORWARDED
    if (connection := head.get(b"connection")) is not None and connection not in _NAMES_NOTHING:
        dropped |= _named((connection,))
    for name, value in head.headers:
        lowered = name.lower()
        if lowered in dropped or lowered.startswith(_OWN_PREFIX):
            continue
        if authorization is not None and lowered in _CREDENTIALS:
            continue
        lines.append(name + b": " + value)
    if authorization:
        lines.append(b"Authorization: " + authorization)
    if body_length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif body_length or head.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(b"Content-Length: %d" % body_length)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


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


def header_lines(headers: Iterable[Header]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def response_head(status: int, phrase: bytes, lines: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, phrase, lines)
