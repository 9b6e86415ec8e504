"""What all exchanges share, and the settings that are in force."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from pydantic import SecretStr
from xxhash import xxh3_64_hexdigest

from slotpin.config import Settings, pin_relevant
from slotpin.observe.history import History
from slotpin.observe.log import Log
from slotpin.observe.observer import Observer
from slotpin.observe.warnings import Warner
from slotpin.pinning.bindings import Bindings
from slotpin.pinning.conversations import Conversations, SessionId, Sources
from slotpin.pinning.decision import PinSettings
from slotpin.pinning.endpoints import normalised, same_endpoint, server_root
from slotpin.pinning.reasons import Reason, explain
from slotpin.pinning.roles import BUILTIN, OnUnsafe, Recogniser, Recognisers, Role
from slotpin.proxy.neighbours import ALONE, Neighbours, Strangers
from slotpin.proxy.probe import Probe, Target
from slotpin.proxy.server import Server
from slotpin.proxy.sharing.link import check_installed, shown
from slotpin.proxy.sharing.shared import Options, Shared
from slotpin.proxy.upstream import Address, UpstreamPool


@dataclass(frozen=True, slots=True)
class Running:
    """Settings in force, made ready for use. An exchange keeps the one that it began with."""

    settings: Settings
    pin: PinSettings
    recognisers: Recognisers
    main: Address
    compactor: Address
    probe_target: Target
    session_sources: Sources
    main_authorization: bytes | None  # in place of the client's; empty: none goes to the server

    @property
    def retry_seconds(self) -> float:
        """After how long a server that pinning did not help is looked at again."""
        return self.settings.reuse.retry_seconds

    @classmethod
    def of(cls, settings: Settings, generation: int) -> Running:
        slots = settings.llama_cpp_slots
        main, compactor = settings.main.base_url, settings.compactor.base_url
        pin = PinSettings(
            enabled=slots.enabled,
            main_id=slots.main_id_slot,
            compactor_id=slots.compactor_id_slot,
            same_endpoint=same_endpoint(main, compactor),
            generation=generation,
        )
        return cls(
            settings=settings,
            pin=pin,
            recognisers=_recognisers(settings),
            main=Address.of(server_root(main)),
            compactor=Address.of(server_root(compactor)),
            probe_target=Target(server_root(compactor), settings.compactor.api_key.get_secret_value()),
            session_sources=Sources(settings.conversations.session_headers, settings.conversations.session_fields),
            main_authorization=_main_authorization(settings),
        )


class State:
    """`clock` gives seconds, and only ages are taken from it. Raises UserError where slots are to be shared and the
    client for it is missing."""

    def __init__(self, settings: Settings, log: Log, clock: Callable[[], float]) -> None:
        self.log = log
        self.clock = clock
        self.started = clock()
        self.running = Running.of(settings, generation=1)
        self.bindings = Bindings()
        self.conversations = Conversations(on_forget=self.bindings.forget)
        self.probe = Probe(clock)
        self.warner = Warner(log, clock)
        self.history = History()
        self.observer = Observer(log)
        self.relayed = 0
        self.tasks: set[asyncio.Task[None]] = set()  # of requests that wait for something
        self.taking_in = asyncio.Lock()  # one large body at a time
        self._pools: dict[Address, UpstreamPool] = {}
        self.servers: dict[Hashable, Server] = {}
        self._sharing = _sharing(settings)
        self.neighbours = self._new_neighbours()
        self.strangers = Strangers(clock, lambda: self._warn_second(_STRANGER))

    def apply(self, settings: Settings) -> None:
        """Put new settings in force. Exchanges under way go on with theirs."""
        old = self.running
        changed = pin_relevant(old.settings) != pin_relevant(settings)
        self.running = Running.of(settings, old.pin.generation + changed)
        for pool in self._pools.values():
            pool.connect_seconds = settings.timeouts.connect_seconds

    def pool(self, address: Address) -> UpstreamPool:
        pool = self._pools.get(address)
        if pool is None:
            seconds = self.running.settings.timeouts.connect_seconds
            pool = UpstreamPool(address, seconds, lambda: self.probe.forget(self.running.probe_target))
            self._pools[address] = pool
        return pool

    def server(self, target: Target) -> Server:
        """One for each endpoint and model, however it is spelt and whatever the key."""
        key = (normalised(target.root_url), target.model)
        server = self.servers.get(key)
        if server is None:
            server = self.servers[key] = self._new_server(target)
        server.target = target
        return server

    def _new_server(self, target: Target) -> Server:
        if (options := self._sharing) is None:
            return Server(self.probe, target, self.clock, on_stranger=self.strangers.seen)
        name = _name_of(target.root_url, self.running.settings.sharing.server)
        shared = Shared(options, f"{name} {target.model}", self.clock, self._warn_lost)
        return Server(self.probe, target, self.clock, shared)

    def _warn_lost(self, why: str) -> None:
        assert self._sharing is not None
        cause = Reason.SHARING_LOST
        self.warner.warn(cause, explain(cause, f"Redis at {shown(self._sharing.url)}: {why}"))

    def _new_neighbours(self) -> Neighbours:
        shared_by = ALONE
        if (options := self._sharing) is not None:
            shared_by = xxh3_64_hexdigest(
                f"{options.url} {options.prefix} {self.running.settings.sharing.server}".encode()
            )
        return Neighbours(_name_of(self.running.probe_target.root_url, ""), shared_by)

    async def meet_others(self) -> None:
        """Be known to those that share the slots and to those of this machine; warn of those that share nothing."""
        if self._sharing is not None and (shared := self.server(self.running.probe_target).shared) is not None:
            await shared.start()
        if self.running.pin.enabled is False or not self.running.pin.same_endpoint:
            return
        self.neighbours.join()
        if others := self.neighbours.strangers():
            named = ", ".join(map(str, others))
            self._warn_second(f"another slotpin (process {named}) is in front of the same llama-server")

    def _warn_second(self, what: str) -> None:
        text = f"{what}, so an answer may get into a slot that is busy; {_SECOND_REMEDY}"
        self.warner.warn("second_slotpin", text)

    def slot_of(self, conversation: str) -> int | None:
        """Where it was placed last, on any server."""
        slots = (server.placement.slot_of(conversation) for server in self.servers.values())
        return next((slot for slot in slots if slot is not None), None)

    def forget(self, ids: Sequence[SessionId]) -> bool:
        """Forget a session's conversation, so that its slot is free for another; whether it was known."""
        conversation = self.conversations.named(ids)
        if conversation is None:
            return False
        self.conversations.forget(conversation.key)
        for server in self.servers.values():
            if server.shared is not None:
                server.shared.forget(conversation.key)
            server.placement.forget(conversation.key)
        return True

    def log_bug(self, target: bytes) -> None:
        """The exception that is being handled is an error of slotpin's own."""
        self.log.exception("bug", path=target.partition(b"?")[0].decode("latin-1"))

    async def close(self) -> None:
        self.neighbours.leave()
        for server in self.servers.values():
            server.close()
        for pool in self._pools.values():
            pool.close()
        await self.probe.close()
        for server in self.servers.values():
            if server.shared is not None:
                await server.shared.close()


