"""The settings: what each key may be, and its default. `docs/configuration.md` says what each is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from slotpin.config_sources import kind, quoted, shown
from slotpin.pinning.conversations import SESSION_FIELDS, SESSION_HEADERS
from slotpin.pinning.endpoints import is_loopback, same_endpoint, socket_path

DEFAULT_BASE_URL = "http://127.0.0.1:8080/v1"
MASK = "********"
MAX_SLOT_ID = 2**31 - 1  # llama-server reads id_slot into an int


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a key accepts, to end an error line with: "use …". A secret's value never appears in that line."""

    text: str
    secret: bool = False


# Validators raise ValueError with the whole complaint, or with none when value and Allowed say enough.


def _base_url(value: str) -> str:
    # A user name or a query may be a secret, so this line can't show the URL.
    if re.search(r"[?#@]", value):
        raise ValueError("a URL with a user name, a query or a fragment is not allowed; leave that part out")
    if value.lower().startswith("unix:"):
        return _unix(value)
    if re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]+)?(/.*)?", value):
        raise ValueError(f"{quoted(value)} has no scheme; did you mean {quoted(f'http://{value}')}?")
    if not re.fullmatch(r"https?://[!-~]+", value, re.IGNORECASE) or re.search(r'["<>\\^`{|}]', value):
        raise ValueError
    try:
        url = urlsplit(value)
        host, port = url.hostname or "", url.port
    except ValueError:  # a port out of range, a bad bracket
        raise ValueError from None
    if port == 0 or url.netloc.endswith(":"):
        raise ValueError
    if not (_is_ipv6(host) if "[" in url.netloc else _is_name(host)):
        raise ValueError
    return value


def _listen_host(value: str) -> str:
    if value.lower().startswith("unix:"):
        return _unix(value)
    if not (_is_ipv6(value) or _is_name(value)):
        raise ValueError
    return value


def _unix(value: str) -> str:
    """`unix:/path`, as nginx and gunicorn have it; also `unix:///path`."""
    path = socket_path(value)
    if not re.fullmatch(r"/[^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f]", path):
        raise ValueError(f"{shown(value)} names no socket; use unix: and an absolute path, such as unix:/tmp/x.sock")
    return f"unix:{path}"


def _is_name(text: str) -> bool:
    """A host name or an IPv4 address. Names in other scripts have to come in their ASCII form."""
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", label) for label in labels)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return "%" not in text


