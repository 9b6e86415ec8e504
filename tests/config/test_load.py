"""Which file, which value wins, and what the rest of slotpin gets to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from slotpin.config import (
    KEYS,
    Compactor,
    ConfigError,
    LlamaCppSlots,
    Loaded,
    Main,
    Settings,
    as_json,
    changed,
    describe,
    find_config,
    load,
    pin_relevant,
)
from slotpin.errors import UserError
from slotpin.pinning.roles import BUILTIN_NAMES

EXAMPLE = Path(__file__).parents[2] / "config.example.json"


def write(folder: Path, value: object) -> Path:
    path = folder / "slotpin.json"
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's configuration folder for slotpin."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "slotpin"
    folder.mkdir(parents=True)
    return folder


class TestFindConfig:
    def test_in_order(self, tmp_path: Path, home: Path) -> None:
        cwd = tmp_path / "cwd"
        cwd.mkdir()
        named, in_variable = tmp_path / "named.json", tmp_path / "variable.json"
        environ = {"SLOTPIN_CONFIG": str(in_variable)}
        assert find_config(None, {}, cwd) is None
        in_home = write(home, {})
        assert find_config(None, {}, cwd) == in_home
        in_cwd = write(cwd, {})
        assert find_config(None, {}, cwd) == in_cwd
        in_variable.touch()
        assert find_config(None, environ, cwd) == in_variable
        named.touch()
        assert find_config(named, environ, cwd) == named

    def test_relative_to_the_current_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").touch()
        assert find_config(Path("a.json"), {}, tmp_path) == tmp_path / "a.json"
        assert find_config(None, {"SLOTPIN_CONFIG": "a.json"}, tmp_path) == tmp_path / "a.json"

    def test_a_file_that_was_asked_for_must_exist(self, tmp_path: Path) -> None:
        write(tmp_path, {})
        with pytest.raises(UserError, match=r"^--config: /.*/no\.json does not exist$"):
            find_config(Path("no.json"), {}, tmp_path)
        with pytest.raises(UserError, match=r"^SLOTPIN_CONFIG: /.*/no\.json does not exist$"):
            find_config(None, {"SLOTPIN_CONFIG": "no.json"}, tmp_path)
        with pytest.raises(UserError, match=r"^SLOTPIN_CONFIG is empty; "):
            find_config(None, {"SLOTPIN_CONFIG": ""}, tmp_path)

    def test_a_broken_link_is_no_file(self, tmp_path: Path, home: Path) -> None:
        (tmp_path / "slotpin.json").symlink_to("nowhere")
        assert find_config(None, {}, tmp_path) is None


def test_no_file_and_nothing_set_gives_the_defaults() -> None:
    loaded = load(None, {"PATH": "/bin", "SLOTPIN_CONFIG": "x", "SLOTPIN_CACHE_DIR": "y"}, {})
    assert loaded.settings == Settings()
    assert loaded.path is None
    assert loaded.notes == ()
    assert loaded.origins == dict.fromkeys(KEYS, "default")
    settings = loaded.settings
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 8484)
    assert settings.main.base_url == settings.compactor.base_url == "http://127.0.0.1:8080/v1"
    assert settings.compactor.api_key.get_secret_value() == "sk-placeholder"
    assert settings.llama_cpp_slots == LlamaCppSlots(enabled=False, main_id_slot=0, compactor_id_slot=1)
    assert settings.recognisers.builtin.enabled() == set(BUILTIN_NAMES)
    assert settings.recognisers.custom == ()
    assert (settings.log.format, settings.log.level) == ("auto", "info")
    assert (settings.timeouts.connect_seconds, settings.timeouts.drain_seconds) == (10, 30)


def test_an_empty_object_is_the_defaults_too(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    loaded = load(path, {}, {})
    assert (loaded.settings, loaded.path) == (Settings(), path)
    assert set(loaded.origins.values()) == {"default"}


def test_the_example_loads() -> None:
    loaded = load(EXAMPLE, {}, {})
    assert loaded.notes == ()
    assert loaded.settings == Settings(llama_cpp_slots=LlamaCppSlots(enabled="auto"))


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"listen": {"port": 1}}')
    assert load(path, {}, {}).settings.listen.port == 1


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, {"listen": {"port": 1}, "llamaCppSlots": {"mainIdSlot": 1, "compactorIdSlot": 1}})
    environ = {"SLOTPIN_LLAMA_CPP_SLOTS_MAIN_ID_SLOT": "2", "SLOTPIN_LLAMA_CPP_SLOTS_COMPACTOR_ID_SLOT": "2"}
    loaded = load(path, environ, {"llamaCppSlots.compactorIdSlot": "3"})
    settings = loaded.settings
    assert settings.listen.port == 1
    assert settings.llama_cpp_slots == LlamaCppSlots(enabled=False, main_id_slot=2, compactor_id_slot=3)
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "listen.port": "file",
        "llamaCppSlots.mainIdSlot": "env SLOTPIN_LLAMA_CPP_SLOTS_MAIN_ID_SLOT",
        "llamaCppSlots.compactorIdSlot": "flag",
    }


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_enabled_as_text(text: str, value: object) -> None:
    assert load(None, {"SLOTPIN_LLAMA_CPP_SLOTS_ENABLED": text}, {}).settings.llama_cpp_slots.enabled is value
    assert load(None, {}, {"llamaCppSlots.enabled": text}).settings.llama_cpp_slots.enabled is value


def test_text_that_looks_like_json_stays_text() -> None:
    settings = load(None, {"SLOTPIN_COMPACTOR_API_KEY": "123"}, {"listen.host": "1"}).settings
    assert settings.compactor.api_key.get_secret_value() == "123"
    assert settings.listen.host == "1"


def test_custom_recognisers_from_all_sources(tmp_path: Path) -> None:
    rules = [
        {"name": "a", "model": "m", "apiKey": "sk-a", "system": "S", "user": "U", "last": "L"}
        | {"role": "main", "onUnsafe": "pass"},
        {"name": "b", "user": "### Task:\nGenerate"},
    ]
    path = write(tmp_path, {"recognisers": {"custom": rules, "builtin": {"pi-summary": False}}})
    from_file = load(path, {}, {}).settings.recognisers
    first, second = from_file.custom
    assert first.api_key is not None
    assert first.api_key.get_secret_value() == "sk-a"
    assert (first.name, first.model, first.system, first.user, first.last) == ("a", "m", "S", "U", "L")
    assert (first.role, first.on_unsafe) == ("main", "pass")
    assert (second.role, second.on_unsafe, second.user) == ("compactor", "refuse", "### Task:\nGenerate")
    assert from_file.builtin.enabled() == set(BUILTIN_NAMES) - {"pi-summary"}
    text = json.dumps(rules)
    assert load(None, {"SLOTPIN_RECOGNISERS_CUSTOM": text}, {}).settings.recognisers.custom == from_file.custom
    assert load(None, {}, {"recognisers.custom": text}).settings.recognisers.custom == from_file.custom
    # A list is replaced, not extended.
    assert load(path, {"SLOTPIN_RECOGNISERS_CUSTOM": "[]"}, {}).settings.recognisers.custom == ()


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    environ = {
        "SLOTPIN_PORT": "tcp://10.0.0.1:8484",
        "SLOTPIN_PORT_8484_TCP": "tcp://10.0.0.1:8484",
        "SLOTPIN_PORT_8484_TCP_ADDR": "10.0.0.1",
        "SLOTPIN_PORT_8484_TCP_PORT": "8484",
        "SLOTPIN_SERVICE_HOST": "10.0.0.1",
        "SLOTPIN_SERVICE_PORT": "8484",
        "SLOTPIN_SERVICE_PORT_HTTP": "8484",
    }
    assert load(None, environ, {}).settings == Settings()


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "https://h/v1",
        "HTTP://H:1/",
        "http://127.0.0.1:8080/v1",
        "http://[::1]:8080/a/b%20c/v1",
        "http://h.",
        "unix:/run/llama.sock",
    ],
)
def test_what_is_a_base_url(url: str) -> None:
    assert load(None, {}, {"main.baseUrl": url}).settings.main.base_url == url


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "::1", "my-box.local", "under_score", "unix:/a b.sock"])
def test_what_is_a_host_to_listen_on(host: str) -> None:
    assert load(None, {}, {"listen.host": host}).settings.listen.host == host


class TestCompactorUrl:
    """Main's, unless it has its own."""

    def test_from_any_source(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"main": {"baseUrl": "http://a"}, "compactor": {"apiKey": "k"}})
        loaded = load(path, {}, {})
        assert loaded.settings.compactor.base_url == "http://a"
        assert loaded.origins["compactor.baseUrl"] == "default"
        assert load(path, {"SLOTPIN_MAIN_BASE_URL": "http://b"}, {}).settings.compactor.base_url == "http://b"
        own = load(path, {}, {"compactor.baseUrl": "http://c"}).settings
        assert (own.main.base_url, own.compactor.base_url) == ("http://a", "http://c")

    def test_in_python(self) -> None:
        main = Main(base_url="http://a")
        assert Settings(main=main).compactor.base_url == "http://a"
        assert Settings(main=main, compactor=Compactor(api_key=SecretStr("k"))).compactor.base_url == "http://a"
        assert Settings(main=main, compactor=Compactor(base_url="http://b")).compactor.base_url == "http://b"
        assert Settings().compactor.base_url == "http://127.0.0.1:8080/v1"  # the shared default is untouched


