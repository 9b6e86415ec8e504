"""Every way a configuration can be wrong, and the line that says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slotpin.config import ConfigError, load

# What the file holds -> the lines, without the file's name at their start.
BAD_FILES: dict[str, tuple[str | bytes, list[str]]] = {
    # not JSON
    "empty": ("", [": is empty; write {} to use the defaults"]),
    "blank": (" \n\t\n", [": is empty; write {} to use the defaults"]),
    "only a BOM": (b"\xef\xbb\xbf", [": is empty; write {} to use the defaults"]),
    "not UTF-8": (b'{\n"log": "\xff"}', [":2: is not UTF-8; save the file as UTF-8"]),
    "UTF-16": ("{}".encode("utf-16"), [":1: is not UTF-8; save the file as UTF-8"]),
    "an array": ("[]", [": $: an array is not allowed; use an object {…}"]),
    "a number": ("7", [": $: a number is not allowed; use an object {…}"]),
    "null": ("null", [": $: null is not allowed; use an object {…}"]),
    "trailing comma": (
        '{\n  "log": {\n    "level": "info"\n,}}',
        [":4:1: expected no comma before a closing bracket"],
    ),
    "comment": ("{// no\n}", [":1:2: expected a key in double quotes; JSON has no comments"]),
    "single quotes": ("{'log': 1}", [":1:2: expected a key in double quotes; JSON strings use double quotes"]),
    "missing comma": (
        '{"log": {}\n"main": {}}',
        [":2:1: expected ',' or the closing bracket"],
    ),
    "missing colon": ('{"log" {}}', [":1:8: expected ':' after the key"]),
    "missing value": ('{"log": }', [":1:9: expected a value"]),
    "cut off": ('{"log": {', [":1:10: expected a key in double quotes, but the text ends"]),
    "two documents": ("{}\n{}", [":2:1: expected the end of the file"]),
    "open string": (
        '{"compactor": {"apiKey": "sk-secret}}',
        [":1:26: expected a closing '\"' for the string that starts here"],
    ),
    "raw control character": (
        '{"log": "a\tb"}',
        [":1:11: expected an escape such as \\n instead of a control character"],
    ),
    "raw control character before a slash": (
        '{"log": "a\n/b"}',
        [":1:11: expected an escape such as \\n instead of a control character"],
    ),
    "bad escape": ('{"log": "\\x"}', [":1:10: expected a valid escape after '\\'"]),
    "NaN": ('{"a": NaN}', [": $.a: NaN is not allowed; use a finite number"]),
    "infinities": (
        '{"listen": {"port": -Infinity}, "timeouts": {"drainSeconds": 1e400}}',
        [
            ": $.listen.port: -Infinity is not allowed; use a finite number",
            ": $.timeouts.drainSeconds: 1e400 is not allowed; use a finite number",
        ],
    ),
    "5000 digits": (
        '{"listen": {"port": ' + "9" * 5000 + "}}",
        [": $.listen.port: a number of 5000 digits is not allowed; use a finite number"],
    ),
    "repeated keys": (
        '{"log": {}, "log": {"level": "info", "level": "debug"}, "main": {}}',
        [": $.log: is given more than once; keep one", ": $.log.level: is given more than once; keep one"],
    ),
    "repeated key, written differently": (
        '{"log": {}, "l\\u006fg": {}}',
        [": $.log: is given more than once; keep one"],
    ),
    "repeated key in an array": (
        '{"recognisers": {"custom": [{}, {"name": "a", "name": "b"}]}}',
        [": $.recognisers.custom[1].name: is given more than once; keep one"],
    ),
    "surrogate value": (
        '{"log": {"level": "\\ud800"}}',
        [": $.log.level: the text has an unpaired surrogate; use whole characters"],
    ),
    "surrogate key": (
        '{"\\ud800": 1}',
        [': $["\\ud800"]: the key has an unpaired surrogate; use whole characters'],
    ),
    "deep": ('{"a": ' + "[" * 500 + "]" * 500 + "}", [": $.a: is nested too deeply"]),
    "deeper than the parser goes": ("[" * 400_000, [": is nested too deeply"]),
    # unknown keys
    "misspelt section": ('{"lisen": {}}', [": $.lisen: unknown key; did you mean listen?"]),
    "snake case": ('{"main": {"base_url": "x"}}', [": $.main.base_url: unknown key; did you mean baseUrl?"]),
    "another case": ('{"llamacppslots": {}}', [": $.llamacppslots: unknown key; did you mean llamaCppSlots?"]),
    "a level too high": (
        '{"mainIdSlot": 1}',
        [": $.mainIdSlot: unknown key; did you mean $.llamaCppSlots.mainIdSlot?"],
    ),
    "unlike any key": (
        '{"listen": {"tls": true}}',
        [": $.listen.tls: unknown key; known here: host, port, apiKeys, allowedHosts, forwardedHeaders, via"],
    ),
    "odd key": (
        '{"gate": {"a\\nb\\"": 1}}',
        [': $.gate["a\\u000ab\\""]: unknown key; known here: waitSeconds, keepAliveSeconds'],
    ),
    "unknown recogniser": (
        '{"recognisers": {"builtin": {"pi_summary": true}}}',
        [": $.recognisers.builtin.pi_summary: unknown key; did you mean pi-summary?"],
    ),
    # wrong types and impossible values
    "wrong sections": (
        '{"listen": null, "main": "http://h", "compactor": "sk-secret", "log": [], "timeouts": 5}',
        [
            ": $.listen: null is not allowed; use an object",
            ": $.main: this string is not allowed; use an object",
            ": $.compactor: this string is not allowed; use an object",
            ": $.log: an array is not allowed; use an object",
            ": $.timeouts: a number is not allowed; use an object",
        ],
    ),
    "sharing": (
        '{"sharing": {"redisUrl": "http://u:sk-secret@h", "server": "a b", "leaseSeconds": 0.5, "prefix": ""}}',
        [
            ": $.sharing.redisUrl: this string is not allowed; use a URL such as redis://127.0.0.1:6379, "
            "rediss://HOST:PORT or unix:///path",
            ': $.sharing.server: "a b" is not allowed; use up to 64 letters, digits, dots, dashes and underscores, '
            "a letter or a digit first",
            ": $.sharing.leaseSeconds: 0.5 is not allowed; use a number of seconds from 1 to 300",
            ': $.sharing.prefix: "" is not allowed; use 1 to 64 letters, digits, dots, dashes and underscores, '
            "a letter or a digit first",
        ],
    ),
    "slots": (
        '{"llamaCppSlots": {"enabled": "true", "mainIdSlot": -1, "compactorIdSlot": 2147483648}}',
        [
            ': $.llamaCppSlots.enabled: "true" is not allowed; use false, "auto" or true',
            ": $.llamaCppSlots.mainIdSlot: -1 is not allowed; use an integer from 0 to 2147483647",
            ": $.llamaCppSlots.compactorIdSlot: 2147483648 is not allowed; use an integer from 0 to 2147483647",
        ],
    ),
    "slots, nearly right": (
        '{"llamaCppSlots": {"enabled": 1, "mainIdSlot": true, "compactorIdSlot": 1.0}}',
        [
            ': $.llamaCppSlots.enabled: 1 is not allowed; use false, "auto" or true',
            ": $.llamaCppSlots.mainIdSlot: true is not allowed; use an integer from 0 to 2147483647",
            ": $.llamaCppSlots.compactorIdSlot: 1.0 is not allowed; use an integer from 0 to 2147483647",
        ],
    ),
    "slots, other kinds": (
        '{"llamaCppSlots": {"enabled": 0.0, "mainIdSlot": "0", "compactorIdSlot": null}}',
        [
            ': $.llamaCppSlots.enabled: 0.0 is not allowed; use false, "auto" or true',
            ': $.llamaCppSlots.mainIdSlot: "0" is not allowed; use an integer from 0 to 2147483647',
            ": $.llamaCppSlots.compactorIdSlot: null is not allowed; use an integer from 0 to 2147483647",
        ],
    ),
    "port": ('{"listen": {"port": 65536}}', [": $.listen.port: 65536 is not allowed; use an integer from 0 to 65535"]),
    "port as an object": (
        '{"listen": {"port": {"a": 1}}}',
        [": $.listen.port: an object is not allowed; use an integer from 0 to 65535"],
    ),
    "level": (
        '{"log": {"level": "warn", "format": 3}}',
        [
            ': $.log.format: 3 is not allowed; use "auto", "console" or "json"',
            ': $.log.level: "warn" is not allowed; use "debug", "info", "warning" or "error"',
        ],
    ),
    "seconds": (
        '{"timeouts": {"connectSeconds": 0, "drainSeconds": 3600.5}}',
        [
            ": $.timeouts.connectSeconds: 0 is not allowed; use a number of seconds above 0, at most 3600",
            ": $.timeouts.drainSeconds: 3600.5 is not allowed; use a number of seconds from 0 to 3600",
        ],
    ),
    "long value": (
        '{"log": {"level": "' + "x" * 500 + '"}}',
        [': $.log.level: "' + "x" * 59 + '…" is not allowed; use "debug", "info", "warning" or "error"'],
    ),
    "no scheme": (
        '{"main": {"baseUrl": "localhost:8080/v1"}}',
        [': $.main.baseUrl: "localhost:8080/v1" has no scheme; did you mean "http://localhost:8080/v1"?'],
    ),
    "user name in the URL": (
        '{"main": {"baseUrl": "http://me:sk-secret@h/v1"}}',
        [": $.main.baseUrl: a URL with a user name, a query or a fragment is not allowed; leave that part out"],
    ),
    # recognisers
    "no condition": (
        '{"recognisers": {"custom": [{"name": "a", "model": null}]}}',
        [": $.recognisers.custom[0]: has no condition; give at least one of model, apiKey, system, user, last"],
    ),
    "no name": (
        '{"recognisers": {"custom": [{"model": "m"}]}}',
        [
            ": $.recognisers.custom[0].name: is missing; use 1 to 64 letters, digits, dots, dashes and underscores, "
            "a letter or a digit first"
        ],
    ),
    "one name twice": (
        '{"recognisers": {"custom": [{"name": "a", "user": "x"}, {"name": "a", "user": "y"}]}}',
        [': $.recognisers.custom: the name "a" is taken already; give each recogniser its own'],
    ),
    "a built-in name": (
        '{"recognisers": {"custom": [{"name": "pi-summary", "user": "x"}]}}',
        [': $.recognisers.custom: the name "pi-summary" is taken already; give each recogniser its own'],
    ),
    "recogniser's values": (
        '{"recognisers": {"custom": [{"name": "a", "system": "", "role": "side", "onUnsafe": true}]}}',
        [
            ': $.recognisers.custom[0].system: "" is not allowed; use a string that is not empty',
            ': $.recognisers.custom[0].role: "side" is not allowed; use "compactor" or "main"',
            ': $.recognisers.custom[0].onUnsafe: true is not allowed; use "refuse" or "pass"',
        ],
    ),
    "no array": (
        '{"recognisers": {"custom": {"name": "a"}}}',
        [": $.recognisers.custom: an object is not allowed; use an array of objects"],
    ),
    # secrets
    "secrets": (
        '{"compactor": {"apiKey": "sk-secret\\n"},'
        ' "recognisers": {"custom": ["sk-secret", {"name": "a", "apiKey": 5}]}}',
        [
            ": $.compactor.apiKey: this string is not allowed; use a string of visible ASCII characters without spaces",
            ": $.recognisers.custom[0]: this string is not allowed; use an object",
            ": $.recognisers.custom[1].apiKey: a number is not allowed; "
            "use a string of visible ASCII characters without spaces",
        ],
    ),
    # reasoningZip
    "reasoningZip is strict about slots": (
        '{"reasoningZip": {"llamaCppSlots": {"enabled": "on", "slot": 1}}}',
        [
            ': $.reasoningZip.llamaCppSlots.enabled: "on" is not allowed; use false, "auto" or true',
            ": $.reasoningZip.llamaCppSlots.slot: unknown key; known here: enabled, mainIdSlot, compactorIdSlot",
        ],
    ),
    "reasoningZip's compactor": (
        '{"reasoningZip": {"compactor": "sk-secret"}}',
        [": $.reasoningZip.compactor: this string is not allowed; use an object"],
    ),
    "two truths": (
        '{"reasoningZip": {"llamaCppSlots": {}, "compactor": {}}, "llamaCppSlots": {}, "compactor": {}}',
        [
            ": $.llamaCppSlots: $.reasoningZip.llamaCppSlots is given as well; keep one of them",
            ": $.compactor: $.reasoningZip.compactor is given as well; keep one of them",
        ],
    ),
    "reasoningZip is no object": ('{"reasoningZip": 1}', [": $.reasoningZip: a number is not allowed; use an object"]),
    "own keys stay strict beside reasoningZip": (
        '{"reasoningZip": {}, "listn": {}}',
        [": $.listn: unknown key; did you mean listen?"],
    ),
}


@pytest.mark.parametrize(("content", "lines"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_gives_one_line_for_each_problem(content: str | bytes, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "slotpin.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert list(caught.value.lines) == [f"{path}{line}" for line in lines]
    assert str(caught.value) == "\n".join(caught.value.lines)
    assert caught.value.exit_code == 2
    assert "sk-secret" not in str(caught.value)


_URL_HINT = "use an http:// or https:// URL with a host, such as http://127.0.0.1:8080/v1, or unix:/path"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http:///v1",
        "http:/h",
        "//h/v1",
        "ftp://h/v1",
        "http://h:0/v1",
        "http://h:65536",
        "http://h:",
        "http://h:x",
        "http://[::1",
        "http://[::1%25eth0]/",
        "http://[1.2.3.4]/",
        "http://a b/",
        " http://h",
        "http://h/\n",
        "http://-h/",
        "http://a..b/",
        "http://h\\v1",
        "http://größe/",
    ],
)
def test_what_is_no_base_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"SLOTPIN_MAIN_BASE_URL": url}, {})
    assert caught.value.lines[0].startswith("SLOTPIN_MAIN_BASE_URL: $.main.baseUrl: ")
    assert caught.value.lines[0].endswith(f" is not allowed; {_URL_HINT}")


@pytest.mark.parametrize("url", ["http://u@h", "http://u:p@h/v1", "http://h/v1?key=p", "http://h/v1#p", "http://h?"])
def test_the_part_of_a_url_that_may_be_secret_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, {"compactor.baseUrl": url})
    assert list(caught.value.lines) == [
        "command line: $.compactor.baseUrl: a URL with a user name, a query or a fragment is not allowed; "
        "leave that part out"
    ]


@pytest.mark.parametrize("place", ["unix:", "unix:run/x", "unix:/", "unix:/run/", "unix:/a\n", "UNIX:x"])
@pytest.mark.parametrize("key", ["listen.host", "main.baseUrl"])
def test_what_is_no_socket(key: str, place: str) -> None:
    with pytest.raises(ConfigError, match=r"names no socket; use unix: and an absolute path"):
        load(None, {}, {key: place})


@pytest.mark.parametrize("name", ["", "a b", "host:80", "http://h", "*.lan", "..lan", "\u00fc.lan"])
def test_what_is_no_name_to_allow(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.listen\.allowedHosts: .* in the array is not a host name; use names"):
        load(None, {}, {"listen.allowedHosts": json.dumps([name])})


@pytest.mark.parametrize(
    "keys", ["sk-1", '"sk-1"', "[7]", '["sk-1 "]', '["sk-1\\n"]', '[""]', "{}", '["sk-1", null]', '["sk-1']
)
def test_a_wrong_key_for_clients_is_not_shown(keys: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"SLOTPIN_LISTEN_API_KEYS": keys}, {})
    (line,) = caught.value.lines
    assert line.startswith("SLOTPIN_LISTEN_API_KEYS:")
    assert "sk-1" not in line


@pytest.mark.parametrize("host", ["", "127.0.0.1:80", "[::1]", "http://h", "a b", "h\n", "-h", "a..b", ":::"])
def test_what_is_no_host_to_listen_on(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^command line: \$\.listen\.host: .* is not allowed; use a host name"):
        load(None, {}, {"listen.host": host})


BAD_VARIABLES: dict[str, tuple[dict[str, str], list[str]]] = {
    "misspelt": (
        {"SLOTPIN_LISTEN_PRT": "1"},
        ["SLOTPIN_LISTEN_PRT: is no setting of slotpin; did you mean SLOTPIN_LISTEN_PORT?"],
    ),
    "nearly SLOTPIN_CONFIG": (
        {"SLOTPIN_CONFG": "x"},
        ["SLOTPIN_CONFG: is no setting of slotpin; did you mean SLOTPIN_CONFIG?"],
    ),
    "unlike any": (
        {"SLOTPIN_ZZZ": "sk-secret"},
        ["SLOTPIN_ZZZ: is no setting of slotpin; unset it, or see docs/configuration.md for the names"],
    ),
    "a person's SLOTPIN_PORT": (
        {"SLOTPIN_PORT": "8484"},
        ["SLOTPIN_PORT: is no setting of slotpin; did you mean SLOTPIN_LISTEN_PORT?"],
    ),
    "no number": (
        {"SLOTPIN_LISTEN_PORT": "80x"},
        ['SLOTPIN_LISTEN_PORT: $.listen.port: "80x" is not allowed; use an integer from 0 to 65535'],
    ),
    "no integer": (
        {"SLOTPIN_LISTEN_PORT": "80.0"},
        ["SLOTPIN_LISTEN_PORT: $.listen.port: 80.0 is not allowed; use an integer from 0 to 65535"],
    ),
    "a number in quotes": (
        {"SLOTPIN_LISTEN_PORT": '"80"'},
        ['SLOTPIN_LISTEN_PORT: $.listen.port: "\\"80\\"" is not allowed; use an integer from 0 to 65535'],
    ),
    "shell's idea of true": (
        {"SLOTPIN_LLAMA_CPP_SLOTS_ENABLED": "TRUE"},
        ['SLOTPIN_LLAMA_CPP_SLOTS_ENABLED: $.llamaCppSlots.enabled: "TRUE" is not allowed; use false, "auto" or true'],
    ),
    "1 is not true": (
        {"SLOTPIN_RECOGNISERS_BUILTIN_PI_SUMMARY": "1"},
        [
            "SLOTPIN_RECOGNISERS_BUILTIN_PI_SUMMARY: $.recognisers.builtin.pi-summary: 1 is not allowed; "
            "use true or false"
        ],
    ),
    "set to nothing": (
        {"SLOTPIN_COMPACTOR_API_KEY": "", "SLOTPIN_LISTEN_PORT": ""},
        [
            'SLOTPIN_LISTEN_PORT: $.listen.port: "" is not allowed; use an integer from 0 to 65535',
            "SLOTPIN_COMPACTOR_API_KEY: $.compactor.apiKey: this string is not allowed; "
            "use a string of visible ASCII characters without spaces",
        ],
    ),
    "not UTF-8": (
        {"SLOTPIN_MAIN_BASE_URL": "http://\udcff"},
        ["SLOTPIN_MAIN_BASE_URL: is not UTF-8; use UTF-8 text"],
    ),
    "list that is no JSON": (
        {"SLOTPIN_RECOGNISERS_CUSTOM": '[{"name": "a", "apiKey": "sk-secret}]'},
        ["SLOTPIN_RECOGNISERS_CUSTOM:1:26: expected a closing '\"' for the string that starts here"],
    ),
    "list with a mistake": (
        {"SLOTPIN_RECOGNISERS_CUSTOM": '[{"name": "a", "apikey": "sk-secret"}]'},
        ["SLOTPIN_RECOGNISERS_CUSTOM: $.recognisers.custom[0].apikey: unknown key; did you mean apiKey?"],
    ),
    "no list": (
        {"SLOTPIN_RECOGNISERS_CUSTOM": '"sk-secret"'},
        ["SLOTPIN_RECOGNISERS_CUSTOM: $.recognisers.custom: this string is not allowed; use an array of objects"],
    ),
}


@pytest.mark.parametrize(("environ", "lines"), BAD_VARIABLES.values(), ids=BAD_VARIABLES.keys())
def test_a_bad_variable_is_named(environ: dict[str, str], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, environ, {})
    assert list(caught.value.lines) == lines
    assert "sk-secret" not in str(caught.value)


BAD_FLAGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "misspelt": ({"listen.prt": "1"}, ["command line: $.listen.prt: unknown key; did you mean listen.port?"]),
    "unlike any": ({"x y": "1"}, ['command line: $["x y"]: unknown key; see docs/configuration.md for the keys']),
    "a section": (
        {"llamaCppSlots": "{}"},
        ["command line: $.llamaCppSlots: is a section; set one of its keys, such as llamaCppSlots.enabled"],
    ),
    "value": (
        {"listen.port": "99999"},
        ["command line: $.listen.port: 99999 is not allowed; use an integer from 0 to 65535"],
    ),
}


@pytest.mark.parametrize(("overrides", "lines"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_bad_flag_is_named(overrides: dict[str, str], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {}, overrides)
    assert list(caught.value.lines) == lines


def test_problems_of_all_sources_come_together_and_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"main": 3, "log": {"level": "x"}}')
    with pytest.raises(ConfigError) as caught:
        # The first variable stands for a section that is wrong in the file, the second covers a wrong value up.
        load(path, {"SLOTPIN_MAIN_BASE_URL": "http://h", "SLOTPIN_LOG_LEVEL": "info", "SLOTPIN_ZZZ": ""}, {"a": "1"})
    assert list(caught.value.lines) == [
        f"{path}: $.main: a number is not allowed; use an object",
        f'{path}: $.log.level: "x" is not allowed; use "debug", "info", "warning" or "error"',
        "SLOTPIN_ZZZ: is no setting of slotpin; unset it, or see docs/configuration.md for the names",
        "command line: $.a: unknown key; see docs/configuration.md for the keys",
    ]


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {}, {})
    assert str(caught.value) == f"{tmp_path}: is a directory; give the path of a JSON file"


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a\nb", {}, {})
    assert str(caught.value) == f"{tmp_path}/a\\u000ab: does not exist"


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "file" / "c.json", {}, {})
    assert str(caught.value) == f"{tmp_path}/file/c.json: can't be read: Not a directory"


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert str(caught.value) == f"{path}: is larger than 1 MiB; give the path of slotpin's JSON file"


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_file_that_slotpin_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("{}")
    path.chmod(0)
    with _as_nobody(), pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert str(caught.value) == f"{path}: permission denied; give the path of a JSON file that slotpin may read"
