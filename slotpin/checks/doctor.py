"""`slotpin doctor`: is everything there that keeps the main conversation's cache, and what mends what is not."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from slotpin.checks.client import OWN_KEY, KeyWantedError, NoAnswerError, Server, own_key
from slotpin.checks.findings import Finding, Level
from slotpin.checks.idle_slots import Idle, Seen, provoke, without_provoking
from slotpin.checks.look import Props, Slot, Trouble, read_models, read_props, read_slots
from slotpin.checks.pi_models import believed, models_file
from slotpin.config import Listen, Loaded, Settings
from slotpin.errors import UserError
from slotpin.llama.cache import server_log
from slotpin.llama.series import is_patched
from slotpin.pinning.endpoints import is_loopback, same_endpoint, server_root
from slotpin.pinning.ids import normalise
from slotpin.proxy.questions import Questions

RECOMMENDED = "llama-server … --parallel 4 --kv-unified --no-cache-idle-slots --slots"
NO_CLEARING = "llama-server … --no-cache-idle-slots   # or slotpin up, whose server clears only to make room"

KEPT_BY_OURS = "kept: slotpin's own build clears one only to make room"


@dataclass(frozen=True, slots=True)
class Options:
    """`probe` None: two short prompts are sent if no slot is in use; True: if two are free; False: never.
    `file`: of the configuration."""

    probe: bool | None
    environ: Mapping[str, str]
    file: Path | None


async def examine(load: Callable[[], Loaded], options: Options) -> list[Finding]:
    """All findings, in the order in which a person would look."""
    try:
        loaded = load()
    except UserError as error:
        again = f"config check {shlex.quote(str(options.file))}" if options.file else "config show"
        return [
            Finding(Level.UNSAFE, "configuration", line, f"slotpin {again}   # after mending it")
            for line in str(error).splitlines()
        ]
    with Questions() as http:
        itself = await _slotpin(http, loaded)
        settings = _in_force(loaded.settings, itself.status)
        found = configuration(loaded, settings, pinning_known=not itself.silent)
        findings = [*found, itself.finding, *_sharing(itself.status)]
        server = Server(http, server_root(settings.compactor.base_url), settings.compactor.api_key.get_secret_value())
        if not same_endpoint(settings.main.base_url, settings.compactor.base_url):
            return [*findings, *await _two_servers(http, settings, server)]
        return [*findings, *await _server(server, settings, options)]


def configuration(loaded: Loaded, settings: Settings, *, pinning_known: bool) -> list[Finding]:
    """`settings` are those in force: of the slotpin that runs, as far as it says."""
    where = f"{loaded.path} is valid" if loaded.path else "no file, the defaults are in force"
    findings = [Finding(Level.OK, "configuration", where)]
    findings += [Finding(Level.BETTER, "configuration", note, "slotpin config show") for note in loaded.notes]
    if pinning_known and settings.llama_cpp_slots.enabled is False:
        text = "llamaCppSlots.enabled is false: everything is passed on as it came, nothing is pinned"
        remedy = 'slotpin serve --enabled auto   # or llamaCppSlots.enabled: "auto" in the file'
        findings.append(Finding(Level.BETTER, "pinning", text, remedy))
    if same_endpoint(settings.main.base_url, settings.listen.url):
        text = f"main.baseUrl is slotpin's own address, {settings.main.base_url}: requests would run in a circle"
        findings.append(Finding(Level.UNSAFE, "configuration", text, "slotpin serve --upstream http://HOST:PORT/v1"))
    return findings


# --- slotpin itself -------------------------------------------------------------------------------------------------


class Endpoints(msgspec.Struct):
    main: str


class Sharing(msgspec.Struct):
    """`state`: off, on, settling or lost; `strangers`: processes in front of the same server that share nothing."""

    state: str = "off"
    strangers: list[int] = []


class Status(msgspec.Struct):
    """What is read of `/slotpin/status`."""

    version: str
    mode: bool | str
    endpoints: Endpoints
    sharing: Sharing = msgspec.field(default_factory=Sharing)


async def slotpin_status(http: Questions, listen: Listen) -> Status | None:
    """None: something else than slotpin listens there. Raises NoAnswerError when nothing does, KeyWantedError."""
    reply = await Server(http, listen.url, own_key(listen)).get("/slotpin/status")
    if reply.wants_own_key:
        raise KeyWantedError(listen.url)
    return reply.read(Status) if reply.status == 200 else None


@dataclass(frozen=True, slots=True)
class _Itself:
    """`status` of the slotpin that runs in front of this server, None if none does or it is `silent`."""

    finding: Finding
    status: Status | None = None
    silent: bool = False


async def _slotpin(http: Questions, loaded: Loaded) -> _Itself:
    settings = loaded.settings
    if settings.listen.port == 0:
        return _Itself(Finding(Level.NOTE, "slotpin", "listen.port is 0, any free one: it was not looked for"))
    url = settings.listen.url
    try:
        status = await slotpin_status(http, settings.listen)
    except NoAnswerError:
        return _Itself(Finding(Level.NOTE, "slotpin", f"is not running on {url}", "slotpin serve"))
    except KeyWantedError:
        text = f"runs on {url} and wants a key, so how it pins is not known"
        remedy = f"{OWN_KEY.replace('set ', 'export ')}   # or slotpin doctor --config FILE, its own"
        return _Itself(Finding(Level.BETTER, "slotpin", text, remedy), silent=True)
    if status is None:
        text = f"another program listens on {url}, so slotpin can't"
        remedy = "slotpin serve --port PORT   # one that is free"
        return _Itself(Finding(Level.BETTER, "slotpin", text, remedy))
    return _running(status, url, loaded)


def _sharing(status: Status | None) -> list[Finding]:
    findings = []
    if status is not None and status.sharing.strangers:
        named = ", ".join(map(str, status.sharing.strangers))
        text = f"another one (process {named}) is in front of the same llama-server, and they share no slots"
        remedy = "kill PROCESS   # or sharing.redisUrl in the files of both"
        findings.append(Finding(Level.UNSAFE, "slotpin", text, remedy))
    if status is not None and status.sharing.state == "lost":
        text = "can't reach the Redis that it shares its slots through: nothing is pinned"
        findings.append(Finding(Level.BETTER, "slotpin", text, "redis-cli -u URL ping   # the sharing.redisUrl"))
    return findings


def _in_force(settings: Settings, status: Status | None) -> Settings:
    """What runs counts, whatever its configuration came from: `slotpin up` pins without a file."""
    if status is None or not isinstance(status.mode, bool | str) or status.mode == settings.llama_cpp_slots.enabled:
        return settings
    slots = settings.llama_cpp_slots.model_copy(update={"enabled": status.mode})
    return settings.model_copy(update={"llama_cpp_slots": slots})


def _running(status: Status, url: str, loaded: Loaded) -> _Itself:
    settings, origin = loaded.settings, loaded.origins["llamaCppSlots.enabled"]
    running = f"{status.version} runs on {url}"
    if not same_endpoint(status.endpoints.main, settings.main.base_url):
        text = f"{running}, but in front of {status.endpoints.main} and not of {settings.main.base_url}"
        return _Itself(Finding(Level.BETTER, "slotpin", text, "slotpin serve   # anew, with this configuration"))
    if status.mode != settings.llama_cpp_slots.enabled:
        said = "" if origin == "default" else f" (this configuration: {_mode(settings.llama_cpp_slots.enabled)})"
        text = f"{running} with enabled: {_mode(status.mode)}{said}"
        return _Itself(Finding(Level.NOTE, "slotpin", text), status)
    return _Itself(Finding(Level.OK, "slotpin", running), status)


def _mode(mode: bool | str) -> str:
    return str(mode).lower()


# --- llama-server ---------------------------------------------------------------------------------------------------


async def _two_servers(http: Questions, settings: Settings, compactor: Server) -> list[Finding]:
    """Nothing is pinned then; each has to be there."""
    text = "main and side requests have servers of their own: nothing needs to be pinned"
    findings = [Finding(Level.OK, "pinning", text)]
    try:
        await Server(http, server_root(settings.main.base_url), "none").get("/health")
    except NoAnswerError as error:
        findings.append(Finding(Level.UNSAFE, "main server", f"{server_root(settings.main.base_url)}: {error}"))
    props = await read_props(compactor)
    if isinstance(props, Trouble):
        findings.append(Finding(Level.UNSAFE, f"side {props.check}", props.text, props.remedy))
    return findings


async def _server(server: Server, settings: Settings, options: Options) -> list[Finding]:
    props = await read_props(server)
    if isinstance(props, Trouble):
        return [_unsafe(props)]
    findings = [build(server.root, props.build_info), Finding(Level.OK, "API key", "accepted, or none is wanted")]
    if props.role == "router":
        return [*findings, await _router(server)]
    if props.is_sleeping:
        text = "the server sleeps, which has emptied its slots; they were not looked at, as that would wake it"
        return [*findings, Finding(Level.BETTER, "slots", text, "llama-server … --sleep-idle-seconds -1")]
    slots = await read_slots(server)
    if isinstance(slots, Trouble):
        return [*findings, _unsafe(slots)]
    findings += slot_count(slots, settings)
    findings += contexts(slots, settings)
    findings += _pi(slots, settings, options.environ)
    if len(slots) > 1:
        patched = is_patched(props.build_info)
        seen = await _idle(server, slots, options, patched=patched)
        log = log_of(server.root) if patched else None
        findings += [memory(slots, seen, log), idle_slots(seen, settings, patched=patched)]
    return [*findings, anthropic_route(props)]


def _unsafe(trouble: Trouble) -> Finding:
    return Finding(Level.UNSAFE, trouble.check, trouble.text, trouble.remedy)


def build(root: str, build_info: str) -> Finding:
    where = f"{root} runs {build_info or 'an unknown build'}"
    if is_patched(build_info):
        return Finding(Level.OK, "llama-server", f"{where}, slotpin's own")
    if "+slotpin." in build_info:
        text = f"{where}: other patches than this slotpin's, so it counts as a stock server"
        return Finding(Level.BETTER, "llama-server", text, "slotpin build")
    return Finding(Level.OK, "llama-server", f"{where}, a stock server")


async def _router(server: Server) -> Finding:
    models = await read_models(server)
    loaded = [model.id for model in models if model.status and model.status.value == "loaded"]
    text = (
        f"router mode ({len(models)} models, loaded: {', '.join(loaded) or 'none'}): slots belong to a model there, "
        "so they can't be verified"
    )
    return Finding(Level.UNSAFE, "slots", text, RECOMMENDED.replace("…", "--model FILE"))


def slot_count(slots: Sequence[Slot], settings: Settings) -> list[Finding]:
    """How many there are, and whether main and side requests get different ones."""
    count, pin = len(slots), settings.llama_cpp_slots
    if count < 2:
        text = f"{count} slot: side requests can't be kept apart from the main conversation"
        return [Finding(Level.UNSAFE, "slots", text, RECOMMENDED)]
    main, compactor = normalise(pin.main_id_slot, count), normalise(pin.compactor_id_slot, count)
    if main == compactor:
        text = f"mainIdSlot {pin.main_id_slot} and compactorIdSlot {pin.compactor_id_slot} are slot {main} of {count}"
        remedy = "slotpin serve --set llamaCppSlots.mainIdSlot=0 --set llamaCppSlots.compactorIdSlot=1"
        return [Finding(Level.UNSAFE, "slots", text, remedy)]
    return [Finding(Level.OK, "slots", f"{count}: main requests on slot {main}, side requests on slot {compactor}")]


def contexts(slots: Sequence[Slot], settings: Settings) -> list[Finding]:
    """Each slot's context; a main slot that is smaller than another is a waste."""
    known = {slot.id: slot.n_ctx for slot in slots if slot.n_ctx}
    if len(known) < len(slots) or not slots:
        return [Finding(Level.NOTE, "context", "the server does not say how much each slot has")]
    largest = max(known, key=lambda slot: known[slot])
    smaller = [f"slot {slot} has {n_ctx}" for slot, n_ctx in known.items() if n_ctx < known[largest]]
    if not smaller:
        return [Finding(Level.OK, "context", f"{known[largest]} tokens a slot")]
    main = _main_slot(slots, settings)
    if main.n_ctx != known[largest]:
        text = f"the main slot {main.id} has {main.n_ctx} tokens, slot {largest} has {known[largest]}"
        return [Finding(Level.BETTER, "context", text, f"slotpin serve --set llamaCppSlots.mainIdSlot={largest}")]
    text = f"{known[largest]} tokens in the main slot; {', '.join(smaller)}: such slots are taken last"
    return [Finding(Level.NOTE, "context", text)]