class TestCompactorKey:
    """Main's, where both are one server and it has none of its own."""

    def test_one_server(self) -> None:
        loaded = load(None, {"SLOTPIN_MAIN_API_KEY": "123"}, {})
        assert loaded.settings.main.api_key == loaded.settings.compactor.api_key == SecretStr("123")
        assert any(line.endswith("(default: main.apiKey)") for line in describe(loaded))
        own = load(None, {}, {"main.apiKey": "a", "compactor.apiKey": "b"}).settings
        assert own.compactor.api_key == SecretStr("b")

    def test_another_server_never_gets_it(self) -> None:
        other = load(None, {}, {"main.apiKey": "a", "compactor.baseUrl": "http://other"}).settings
        assert other.compactor.api_key == SecretStr("sk-placeholder")


def test_both_spellings_of_a_unix_socket_are_one() -> None:
    settings = load(None, {}, {"listen.host": "unix:///run/s", "main.baseUrl": "UNIX:///run/l"}).settings
    assert (settings.listen.host, settings.main.base_url) == ("unix:/run/s", "unix:/run/l")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("slotpin.localhost", True),
        ("unix:/run/s", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("box.lan", False),
    ],
)
def test_what_others_can_reach_without_a_key_is_noted(host: str, local: bool) -> None:
    notes = load(None, {}, {"listen.host": host}).notes
    assert [f"listen.host is {host} and listen.apiKeys is empty" in note for note in notes] == [True] * (not local)
    assert load(None, {}, {"listen.host": host, "listen.apiKeys": '["k"]'}).notes == ()


