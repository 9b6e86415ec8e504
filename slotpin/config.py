"""File, environment and flags -> settings, or one line for each problem. See `docs/configuration.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slotpin.config_models import (
    MASK,
    Allowed,
    BuiltinRecognisers,
    Compactor,
    Conversations,
    CustomRecogniser,
    Endpoint,
    Gate,
    Listen,
    LlamaCppSlots,
    Log,
    Main,
    Recognisers,
    Reuse,
    Settings,
    Timeouts,
)
from slotpin.config_sources import (
    OTHER_VARIABLES,
    ConfigError,
    Step,
    Tree,
    did_you_mean,
    find_config,
    is_unicode,
    json_path,
    kind,
    parse_json,
    printable,
    read_file,
    same_word,
    scalar,
    setting_variables,
    shown,
    unwrap_reasoning_zip,
)

__all__ = [
    "KEYS",
    "MASK",
    "OTHER_VARIABLES",
    "BuiltinRecognisers",
    "Compactor",
    "ConfigError",
    "Conversations",
    "CustomRecogniser",
    "Endpoint",
    "Gate",
    "Key",
    "Listen",
    "LlamaCppSlots",
    "Loaded",
    "Log",
    "Main",
    "Recognisers",
    "Reuse",
    "Settings",
    "Timeouts",
    "as_json",
    "changed",
    "describe",
    "find_config",
    "load",
    "pin_relevant",
]


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `form`: how the text of its variable or flag is read."""

    path: str  # llamaCppSlots.mainIdSlot
    attribute: str  # llama_cpp_slots.main_id_slot, in Settings
    variable: str  # SLOTPIN_LLAMA_CPP_SLOTS_MAIN_ID_SLOT
    form: Literal["text", "scalar", "json", "text or array"]


