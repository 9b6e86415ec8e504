"""Any input gives settings or lines of text, never anything else."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from slotpin.config import KEYS, ConfigError, Settings, as_json, describe, load

SECRET = "sk-Zq9-very-secret"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(SECRET)
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)

json_keys = sorted({step for key in KEYS for step in key.split(".")} | {"reasoningZip", "name", "apiKey", "system"})
# Shaped like a configuration, with values that are often wrong.
near_settings = st.recursive(
    scalars | st.sampled_from([0, 1, 8484, "auto", "http://h/v1", "h", "info", "refuse"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(json_keys), inner),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "slotpin.json"


def check(path: Path | None, environ: dict[str, str], overrides: dict[str, str]) -> ConfigError | None:
    try:
        loaded = load(path, environ, overrides)
    except ConfigError as error:
        assert error.lines
        assert all(line.isprintable() for line in error.lines)
        return error
    assert isinstance(loaded.settings, Settings)
    assert set(loaded.origins) == set(KEYS)
    assert all(line.isprintable() for line in (*describe(loaded), *loaded.notes))
    json.dumps(as_json(loaded))
    return None


@given(json_values | near_settings)
def test_any_json_value_as_the_file(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
    check(path, {}, {})


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"{}" + b" " * 10)
def test_any_bytes_as_the_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    check(path, {}, {})


secret_rules = st.just(SECRET) | st.fixed_dictionaries(
    {"apiKey": st.just(SECRET)}, optional={"name": st.just("a") | st.none(), "role": st.text(max_size=3)}
)


@given(
    compactor=st.just(SECRET)
    | st.fixed_dictionaries({}, optional={"apiKey": st.just(SECRET), "apikey": st.just(SECRET)}),
    rules=st.just(SECRET) | st.lists(secret_rules),
    wrapped=st.booleans(),
)
def test_a_secret_is_in_no_line(path: Path, compactor: object, rules: object, wrapped: bool) -> None:
    """Whatever is wrong with it or around it."""
    tree: dict[str, object] = {
        "reasoningZip" if wrapped else "compactor": {"compactor": compactor} if wrapped else compactor,
        "recognisers": {"custom": rules},
        "main": {"baseUrl": f"http://me:{SECRET}@h/"},
    }
    path.write_text(json.dumps(tree))
    error = check(path, {"SLOTPIN_COMPACTOR_API_KEY": f"{SECRET} "}, {"recognisers.custom": f'["{SECRET}'})
    assert error is not None
    assert SECRET not in str(error)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1)
urls = st.builds(
    "{}://{}{}{}".format,
    st.sampled_from(["http", "https", "HTTP"]),
    st.sampled_from(["localhost", "10.0.0.1", "[::1]", "a-b.example"]),
    st.sampled_from(["", ":1", ":65535"]),
    st.sampled_from(["", "/", "/v1", "/a/b/v1/"]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
rules = st.fixed_dictionaries(
    {"name": names.map(lambda name: f"x{name[:63]}")},
    optional={
        "model": texts,
        "apiKey": visible,
        "user": texts,
        "last": texts,
        "role": st.sampled_from(["main", "compactor"]),
    },
).flatmap(lambda rule: texts.map(lambda system: {**rule, "system": system}))
slot_ids = st.integers(0, 2**31 - 1)
seconds = st.integers(1, 3600) | st.floats(0.001, 3600)

VALID: dict[str, st.SearchStrategy[object]] = {
    "listen.host": st.sampled_from(["localhost", "::", "0.0.0.0"]),
    "listen.port": st.integers(0, 65535),
    "listen.apiKeys": st.lists(visible, max_size=3),
    "listen.allowedHosts": st.lists(st.sampled_from(["*", ".lan", "box.lan"]), max_size=3).map(tuple),
    "listen.forwardedHeaders": st.booleans(),
    "listen.via": st.booleans(),
    "main.baseUrl": urls,
    "main.apiKey": visible,
    "compactor.baseUrl": urls,
    "compactor.apiKey": visible,
    "llamaCppSlots.enabled": st.sampled_from([False, "auto", True]),
    "llamaCppSlots.mainIdSlot": slot_ids,
    "llamaCppSlots.compactorIdSlot": slot_ids,
    "conversations.slots": st.sampled_from(["auto", "main-only"]) | st.lists(slot_ids, max_size=4).map(tuple),
    "conversations.sessionHeaders": st.lists(st.from_regex(r"[a-z-]+", fullmatch=True), max_size=3).map(tuple),
    "conversations.sessionFields": st.lists(st.from_regex(r"[a-z_]+(\.[a-z_]+)?", fullmatch=True), max_size=3).map(
        tuple
    ),
    "gate.waitSeconds": seconds | st.just(0),
    "gate.keepAliveSeconds": seconds | st.just(0),
    "reuse.retrySeconds": st.integers(0, 31536000),
    "sharing.redisUrl": st.sampled_from(
        ["redis://h", "rediss://u:p@h:1/2", "redis://[::1]:6379?db=1", "unix:///tmp/r.sock", "unix://u:p@/tmp/r?db=1"]
    ),
    "sharing.server": names | st.just(""),
    "sharing.leaseSeconds": st.integers(1, 300),
    "sharing.prefix": names,
    "recognisers.custom": st.lists(rules, max_size=3, unique_by=lambda rule: str(rule["name"])),
    "log.format": st.sampled_from(["auto", "console", "json"]),
    "log.level": st.sampled_from(["debug", "info", "warning", "error"]),
    "timeouts.connectSeconds": seconds,
    "timeouts.idleSeconds": seconds | st.just(0),
    "timeouts.drainSeconds": seconds | st.just(0),
}
VALID |= {key: st.booleans() for key in KEYS if key.startswith("recognisers.builtin.")}


def put(tree: dict[str, object], steps: list[str], value: object) -> None:
    first, *rest = steps
    if rest:
        inner = tree.setdefault(first, {})
        assert isinstance(inner, dict)
        put(inner, rest, value)
    else:
        tree[first] = value


def test_each_key_is_in_the_round_trip() -> None:
    assert set(VALID) == set(KEYS)


@given(st.fixed_dictionaries({}, optional=VALID))
def test_a_value_is_the_same_from_file_variable_and_flag(path: Path, values: dict[str, object]) -> None:
    tree: dict[str, object] = {}
    for key, value in values.items():
        put(tree, key.split("."), value)
    path.write_text(json.dumps(tree))
    as_text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}

    from_file = load(path, {}, {})
    from_variables = load(None, {KEYS[key].variable: text for key, text in as_text.items()}, {})
    from_flags = load(None, {}, as_text)

    assert from_file.settings == from_variables.settings == from_flags.settings
    for key in KEYS:
        given_here = key in values
        assert from_file.origins[key] == ("file" if given_here else "default")
        assert from_variables.origins[key] == (f"env {KEYS[key].variable}" if given_here else "default")
        assert from_flags.origins[key] == ("flag" if given_here else "default")
    # And it is the value that was written.
    for key, value in values.items():
        if key not in ("main.apiKey", "compactor.apiKey", "listen.apiKeys", "recognisers.custom", "sharing.redisUrl"):
            assert attrgetter(KEYS[key].attribute)(from_file.settings) == value


@given(st.dictionaries(st.sampled_from([key.variable for key in KEYS.values()]) | texts, st.text()))
def test_any_variables(environ: dict[str, str]) -> None:
    check(None, environ, {})


@given(st.dictionaries(st.sampled_from(sorted(KEYS)) | st.text(), st.text()))
def test_any_flags(overrides: dict[str, str]) -> None:
    check(None, {}, overrides)


@given(st.text(st.sampled_from("http:/[]:.-_19aA%@?# \\é\n")).map(lambda rest: f"http://{rest}"))
def test_an_accepted_url_is_one_that_the_http_client_takes(url: str) -> None:
    if check(None, {}, {"main.baseUrl": url}) is None:
        parsed = URL(url)
        assert parsed.host
        assert parsed.port