class TestReasoningZip:
    def test_is_read_as_it_is(self, tmp_path: Path) -> None:
        section = {
            "enabled": True,
            "model": {"id": "x"},
            "llamaCppSlots": {"enabled": "auto", "mainIdSlot": 2, "compactorIdSlot": 3},
            "compactor": {"baseUrl": "http://h/v1", "apiKey": "k", "temperature": 0.1},
        }
        path = write(tmp_path, {"reasoningZip": section, "listen": {"port": 9}})
        loaded = load(path, {"SLOTPIN_LLAMA_CPP_SLOTS_MAIN_ID_SLOT": "4"}, {})
        assert loaded.settings.llama_cpp_slots == LlamaCppSlots(enabled="auto", main_id_slot=4, compactor_id_slot=3)
        assert loaded.settings.compactor == Compactor(base_url="http://h/v1", api_key=SecretStr("k"))
        assert loaded.settings.listen.port == 9
        assert loaded.origins["llamaCppSlots.enabled"] == loaded.origins["compactor.apiKey"] == "file"
        assert loaded.notes == (
            f"{path}: $.reasoningZip: ignored, since slotpin does not use them: enabled, model, compactor.temperature",
        )

    def test_with_nothing_to_ignore_there_is_no_note(self, tmp_path: Path) -> None:
        loaded = load(write(tmp_path, {"reasoningZip": {"llamaCppSlots": {}}, "compactor": {"apiKey": "k"}}), {}, {})
        assert loaded.notes == ()
        assert loaded.settings == Settings(compactor=Compactor(api_key=SecretStr("k")))


def test_equal_slots_are_allowed_and_noted(tmp_path: Path) -> None:
    slots = {"mainIdSlot": 1, "compactorIdSlot": 1}
    assert load(write(tmp_path, {"llamaCppSlots": slots}), {}, {}).notes == ()
    both = "llamaCppSlots.mainIdSlot and llamaCppSlots.compactorIdSlot are both 1: "
    auto = load(write(tmp_path, {"llamaCppSlots": {**slots, "enabled": "auto"}}), {}, {})
    assert auto.notes == (f"{both}nothing is pinned and compactor requests are refused; give them different ids",)
    vouched = load(write(tmp_path, {"llamaCppSlots": {**slots, "enabled": True}}), {}, {})
    assert vouched.notes == (
        f"{both}compactor requests replace the main conversation's cache; give them different ids",
    )