def _main_slot(slots: Sequence[Slot], settings: Settings) -> Slot:
    return slots[normalise(settings.llama_cpp_slots.main_id_slot, len(slots))]


def _pi(slots: Sequence[Slot], settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """What Pi believes a conversation may have, against what the main slot has."""
    file = models_file(environ)
    models = believed(file, settings.listen.url)
    n_ctx = _main_slot(slots, settings).n_ctx if slots else None
    if isinstance(models, str):
        return [Finding(Level.NOTE, "Pi", f"{file} can't be read: {models}")]
    if not models or not n_ctx:
        return []
    findings = [
        Finding(
            Level.BETTER,
            "Pi",
            f"believes that {each.model} has {each.context_window} tokens, the slot has {n_ctx}: long turns will fail",
            f'"contextWindow": {n_ctx} for {each.provider}/{each.model} in {file}',
        )
        for each in models
        if each.context_window > n_ctx
    ]
    fits = f"its contextWindow for slotpin ({max(each.context_window for each in models)}) fits into the slot"
    return findings or [Finding(Level.OK, "Pi", fits)]


def log_of(root: str) -> Path | None:
    """Where the server that `slotpin up` has started on this machine writes."""
    place = urlsplit(root)
    path = server_log(place.port or 0)
    return path if is_loopback(place.hostname or "") and path.is_file() else None


async def _idle(server: Server, slots: Sequence[Slot], options: Options, *, patched: bool) -> Seen:
    if patched and not options.probe:
        return without_provoking(slots, KEPT_BY_OURS)
    if options.probe is False:
        return without_provoking(slots, "left out: --no-probe")
    seen = await provoke(server, slots, careful=options.probe is None)
    return without_provoking(slots, seen.detail) if seen.idle is Idle.UNKNOWN else seen


def memory(slots: Sequence[Slot], seen: Seen, log: Path | None = None) -> Finding:
    """One pool for all slots, or a part for each: the server says neither, but two effects tell. `log`: its own."""
    if seen.idle is Idle.CLEARED:
        return Finding(Level.OK, "KV memory", "unified: the slots share one pool, as the cleared slot shows")
    largest = max((slot.n_ctx or 0 for slot in slots), default=0)
    held = sum(slot.n_prompt_tokens or 0 for slot in slots)
    if 0 < largest < held:
        return Finding(Level.OK, "KV memory", f"more than one slot's context: the slots hold {held} tokens together")
    text = "unified or split is unknown, as the server does not show it; if unified, all slots share the context"
    named = shlex.quote(str(log)) if log else "LOG   # llama-server's own"
    return Finding(Level.NOTE, "KV memory", text, f"grep kv_unified {named}")


def idle_slots(seen: Seen, settings: Settings, *, patched: bool) -> Finding:
    # enabled: true pins in any case; otherwise slotpin notices the empty slot and leaves the choice to the server.
    level = Level.UNSAFE if settings.llama_cpp_slots.enabled is True else Level.BETTER
    match seen.idle:
        case Idle.KEPT:
            return Finding(Level.OK, "idle slots", seen.detail)
        case Idle.UNKNOWN if patched:
            return Finding(Level.OK, "idle slots", KEPT_BY_OURS)
        case Idle.UNKNOWN:
            return Finding(Level.NOTE, "idle slots", seen.detail)
        case Idle.CLEARED:
            text = f"the server clears them: {seen.detail}; a pinned conversation would lose its cache"
            return Finding(level, "idle slots", text, NO_CLEARING)
        case Idle.EMPTIED if patched:
            text = f"{seen.detail}: there was no room for all"
            return Finding(Level.BETTER, "idle slots", text, "slotpin up --ctx-size N   # a larger one")
        case Idle.EMPTIED:
            return Finding(level, "idle slots", f"the server seems to clear them: {seen.detail}", NO_CLEARING)


def anthropic_route(props: Props) -> Finding:
    if is_patched(props.build_info):
        return Finding(Level.OK, "/v1/messages", "heeds id_slot")
    text = "a stock server ignores id_slot there: requests on the Anthropic route are not pinned"
    return Finding(Level.NOTE, "/v1/messages", text, "slotpin up   # its own server heeds it")
