"""Base URLs: which server they mean, and whether two of them mean the same one."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


def server_root(base_url: str) -> str:
    """The URL in front of the server's own routes: without query, fragment, trailing slashes and one trailing `/v1`."""
    if socket := socket_path(base_url):
        return f"unix:{socket.removesuffix('/v1')}"
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme.lower()}://{parts.netloc}{path}"


def socket_path(url: str) -> str:
    """Of `unix:/path` and `unix:///path` the path; empty for what leads over TCP."""
    scheme, _, path = url.partition(":")
    if scheme.lower() != "unix":
        return ""
    return "/" + path.lstrip("/") if path.startswith("/") else path


def same_endpoint(one: str, other: str) -> bool:
    """Scheme, host, port and path decide; the loopback names are one host, the path's case counts."""
    return normalised(one) == normalised(other)


@lru_cache(maxsize=256)  # asked for each request
def normalised(base_url: str) -> tuple[str, str, int | None, str]:
    """The same for all spellings of one endpoint."""
    root = server_root(base_url)
    if socket := socket_path(root):
        return "unix", "", None, socket
    parts = urlsplit(root)
    host = (parts.hostname or "").lower()
    return (
        parts.scheme,
        "localhost" if host in _LOOPBACK else host,
        parts.port or _DEFAULT_PORTS.get(parts.scheme),
        parts.path,
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or an IP address without brackets is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