def _keys(model: type[BaseModel], path: str = "", attribute: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        here = f"{path}{field.alias}"
        if (section := _section(field)) is not None:
            yield from _keys(section, f"{here}.", f"{attribute}{name}.")
        else:
            yield Key(here, f"{attribute}{name}", _variable(here), _form(field.annotation))


def _variable(path: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path)
    return "SLOTPIN_" + re.sub(r"[.-]", "_", words).upper()


def _form(annotation: object) -> Literal["text", "scalar", "json", "text or array"]:
    if get_origin(annotation) is tuple:
        return "json"
    if any(get_origin(part) is tuple for part in get_args(annotation)):
        return "text or array"
    values = get_args(annotation)  # of a Literal, or of `Secret | None`
    is_secret = any(get_args(part)[:1] == (SecretStr,) for part in values)
    is_name = bool(values) and all(isinstance(value, str) for value in values)
    return "text" if annotation in (str, SecretStr) or is_secret or is_name else "scalar"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


KEYS: Mapping[str, Key] = MappingProxyType({key.path: key for key in _keys(Settings)})


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins`: for each of KEYS "default", "file", "env SLOTPIN_X" or "flag". `notes`: what is legal but odd."""

    settings: Settings
    path: Path | None
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()


def load(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> Loaded:
    """Flags win over the environment, the environment over the file, the file over the defaults.

    `overrides`: dotted JSON path -> text, from the command line. Raises ConfigError with all problems found.
    """
    file = _read(path)
    origins = {key: "file" if _has(file.tree, key) else "default" for key in KEYS}
    # The file on its own first: what a variable covers up must be right all the same.
    _, problems = _validate(file.tree, origins, file)

    tree = file.tree
    for layer, lines in (_from_environment(environ), _from_flags(overrides)):
        problems += lines
        for key, (origin, value) in layer.items():
            origins[key] = origin
            tree = _with(tree, key.split("."), value)
    settings, lines = _validate(tree, origins, file)
    problems += lines
    if settings is None or problems:
        raise ConfigError(dict.fromkeys(problems))
    return Loaded(settings, path, MappingProxyType(origins), (*file.notes, *_advice(settings)))


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tree: Tree
    moved: frozenset[str]  # sections that stand under reasoningZip
    notes: tuple[str, ...]


def _read(path: Path | None) -> _File:
    if path is None:
        return _File("", {}, frozenset(), ())
    name = printable(str(path))
    return _File(name, *unwrap_reasoning_zip(read_file(path), name))


_Layer = dict[str, tuple[str, object]]


def _from_environment(environ: Mapping[str, str]) -> tuple[_Layer, list[str]]:
    variables = {key.variable: key for key in KEYS.values()}
    found, unknown = setting_variables(environ, variables)
    problems = list(unknown)
    layer: _Layer = {}
    for name, text in found.items():
        key = variables[name]
        try:
            layer[key.path] = (f"env {name}", _value(key, text, name))
        except ConfigError as error:
            problems += error.lines
    return layer, problems


def _from_flags(overrides: Mapping[str, str]) -> tuple[_Layer, list[str]]:
    problems: list[str] = []
    layer: _Layer = {}
    for path, text in overrides.items():
        try:
            layer[path] = ("flag", _value(_key(path), text, f"command line: $.{path}"))
        except ConfigError as error:
            problems += error.lines
    return layer, problems


def _key(path: str) -> Key:
    if path in KEYS:
        return KEYS[path]
    place = f"command line: {json_path(path.split('.'))}"
    if inside := next((key for key in KEYS if key.startswith(f"{path}.")), None):
        raise ConfigError([f"{place}: is a section; set one of its keys, such as {inside}"])
    hint = did_you_mean(path, KEYS) or "see docs/configuration.md for the keys"
    raise ConfigError([f"{place}: unknown key; {hint}"])


def _value(key: Key, text: str, where: str) -> object:
    if not is_unicode(text):
        raise ConfigError([f"{where}: is not UTF-8; use UTF-8 text"])
    if key.form == "json" or (key.form == "text or array" and text.lstrip().startswith("[")):
        return parse_json(text, where)
    return scalar(text) if key.form == "scalar" else text


def _has(tree: Tree, path: str) -> bool:
    node: object = tree
    for step in path.split("."):
        if not isinstance(node, dict) or step not in node:
            return False
        node = node[step]
    return True


def _with(tree: Tree, steps: Sequence[str], value: object) -> Tree:
    first, *rest = steps
    if not rest:
        return {**tree, first: value}
    inner = tree.get(first, {})
    if not isinstance(inner, dict):
        return tree  # the file's mistake, and reported as such
    return {**tree, first: _with(inner, rest, value)}


def _validate(tree: Tree, origins: Mapping[str, str], file: _File) -> tuple[Settings | None, list[str]]:
    try:
        return Settings.model_validate(tree, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, [_problem(details, origins, file) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, origins: Mapping[str, str], file: _File) -> str:
    steps = details["loc"]
    index = next((at for at, step in enumerate(steps) if isinstance(step, int)), None)
    # What is in no origin is no key, or a whole section: only the file can hold such.
    origin = origins.get(".".join(map(str, steps[:index])), "file")
    complaint = _complaint(details)
    if origin == "file":
        prefix = ("reasoningZip",) if file.moved.intersection(map(str, steps[:1])) else ()
        return f"{file.name}: {json_path((*prefix, *steps))}: {complaint}"
    source = "command line" if origin == "flag" else origin.removeprefix("env ")
    return f"{source}: {json_path(steps)}: {complaint}"


def _complaint(details: ErrorDetails) -> str:
    model, field = _place(details["loc"])
    if details["type"] == "extra_forbidden":
        return f"unknown key; {_known_key(details['loc'], model)}"
    allowed = _allowed(field)
    if details["type"] == "missing":
        return f"is missing; use {allowed.text}"
    if details["type"] == "value_error" and (message := str(details["ctx"]["error"])):
        return message
    value = details["input"]
    if not allowed.secret:
        return f"{shown(value)} is not allowed; use {allowed.text}"
    return f"{'this string' if isinstance(value, str) else kind(value)} is not allowed; use {allowed.text}"


def _place(steps: Sequence[Step]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that a step belongs to, and its field; None for the root, an array's element, no key."""
    model: type[BaseModel] = Settings
    field: FieldInfo | None = None
    for step in steps:
        if field is not None:
            model, field = _section(field) or get_args(field.annotation)[0], None
        if isinstance(step, str):
            field = next((each for each in model.model_fields.values() if each.alias == step), None)
    return model, field


_AN_OBJECT = Allowed("an object", secret=True)


def _allowed(field: FieldInfo | None) -> Allowed:
    if field is None:
        return _AN_OBJECT
    # `Text | None` keeps the notes of Text one level down.
    inner = (note for part in get_args(field.annotation) for note in getattr(part, "__metadata__", ()))
    return next((note for note in (*field.metadata, *inner) if isinstance(note, Allowed)), _AN_OBJECT)


def _known_key(steps: Sequence[Step], model: type[BaseModel]) -> str:
    name = str(steps[-1])
    siblings = [str(field.alias) for field in model.model_fields.values()]
    if hint := did_you_mean(name, siblings):
        return hint
    elsewhere = next((key for key in KEYS if same_word(key.rpartition(".")[2], name)), None)
    if elsewhere and len(steps) == 1:
        return f"did you mean {json_path(elsewhere.split('.'))}?"
    return f"known here: {', '.join(siblings)}"


def _advice(settings: Settings) -> tuple[str, ...]:
    return (*_open_to_others(settings.listen), *_equal_slots(settings.llama_cpp_slots))


def _open_to_others(listen: Listen) -> tuple[str, ...]:
    if listen.is_local or listen.api_keys:
        return ()
    effect = "everybody on that network can use llama-server and read /slots"
    return (f"listen.host is {listen.host} and listen.apiKeys is empty: {effect}; set listen.apiKeys, or 127.0.0.1",)


def _equal_slots(slots: LlamaCppSlots) -> tuple[str, ...]:
    if slots.enabled is False or slots.main_id_slot != slots.compactor_id_slot:
        return ()
    effect = (
        "compactor requests replace the main conversation's cache"
        if slots.enabled is True
        else "nothing is pinned and compactor requests are refused"
    )
    both = f"llamaCppSlots.mainIdSlot and llamaCppSlots.compactorIdSlot are both {slots.main_id_slot}"
    return (f"{both}: {effect}; give them different ids",)


def describe(loaded: Loaded) -> list[str]:
    """Lines for `config show`: `path = value   (origin)`, aligned, secrets masked."""
    values = _effective(loaded.settings)
    texts = {path: printable(json.dumps(value, ensure_ascii=False)) for path, value in values.items()}
    path_width, text_width = max(map(len, texts)), max(map(len, texts.values()))
    return [
        f"{path:<{path_width}} = {text:<{min(text_width, 40)}}   ({_origin(path, loaded)})"
        for path, text in texts.items()
    ]


def _origin(path: str, loaded: Loaded) -> str:
    origin = loaded.origins[path]
    if origin == "default" and path == "compactor.baseUrl":
        return "default: main.baseUrl"
    if origin == "default" and path == "compactor.apiKey":
        settings = loaded.settings
        return "default: main.apiKey" if settings.compactor.api_key == settings.main.api_key else origin
    return origin


def as_json(loaded: Loaded) -> dict[str, object]:
    """The same for `config show --json`."""
    return {
        "file": None if loaded.path is None else str(loaded.path),
        "settings": _dump(loaded.settings),
        "origins": dict(loaded.origins),
        "notes": list(loaded.notes),
    }


def _dump(settings: Settings) -> Tree:
    # Secret's serializer masks: there is no way to dump settings with a secret in them.
    return settings.model_dump(mode="json", by_alias=True)


def _effective(settings: Settings) -> dict[str, object]:
    dump = _dump(settings)
    result: dict[str, object] = {}
    for path in KEYS:
        node: object = dump
        for step in path.split("."):
            node = cast("Tree", node)[step]
        result[path] = node
    return result


def changed(old: Settings, new: Settings) -> tuple[str, ...]:
    """Paths of the keys that differ, for the log line of a reload."""
    return tuple(key.path for key in KEYS.values() if attrgetter(key.attribute)(old) != attrgetter(key.attribute)(new))


def pin_relevant(settings: Settings) -> Hashable:
    """What a binding depends on: one made under a different value was made under other settings."""
    return (settings.llama_cpp_slots, settings.main, settings.compactor)
