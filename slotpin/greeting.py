"""What a person reads when slotpin is ready: where it listens, what it found there, what to do next."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slotpin import __version__
from slotpin.config import Listen, Loaded
from slotpin.pinning.decision import Unverified
from slotpin.pinning.endpoints import same_endpoint, server_root, socket_path
from slotpin.pinning.reasons import explain
from slotpin.pinning.topology import Topology
from slotpin.proxy.discover import Found
from slotpin.proxy.upstream import NOBODY


@dataclass(frozen=True, slots=True)
class Start:
    """How slotpin was started. `config`: what --config named; `own_server`: slotpin started it; `shared`: its slots
    share one context."""

    config: Path | None = None
    own_server: bool = False
    shared: bool = False


def greeting(url: str, loaded: Loaded, found: Found, start: Start) -> list[str]:
    """`url` is where it listens."""
    settings = loaded.settings
    mode = settings.llama_cpp_slots.enabled
    shown_mode = mode if isinstance(mode, str) else str(mode).lower()
    lines = [
        f"slotpin {__version__} listens on {url}",
        f"  llama-server      {server_root(settings.main.base_url)}",
        f"  slots             {_slots(loaded, found, start)}",
        f"  model             {found.model or 'unknown'}",
        f"  llamaCppSlots     enabled: {shown_mode}{_OFF if mode is False else ''}",
    ]
    if found.model is None:
        return lines
    if socket := socket_path(url):
        return [*lines, f"  any client        over the socket: curl --unix-socket {socket} http://localhost/v1/models"]
    set_up = " ".join([program(), "pi", "setup", *_flags(url, loaded, start)])
    return [
        *lines,
        f"  any client        base URL {url}/v1",
        f"  Pi                {set_up}, then: pi --model slotpin/{found.model}",
    ]


_OFF = ", so nothing is pinned; --enabled auto pins"


def _slots(loaded: Loaded, found: Found, start: Start) -> str:
    match found.probed:
        case Unverified(_, detail) if detail == NOBODY:
            return f"unknown: {_nobody(loaded)}"
        case Unverified(reason, detail):
            return f"unknown: {explain(reason, detail)}"
        case Topology(slots):
            contexts = sorted({slot.n_ctx for slot in slots if slot.n_ctx is not None})
            tokens = f"{' or '.join(map(str, contexts))} tokens"
            if len(slots) == 1:
                more = "slotpin up --parallel 4" if start.own_server else "start llama-server with --parallel 4"
                return f"1, so side requests can't be kept apart from the conversation; {more}"
            each = f", sharing {tokens}" if start.shared else f", context of each {tokens}"
            return f"{len(slots)}{each if contexts else ''}"


def _nobody(loaded: Loaded) -> str:
    main, asked = loaded.settings.main.base_url, loaded.settings.compactor.base_url
    key = "--upstream (main.baseUrl)" if same_endpoint(main, asked) else "compactor.baseUrl"
    return f"nothing listens at {server_root(asked)}: start llama-server, or mend {key}"


def program() -> str:
    """What to type to start this slotpin."""
    if shutil.which("slotpin"):
        return "slotpin"
    if Path(sys.argv[0]).name != "slotpin":
        return f"{shlex.quote(sys.executable)} -m slotpin"
    path, here = Path(sys.argv[0]).absolute(), Path.cwd()
    below = here in path.parent.parents
    return shlex.quote(str(path.relative_to(here) if below else path))


def _flags(url: str, loaded: Loaded, start: Start) -> list[str]:
    """What makes another command find this slotpin, started in any folder without this one's variables."""
    place, origins, listen = urlsplit(url), loaded.origins, loaded.settings.listen
    file = start.config is not None
    flags = ["--config", shlex.quote(str(start.config))] if file else []
    if place.hostname not in ("127.0.0.1", "0.0.0.0") and not (file and origins["listen.host"] == "file"):
        flags += ["--host", str(place.hostname)]
    in_file = file and origins["listen.port"] in ("file", "default") and listen.port == place.port
    if not in_file and (file or place.port != Listen().port):
        flags += ["--port", str(place.port)]
    return flags
