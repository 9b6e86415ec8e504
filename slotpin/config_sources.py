"""Where raw configuration values come from: the JSON file, the environment, the command line.

Nothing here knows the settings' models; `config.py` validates what this module reads.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from slotpin.errors import UserError

PREFIX = "SLOTPIN_"
CONFIG_VARIABLE = "SLOTPIN_CONFIG"
# Read elsewhere in slotpin, or by find_config: known names that are not settings.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "SLOTPIN_CACHE_DIR"})

# Kubernetes sets these in every pod when a service is named "slotpin".
_SERVICE_VARIABLE = re.compile(r"SLOTPIN_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")

# A larger file is not a configuration but a model or a log given by mistake.
_MAX_FILE_BYTES = 1 << 20
_MAX_SHOWN = 60
_MAX_DIGITS = 400
_MAX_DEPTH = 64
_SIMPLE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

Tree = dict[str, object]
Step = str | int


class ConfigError(UserError):
    """A configuration that can't be used. `lines`: one line a problem, each with its place and remedy."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


def find_config(explicit: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The file to read, or None. Raises UserError when a file that was asked for does not exist."""
    if explicit is not None:
        return _required(cwd / explicit, "--config")
    if CONFIG_VARIABLE in environ:
        name = environ[CONFIG_VARIABLE]
        if not name:
            raise UserError(f"{CONFIG_VARIABLE} is empty; set it to the path of a file, or unset it")
        return _required(cwd / name, CONFIG_VARIABLE)
    return next((path for folder in _folders(cwd) if _exists(path := folder / "slotpin.json")), None)


def _folders(cwd: Path) -> Iterator[Path]:
    yield cwd
    with contextlib.suppress(RuntimeError):  # no home folder: a bare user id, as in a container
        yield platformdirs.user_config_path("slotpin", appauthor=False)


def _required(path: Path, source: str) -> Path:
    if not _exists(path):
        raise UserError(f"{source}: {printable(str(path))} does not exist")
    return path


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return False
    except OSError:
        return True  # there, but not for us: reading it gives the reason
    return True


def read_file(path: Path) -> Tree:
    """The file's top-level object. Raises ConfigError."""
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([f"{name}: does not exist"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{name}: is a directory; give the path of a JSON file"]) from None
    except PermissionError:
        raise ConfigError([f"{name}: permission denied; give the path of a JSON file that slotpin may read"]) from None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "invalid path"
        raise ConfigError([f"{name}: can't be read: {reason}"]) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError([f"{name}: is larger than 1 MiB; give the path of slotpin's JSON file"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{name}:{line}: is not UTF-8; save the file as UTF-8"]) from None
    if not text.strip():
        raise ConfigError([f"{name}: is empty; write {{}} to use the defaults"])
    tree = parse_json(text, name)
    if not isinstance(tree, dict):
        raise ConfigError([f"{name}: $: {kind(tree)} is not allowed; use an object {{…}}"])
    return tree


class _Object(dict[str, object]):
    """A JSON object that remembers the keys it was given more than once."""

    repeated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Unfit:
    """A number that json would read although JSON, or a float, does not have it."""

    text: str


def parse_json(text: str, where: str) -> object:
    """Strict JSON: no repeated keys, NaN, Infinity or unpaired surrogates. Raises ConfigError.

    No line quotes the text itself, since it may hold a secret.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_Unfit,
            parse_float=_float,
            parse_int=_int,
        )
    except json.JSONDecodeError as error:
        raise ConfigError([f"{where}:{_syntax(error)}"]) from None
    except RecursionError:
        raise ConfigError([f"{where}: is nested too deeply"]) from None
    problems = [f"{where}: {json_path(path)}: {problem}" for path, problem in _oddities(value)]
    if problems:
        raise ConfigError(problems)
    return value


def _object(pairs: list[tuple[str, object]]) -> _Object:
    result = _Object(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        result.repeated = tuple(key for key, count in counts.items() if count > 1)
    return result


def _int(text: str) -> int | _Unfit:
    return int(text) if len(text) <= _MAX_DIGITS else _Unfit(f"a number of {len(text)} digits")


def _float(text: str) -> float | _Unfit:
    value = float(text)
    return value if math.isfinite(value) else _Unfit(clipped(text))


def _oddities(value: object) -> Iterator[tuple[tuple[Step, ...], str]]:
    # A stack, not recursion: the text decides the depth.
    stack: list[tuple[tuple[Step, ...], object]] = [((), value)]
    while stack:
        path, node = stack.pop()
        match node:
            case dict() | list() if len(path) > _MAX_DEPTH:
                yield path[:1], "is nested too deeply"
            case _Object():
                for key in node.repeated:
                    yield (*path, key), "is given more than once; keep one"
                for key in filter(lambda key: not is_unicode(key), node):
                    yield (*path, key), "the key has an unpaired surrogate; use whole characters"
                stack.extend(((*path, key), node[key]) for key in reversed(node))
            case list():
                stack.extend(((*path, index), node[index]) for index in reversed(range(len(node))))
            case _Unfit(text):
                yield path, f"{text} is not allowed; use a finite number"
            case str() if not is_unicode(node):
                yield path, "the text has an unpaired surrogate; use whole characters"


_NO_COMMA = "expected no comma before a closing bracket"
_EXPECTED = {
    "Expecting value": "expected a value",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes",
    "Expecting ':' delimiter": "expected ':' after the key",
    "Expecting ',' delimiter": "expected ',' or the closing bracket",
    "Extra data": "expected the end of the file",
    "Unterminated string starting at": "expected a closing '\"' for the string that starts here",
    "Invalid control character at": "expected an escape such as \\n instead of a control character",
    "Invalid \\escape": "expected a valid escape after '\\'",
    "Invalid \\uXXXX escape": "expected four hex digits after '\\u'",
    "Illegal trailing comma before end of object": _NO_COMMA,
    "Illegal trailing comma before end of array": _NO_COMMA,
}
_FOUND = {
    "": ", but the text ends",
    "/": "; JSON has no comments",
    "#": "; JSON has no comments",
    "'": "; JSON strings use double quotes",
}


def _syntax(error: json.JSONDecodeError) -> str:
    """`line:column: what was expected`."""
    message = error.msg.removesuffix(": ")
    expected = _EXPECTED.get(message, message[:1].lower() + message[1:])
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    at = error.pos
    if after[:1] in {"}", "]"} and before.endswith(","):
        at = len(before) - 1  # of the comma, as json itself says from Python 3.13 on
        expected = _NO_COMMA
    elif message.startswith("Expecting"):
        expected += _FOUND.get(after[:1], "")
    return f"{error.doc.count(chr(10), 0, at) + 1}:{at - error.doc.rfind(chr(10), 0, at)}: {expected}"


def unwrap_reasoning_zip(tree: Tree, where: str) -> tuple[Tree, frozenset[str], tuple[str, ...]]:
    """`{"reasoningZip": {…}}` as people have it in their Pi settings, read as slotpin's own sections.

    Returns (tree, the sections that came from it, notes). Raises ConfigError.
    """
    if "reasoningZip" not in tree:
        return tree, frozenset(), ()
    section = tree["reasoningZip"]
    if not isinstance(section, dict):
        raise ConfigError([f"{where}: $.reasoningZip: {kind(section)} is not allowed; use an object"])
    taken = {key: section[key] for key in ("llamaCppSlots", "compactor") if key in section}
    ignored = [key for key in section if key not in taken]
    if isinstance(compactor := taken.get("compactor"), dict):
        ignored += [f"compactor.{key}" for key in compactor if key not in ("baseUrl", "apiKey")]
        taken["compactor"] = {key: compactor[key] for key in ("baseUrl", "apiKey") if key in compactor}
    if twice := [key for key in taken if key in tree]:
        raise ConfigError(f"{where}: $.{key}: $.reasoningZip.{key} is given as well; keep one of them" for key in twice)
    rest = {key: value for key, value in tree.items() if key != "reasoningZip"}
    names = ", ".join(clipped(printable(key)) for key in ignored)
    notes = (f"{where}: $.reasoningZip: ignored, since slotpin does not use them: {names}",) if names else ()
    return {**rest, **taken}, frozenset(taken), notes


def setting_variables(environ: Mapping[str, str], known: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The `SLOTPIN_*` variables that are settings, and a problem line for each that is nothing."""
    found: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name in known:
            found[name] = environ[name]
        elif not _is_service_variable(name, environ[name]):
            hint = did_you_mean(name, [*known, *sorted(OTHER_VARIABLES)])
            hint = hint or "unset it, or see docs/configuration.md for the names"
            problems.append(f"{printable(name)}: is no setting of slotpin; {hint}")
    return found, tuple(problems)


def _is_service_variable(name: str, value: str) -> bool:
    if not _SERVICE_VARIABLE.fullmatch(name):
        return False
    # SLOTPIN_PORT=8484 is a person who means SLOTPIN_LISTEN_PORT; Kubernetes writes tcp://….
    return name != "SLOTPIN_PORT" or _SERVICE_VALUE.match(value) is not None


def scalar(text: str) -> object:
    """`true`, `-1`, `0.5` as JSON reads them; anything else stays text, for validation to judge."""
    try:
        value = parse_json(text, "")
    except ConfigError:
        return text
    return value if isinstance(value, bool | int | float) else text


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`did you mean X?`, or nothing when no candidate is close. Case and separators don't count."""
    folded = {_fold(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(_fold(name[:100]), folded, n=1, cutoff=0.7)
    return f"did you mean {folded[close[0]]}?" if close else ""


def same_word(one: str, other: str) -> bool:
    return _fold(one) == _fold(other)


def _fold(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


def json_path(steps: Iterable[Step]) -> str:
    """`$.recognisers.custom[0].name`; keys that are no plain word as `["…"]`."""
    return "$" + "".join(_step(step) for step in steps)


def _step(step: Step) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if _SIMPLE_KEY.fullmatch(step) else f"[{quoted(step)}]"


def shown(value: object) -> str:
    """A value for an error line: scalars as JSON text, cut to a readable length; the rest by its kind."""
    if isinstance(value, str):
        return quoted(value)
    return kind(value) if isinstance(value, dict | list) else clipped(json.dumps(value))


def kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def quoted(text: str) -> str:
    escaped = clipped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'


def clipped(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def printable(text: str) -> str:
    """One line that any terminal can print: control characters and surrogates as escapes."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
