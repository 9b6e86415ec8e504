"""A request's path: the role that it names, what goes to the server, and whether that generates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from slotpin.pinning.message_end import Shape
from slotpin.pinning.roles import Role

# The routes that evaluate a prompt in a slot (llama.cpp tools/server/server.cpp).
_SHAPES = {
    b"/chat/completions": Shape.CHAT,
    b"/v1/chat/completions": Shape.CHAT,
    b"/v1/completions": Shape.CHAT,
    b"/completions": Shape.NATIVE,  # without /v1 the server answers in its own form
    b"/completion": Shape.NATIVE,
    b"/v1/completion": Shape.NATIVE,
    b"/infill": Shape.NATIVE,
    b"/v1/infill": Shape.NATIVE,
    b"/responses": Shape.RESPONSES,
    b"/v1/responses": Shape.RESPONSES,
    b"/messages": Shape.ANTHROPIC,
    b"/v1/messages": Shape.ANTHROPIC,
}


@dataclass(frozen=True, slots=True)
class Route:
    """`target` is the server's path and query, as sent. `shape` is None for what is only passed on."""

    role: Role | None
    target: bytes
    shape: Shape | None


# Clients ask for a few targets again and again; more than this are only remembered for a while.
@lru_cache(256)
def read_route(method: str, target: bytes) -> Route:
    """Read a request target in origin form: `/compactor/v1/models?x` is compactor and `/v1/models?x`."""
    path, question, query = target.partition(b"?")
    role, path = _split_role(path)
    # llama-server decodes a path before it routes it (cpp-httplib): this is what it will see.
    shape = _SHAPES.get(unquote_to_bytes(path)) if method == "POST" else None
    return Route(role, path + question + query, shape)


def _split_role(path: bytes) -> tuple[Role | None, bytes]:
    for role in Role:
        prefix = b"/" + role.encode()
        if path == prefix or path.startswith(prefix + b"/"):
            return role, path[len(prefix) :] or b"/"
    return None, path
