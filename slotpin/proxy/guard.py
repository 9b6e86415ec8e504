"""Who is served: the host that a request is for, and the key that it brings."""

from __future__ import annotations

import re
from base64 import b64decode
from hmac import compare_digest
from ipaddress import ip_address

from slotpin.config import Listen
from slotpin.pinning.endpoints import is_loopback
from slotpin.proxy.headers import RequestHead
from slotpin.proxy.replies import Reply, error

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/]*))(?::[0-9]{0,5})?")
# What containers call the machine that they run on (Docker, Podman).
_OF_CONTAINERS = ("host.docker.internal", "host.containers.internal")
# Different hosts that are remembered as allowed; clients use one or two.
_REMEMBERED = 64


class Guard:
    """`on_loopback`: only this machine can connect, but so can a web page in its browser whose name was made to lead to
    127.0.0.1 (DNS rebinding). Only the `Host` header shows that slotpin is not meant."""

    def __init__(self, listen: Listen, *, on_loopback: bool) -> None:
        self._keys = [key.get_secret_value().encode() for key in listen.api_keys]
        self._names = [name.lower().removesuffix(".") for name in listen.allowed_hosts]
        self._checks_host = "*" not in self._names and (on_loopback or bool(self._names))
        self._allowed: set[bytes] = {b""}

    def refusal(self, head: RequestHead) -> Reply | None:
        """The answer to a request that is not served."""
        if self._checks_host and head.host not in self._allowed and not self._allow(head.host):
            shown = head.host.decode("ascii", "replace")
            return error(403, "host_not_allowed", f'this is no host of slotpin: "{shown}"; see listen.allowedHosts')
        # A browser asks with OPTIONS, and without a key, whether it may send one; llama-server does the same.
        if self._keys and head.method != "OPTIONS" and not self._has_key(head):
            message = "a key is needed: one of listen.apiKeys, as Authorization: Bearer KEY or x-api-key: KEY"
            asks = b'Basic realm="slotpin, any name and a key"' if _is_page(head) else b"Bearer"
            return error(401, "invalid_api_key", message, ((b"WWW-Authenticate", asks),))
        return None

    def _allow(self, host: bytes) -> bool:
        found = _HOST.fullmatch(host.decode("latin-1").lower())
        allowed = found is not None and self._is_allowed(found[1] or found[2].removesuffix("."))
        if allowed and len(self._allowed) < _REMEMBERED:
            self._allowed.add(host)
        return allowed

    def _is_allowed(self, name: str) -> bool:
        return (
            _is_address(name)  # nobody can make an address lead elsewhere
            or is_loopback(name)
            or name in _OF_CONTAINERS
            or any(name == own or (own.startswith(".") and f".{name}".endswith(own)) for own in self._names)
        )

    def _has_key(self, head: RequestHead) -> bool:
        scheme, _, token = (head.get(b"authorization") or b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        basic = _password(token) if scheme.lower() == b"basic" and _is_page(head) else b""
        sent = (bearer, basic, head.get(b"x-api-key") or b"")
        # All are compared, so that the time tells nothing.
        right = [compare_digest(each, key) for key in self._keys for each in sent]
        return any(right)


def _is_page(head: RequestHead) -> bool:
    """Whether a person looks with a browser, which knows passwords only. It sends them with what other sites ask for
    too, so they open nothing else."""
    path = head.target.partition(b"?")[0]
    return head.method in ("GET", "HEAD") and path in (b"/slotpin", b"/slotpin/", b"/slotpin/events")


def _password(token: bytes) -> bytes:
    """RFC 7617 section 2; the name does not matter."""
    try:
        return b64decode(token.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