def _header_safe(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", value.get_secret_value()):
        raise ValueError
    return value


def _redis_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    try:
        parts = urlsplit(url)
        has_place = bool(parts.path.strip("/")) if parts.scheme == "unix" else bool(parts.hostname)
        port = parts.port  # raises for one out of range
    except ValueError:
        raise ValueError from None
    if (
        parts.scheme not in ("redis", "rediss", "unix")
        or not has_place
        or port == 0
        or not re.fullmatch(r"[!-~]+", url)
    ):
        raise ValueError
    return value


def _no_number(value: object) -> object:
    # To a Literal, 0 and 1.0 are as good as false and true.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError  # noqa: TRY004, pydantic takes no TypeError
    return value


def _conversation_slots(value: object) -> object:
    if value in ("auto", "main-only"):
        return value
    return _array(value, lambda each: type(each) is int and 0 <= each <= MAX_SLOT_ID, "a slot id; use integers from 0")


def _header_names(value: object) -> tuple[object, ...]:
    return _array(
        value, lambda each: _fits(each, r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), "a header name; use letters, digits and dashes"
    )


def _field_names(value: object) -> tuple[object, ...]:
    return _array(
        value, lambda each: _fits(each, r"[^.]+(\.[^.]+)*"), "a member name; use names with dots between the levels"
    )


def _fits(value: object, pattern: str) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _allowed_hosts(value: object) -> tuple[object, ...]:
    what = "a host name; use names without a port, .name for a domain with all below it, or *"
    return _array(value, lambda each: isinstance(each, str) and (each == "*" or _is_name(each.removeprefix("."))), what)


def _secrets(value: object) -> tuple[SecretStr, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError  # noqa: TRY004, pydantic takes no TypeError
    secrets = [SecretStr(each) if isinstance(each, str) else each for each in value]
    for each in secrets:
        if not isinstance(each, SecretStr):
            raise ValueError(f"{kind(each)} in the array is not a key; use strings")  # noqa: TRY004, as above
        if not re.fullmatch(r"[!-~]+", each.get_secret_value()):
            raise ValueError("a string in the array is not a key; use visible ASCII characters without spaces")
    return tuple(secrets)


def _array(value: object, is_right: Callable[[object], bool], what: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError  # noqa: TRY004, pydantic takes no TypeError
    for each in value:
        if not is_right(each):
            raise ValueError(f"{shown(each)} in the array is not {what}")
    return tuple(value)


_ARRAY = PlainSerializer(lambda value: value if isinstance(value, str) else list(value))
_SECONDS = PlainSerializer(lambda value: int(value) if value == int(value) else value)

Switch = Annotated[bool, Allowed("true or false")]
Enabled = Annotated[Literal[False, True, "auto"], BeforeValidator(_no_number), Allowed('false, "auto" or true')]
SlotId = Annotated[int, Field(ge=0, le=MAX_SLOT_ID), Allowed(f"an integer from 0 to {MAX_SLOT_ID}")]
Port = Annotated[int, Field(ge=0, le=65535), Allowed("an integer from 0 to 65535")]
Host = Annotated[
    str,
    AfterValidator(_listen_host),
    Allowed("a host name or an IP address without port or brackets, such as 127.0.0.1 or ::1, or unix:/path"),
]
BaseUrl = Annotated[
    str,
    AfterValidator(_base_url),
    Allowed(f"an http:// or https:// URL with a host, such as {DEFAULT_BASE_URL}, or unix:/path"),
]
Secret = Annotated[
    SecretStr,
    AfterValidator(_header_safe),
    PlainSerializer(lambda _: MASK),
    Allowed("a string of visible ASCII characters without spaces", secret=True),
]
RedisUrl = Annotated[
    SecretStr,
    AfterValidator(_redis_url),
    PlainSerializer(lambda _: MASK),
    Allowed("a URL such as redis://127.0.0.1:6379, rediss://HOST:PORT or unix:///path", secret=True),
]
Text = Annotated[str, Field(min_length=1), Allowed("a string that is not empty")]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
    Allowed("1 to 64 letters, digits, dots, dashes and underscores, a letter or a digit first"),
]
NameOrNone = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"),
    Allowed("up to 64 letters, digits, dots, dashes and underscores, a letter or a digit first"),
]
Seconds = Annotated[
    float,
    Field(ge=0, le=3600, allow_inf_nan=False),
    _SECONDS,
    Allowed("a number of seconds from 0 to 3600"),
]
LeaseSeconds = Annotated[
    float,
    Field(ge=1, le=300, allow_inf_nan=False),
    _SECONDS,
    Allowed("a number of seconds from 1 to 300"),
]
LongSeconds = Annotated[
    float,
    Field(ge=0, le=31_536_000, allow_inf_nan=False),
    _SECONDS,
    Allowed("a number of seconds from 0 to 31536000"),
]
ConversationSlots = Annotated[
    Literal["auto", "main-only"] | tuple[int, ...],
    PlainValidator(_conversation_slots),
    _ARRAY,
    Allowed('"auto", "main-only" or an array of slot ids'),
]
HeaderNames = Annotated[
    tuple[str, ...],
    PlainValidator(_header_names),
    _ARRAY,
    Allowed("an array of header names"),
]
FieldNames = Annotated[
    tuple[str, ...],
    PlainValidator(_field_names),
    _ARRAY,
    Allowed('an array of member names, with dots between levels, such as "metadata.user_id"'),
]
HostNames = Annotated[
    tuple[str, ...],
    PlainValidator(_allowed_hosts),
    _ARRAY,
    Allowed("an array of host names"),
]
Secrets = Annotated[
    tuple[SecretStr, ...],
    PlainValidator(_secrets),
    PlainSerializer(lambda value: [MASK for _ in value]),
    Allowed("an array of strings of visible ASCII characters without spaces", secret=True),
]
PositiveSeconds = Annotated[
    float,
    Field(gt=0, le=3600, allow_inf_nan=False),
    _SECONDS,
    Allowed("a number of seconds above 0, at most 3600"),
]


class _Model(BaseModel):
    """JSON knows the keys in camelCase only (`config.load` asks for that); Python code uses the names here."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        hide_input_in_errors=True,
    )


_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Listen(_Model):
    """`host` is `unix:/path` for a socket. Without `api_keys` everybody who can connect is served."""

    host: Host = "127.0.0.1"
    port: Port = 8484
    api_keys: Secrets = ()
    allowed_hosts: HostNames = ()
    forwarded_headers: Switch = False
    via: Switch = False

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host.startswith("unix:") or is_loopback(self.host)

    @property
    def url(self) -> str:
        """Where a client on this machine connects."""
        if self.host.startswith("unix:"):
            return self.host
        host = _ANY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Endpoint(_Model):
    base_url: BaseUrl = DEFAULT_BASE_URL


class Main(Endpoint):
    """Without `api_key` clients bring the server's."""

    api_key: Secret | None = None


class Compactor(Endpoint):
    """`base_url` is main's when it is not given, and so is `api_key` for main's server: `Settings` fills them in."""

    api_key: Secret = SecretStr("sk-placeholder")


class LlamaCppSlots(_Model):
    enabled: Enabled = False
    main_id_slot: SlotId = 0
    compactor_id_slot: SlotId = 1


class Conversations(_Model):
    """`slots`: which ones the conversations after the first may have. Ids are taken from the first source that a
    request has."""

    slots: ConversationSlots = "auto"
    session_headers: HeaderNames = SESSION_HEADERS
    session_fields: FieldNames = SESSION_FIELDS


class Gate(_Model):
    """0 switches either off."""

    wait_seconds: Seconds = 600.0
    keep_alive_seconds: Seconds = 15.0


class Reuse(_Model):
    retry_seconds: LongSeconds = 1800.0


class Sharing(_Model):
    """Without `redis_url` nothing is shared. `server` is what the slotpins in front of one llama-server call it."""

    redis_url: RedisUrl | None = None
    server: NameOrNone = ""
    lease_seconds: LeaseSeconds = 10.0
    prefix: Name = "slotpin"


class BuiltinRecognisers(_Model):
    """One switch for each rule of `pinning/roles.py`."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    pi_summary: Switch = True
    pi_reasoning_zip: Switch = True
    opencode_summary: Switch = True
    claude_code_summary: Switch = True
    open_webui_task: Switch = True

    def enabled(self) -> frozenset[str]:
        """Names (`pi-summary`, …) of the rules that are switched on."""
        return frozenset(name for name, on in self.model_dump(by_alias=True).items() if on)


class CustomRecogniser(_Model):
    """Matches when every condition that is given matches: `model` and `api_key` the whole value, `system`, `user` and
    `last` the opening of a text of the first system, the first user and the last message, case-sensitive."""

    name: Name
    model: Text | None = None
    api_key: Secret | None = None
    system: Text | None = None
    user: Text | None = None
    last: Text | None = None
    role: Annotated[Literal["compactor", "main"], Allowed('"compactor" or "main"')] = "compactor"
    on_unsafe: Annotated[Literal["refuse", "pass"], Allowed('"refuse" or "pass"')] = "refuse"

    @model_validator(mode="after")
    def _has_condition(self) -> Self:
        if not any((self.model, self.api_key, self.system, self.user, self.last)):
            raise ValueError("has no condition; give at least one of model, apiKey, system, user, last")
        return self


class Recognisers(_Model):
    builtin: BuiltinRecognisers = BuiltinRecognisers()
    custom: Annotated[
        tuple[CustomRecogniser, ...], Field(strict=False), Allowed("an array of objects", secret=True)
    ] = ()

    @field_validator("custom")
    @classmethod
    def _distinct_names(cls, custom: tuple[CustomRecogniser, ...]) -> tuple[CustomRecogniser, ...]:
        taken = set(BuiltinRecognisers().enabled())
        for rule in custom:
            if rule.name in taken:
                raise ValueError(f"the name {quoted(rule.name)} is taken already; give each recogniser its own")
            taken.add(rule.name)
        return custom


class Log(_Model):
    format: Annotated[Literal["auto", "console", "json"], Allowed('"auto", "console" or "json"')] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], Allowed('"debug", "info", "warning" or "error"')] = (
        "info"
    )


class Timeouts(_Model):
    """0 switches `idle_seconds` off."""

    connect_seconds: PositiveSeconds = 10.0
    idle_seconds: LongSeconds = 0.0
    drain_seconds: Seconds = 30.0


class Settings(_Model):
    listen: Listen = Listen()
    main: Main = Main()
    compactor: Compactor = Compactor()
    llama_cpp_slots: LlamaCppSlots = LlamaCppSlots()
    conversations: Conversations = Conversations()
    gate: Gate = Gate()
    reuse: Reuse = Reuse()
    sharing: Sharing = Sharing()
    recognisers: Recognisers = Recognisers()
    log: Log = Log()
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _compactor_as_main(self) -> Self:
        main, compactor = self.main, self.compactor
        if "base_url" not in compactor.model_fields_set:
            compactor = compactor.model_copy(update={"base_url": main.base_url})
        same = same_endpoint(main.base_url, compactor.base_url)
        if main.api_key is not None and same and "api_key" not in compactor.model_fields_set:
            compactor = compactor.model_copy(update={"api_key": main.api_key})
        object.__setattr__(self, "compactor", compactor)  # frozen, but still under construction
        return self
