"""Which conversation a request belongs to, as far as the client says so."""

from __future__ import annotations

from collections.abc import Callable

# Session ids that stay the same over a conversation, most trusted first. An id that changes with every request (such as
# `x-client-request-id`) is no identity.
SESSION_HEADERS = (b"x-slotpin-session", b"x-session-affinity", b"session_id", b"x-claude-code-session-id")


def named_conversation(header: Callable[[bytes], bytes | None]) -> str:
    """The client's own session id, or empty. `header` looks one up by its name in lower case."""
    for name in SESSION_HEADERS:
        if value := header(name):
            return value.decode("latin-1")
    return ""
