"""Which role a path names, what the server gets of it, and whether that generates."""

from __future__ import annotations

import pytest

from slotpin.pinning.message_end import Shape
from slotpin.pinning.roles import Role
from slotpin.pinning.route import Route, read_route

# Where llama-server has the route in both forms, the one without /v1 is its own, and so is its answer (server.cpp).
GENERATING = {
    "/v1/chat/completions": Shape.CHAT,
    "/chat/completions": Shape.CHAT,
    "/v1/completions": Shape.CHAT,
    "/completions": Shape.NATIVE,
    "/completion": Shape.NATIVE,
    "/infill": Shape.NATIVE,
    "/v1/responses": Shape.RESPONSES,
    "/responses": Shape.RESPONSES,
    "/v1/messages": Shape.ANTHROPIC,
    "/messages": Shape.ANTHROPIC,
}

RELAYED = """
    / /v1 /v1/ /health /v1/models /props /slots /slots/0 /metrics /tokenize /detokenize /v1/embeddings
    /embedding /rerank /v1/messages/count_tokens /v1/chat/completions/control
    /v1/chat/completions/input_tokens /responses/input_tokens /apply-template /v1/audio/transcriptions
    /v1/streams/lookup /v2/chat/completions /v1/v1/chat/completions /next-year /v1/chat/completionsx /v1/chat
    /completions/x
"""


@pytest.mark.parametrize(("path", "shape"), GENERATING.items())
@pytest.mark.parametrize("role", [None, *Role])
@pytest.mark.parametrize("query", ["", "?", "?a=/compactor/&b"])
def test_what_generates(path: str, shape: Shape, role: Role | None, query: str) -> None:
    prefix = f"/{role}" if role else ""
    route = read_route("POST", f"{prefix}{path}{query}".encode())
    assert route == Route(role, f"{path}{query}".encode(), shape)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
def test_only_post_generates(method: str) -> None:
    for path in GENERATING:
        assert read_route(method, path.encode()) == Route(None, path.encode(), None)


@pytest.mark.parametrize("path", RELAYED.split())
def test_everything_else_is_only_relayed(path: str) -> None:
    for prefix, role in (("", None), ("/main", Role.MAIN), ("/compactor", Role.COMPACTOR)):
        assert read_route("POST", f"{prefix}{path}".encode()) == Route(role, path.encode(), None)


@pytest.mark.parametrize(
    ("target", "role", "rest"),
    [
        ("/main", Role.MAIN, "/"),
        ("/main/", Role.MAIN, "/"),
        ("/compactor?x", Role.COMPACTOR, "/?x"),
        ("/compactor/main/v1/models", Role.COMPACTOR, "/main/v1/models"),
        ("/v1/main/x", None, "/v1/main/x"),
        ("/mainframe/v1", None, "/mainframe/v1"),
        ("/compactors", None, "/compactors"),
        ("/Main/v1/models", None, "/Main/v1/models"),
        ("/?next=/main/v1", None, "/?next=/main/v1"),
        ("/main/a%2Fb%20c/../d//e?q=%41", Role.MAIN, "/a%2Fb%20c/../d//e?q=%41"),
    ],
)
def test_the_role_prefix_is_taken_off_and_the_rest_kept_as_sent(target: str, role: Role | None, rest: str) -> None:
    route = read_route("GET", target.encode())
    assert (route.role, route.target) == (role, rest.encode())