_STRANGER = "something else sends requests to this llama-server: a second slotpin, or a client that goes there itself"
_SECOND_REMEDY = "let all go through one slotpin, or set sharing.redisUrl in all slotpins"


def _sharing(settings: Settings) -> Options | None:
    sharing = settings.sharing
    if sharing.redis_url is None:
        return None
    check_installed()
    return Options(sharing.redis_url.get_secret_value(), sharing.prefix, sharing.lease_seconds, secrets.token_hex(6))


def _name_of(root_url: str, name: str) -> str:
    """What all slotpins in front of a llama-server call it; a loopback address means another one on each machine."""
    if name:
        return name
    scheme, host, port, path = normalised(root_url)
    machine = socket.gethostname() if scheme == "unix" or host == "localhost" else host
    return f"{scheme} {machine} {port} {path}"


def _recognisers(settings: Settings) -> Recognisers:
    """The user's own rules first, so that they can overrule a built-in one."""
    chosen = settings.recognisers
    own = tuple(
        Recogniser(
            rule.name,
            Role(rule.role),
            OnUnsafe(rule.on_unsafe),
            model=rule.model,
            api_key=rule.api_key.get_secret_value() if rule.api_key is not None else None,
            system=(rule.system,) if rule.system else (),
            user=(rule.user,) if rule.user else (),
            last=(rule.last,) if rule.last else (),
        )
        for rule in chosen.custom
    )
    switched_on = chosen.builtin.enabled()
    return Recognisers((*own, *(rule for rule in BUILTIN if rule.name in switched_on)))


def _main_authorization(settings: Settings) -> bytes | None:
    if (key := settings.main.api_key) is not None:
        return _bearer(key)
    if not settings.listen.api_keys:
        return None
    # What clients send is slotpin's alone.
    one_server = same_endpoint(settings.main.base_url, settings.compactor.base_url)
    return _bearer(settings.compactor.api_key) if one_server else b""


def _bearer(key: SecretStr) -> bytes:
    return b"Bearer " + key.get_secret_value().encode()