def test_settings_are_frozen_and_know_no_json_names() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.listen.port = 1
    with pytest.raises(ConfigError):
        load(None, {}, {"llama_cpp_slots.enabled": "auto"})


def test_each_key_has_its_own_variable() -> None:
    variables = [key.variable for key in KEYS.values()]
    assert len(set(variables)) == len(variables)
    assert "SLOTPIN_LLAMA_CPP_SLOTS_MAIN_ID_SLOT" in variables


def secretive(tmp_path: Path) -> Loaded:
    tree = {
        "listen": {"apiKeys": ["sk-secret-3", "sk-secret-4"]},
        "main": {"apiKey": "sk-secret-5"},
        "compactor": {"apiKey": "sk-secret-1"},
        "recognisers": {"custom": [{"name": "a", "apiKey": "sk-secret-2", "system": "é"}]},
    }
    return load(write(tmp_path, tree), {"SLOTPIN_LOG_LEVEL": "debug"}, {"listen.port": "0"})


def test_describe(tmp_path: Path) -> None:
    lines = describe(secretive(tmp_path))
    assert len(lines) == len(KEYS)
    assert len({line.index(" = ") for line in lines}) == 1
    shown = {" ".join(line.split()) for line in lines}
    assert {
        "listen.port = 0 (flag)",
        'log.level = "debug" (env SLOTPIN_LOG_LEVEL)',
        'listen.apiKeys = ["********", "********"] (file)',
        'main.apiKey = "********" (file)',
        'compactor.apiKey = "********" (file)',
        'compactor.baseUrl = "http://127.0.0.1:8080/v1" (default: main.baseUrl)',
        "timeouts.connectSeconds = 10 (default)",
        "recognisers.builtin.pi-summary = true (default)",
    } <= shown
    assert any('"apiKey": "********", "system": "é"' in line for line in shown)


def test_no_view_of_the_settings_has_a_secret(tmp_path: Path) -> None:
    loaded = secretive(tmp_path)
    views = [
        "\n".join(describe(loaded)),
        json.dumps(as_json(loaded)),
        repr(loaded),
        str(loaded.settings),
        str(loaded.settings.model_dump()),
        loaded.settings.model_dump_json(),
        repr(pin_relevant(loaded.settings)),
    ]
    assert [view for view in views if "sk-secret" in view] == []


def test_as_json_is_json(tmp_path: Path) -> None:
    loaded = secretive(tmp_path)
    view = json.loads(json.dumps(as_json(loaded)))
    assert view["file"] == str(loaded.path)
    assert view["settings"]["listen"]["port"] == 0
    assert view["settings"]["recognisers"]["builtin"]["pi-summary"] is True
    assert view["origins"] == dict(loaded.origins)
    assert view["notes"] == []


@pytest.mark.parametrize(
    ("overrides", "relevant"),
    [
        ({"llamaCppSlots.enabled": "auto"}, True),
        ({"llamaCppSlots.mainIdSlot": "2"}, True),
        ({"llamaCppSlots.compactorIdSlot": "2"}, True),
        ({"main.baseUrl": "http://h"}, True),
        ({"compactor.baseUrl": "http://h"}, True),
        ({"compactor.apiKey": "k"}, True),
        ({"listen.apiKeys": '["k"]'}, False),
        ({"listen.port": "1"}, False),
        ({"log.level": "debug"}, False),
        ({"timeouts.drainSeconds": "1"}, False),
        ({"recognisers.builtin.pi-summary": "false"}, False),
    ],
)
def test_what_bindings_depend_on(overrides: dict[str, str], relevant: bool) -> None:
    before, after = load(None, {}, {}).settings, load(None, {}, overrides).settings
    assert (pin_relevant(before) != pin_relevant(after)) is relevant
    assert (hash(pin_relevant(before)) != hash(pin_relevant(after))) is relevant
    assert set(overrides) <= set(changed(before, after))


def test_the_same_values_from_elsewhere_are_no_change() -> None:
    assert pin_relevant(load(EXAMPLE, {}, {}).settings) == pin_relevant(
        load(None, {"SLOTPIN_LLAMA_CPP_SLOTS_ENABLED": "auto"}, {}).settings
    )
    assert changed(Settings(), load(None, {}, {"listen.port": "8484"}).settings) == ()
    assert changed(Settings(), load(None, {}, {"main.baseUrl": "http://h"}).settings) == (
        "main.baseUrl",
        "compactor.baseUrl",
    )
