"""What all exchanges share, and the settings that are in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import SecretStr

from slotpin.config import Settings, pin_relevant
from slotpin.observe.history import History
from slotpin.observe.log import Log
from slotpin.observe.observer import Observer
from slotpin.observe.warnings import Warner
from slotpin.pinning.bindings import Bindings
from slotpin.pinning.conversations import Conversations, SessionId
from slotpin.pinning.decision import PinSettings
from slotpin.pinning.endpoints import normalised, same_endpoint, server_root, socket_path
from slotpin.pinning.roles import BUILTIN, OnUnsafe, Recogniser, Recognisers, Role
from slotpin.proxy.probe import Probe, Target
from slotpin.proxy.server import Server
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
    session_headers: tuple[str, ...]
    session_fields: tuple[str, ...]
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
            main=_address(main),
            compactor=_address(compactor),
            probe_target=Target(server_root(compactor), settings.compactor.api_key.get_secret_value()),
            session_headers=settings.conversations.session_headers,
            session_fields=settings.conversations.session_fields,
            main_authorization=_main_authorization(settings),
        )


class State:
    """`clock` gives seconds, and only ages are taken from it."""

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
        self.taking_in = asyncio.Lock()  # one large body at a time
        self._pools: dict[Address, UpstreamPool] = {}
        self.servers: dict[Hashable, Server] = {}

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
            server = self.servers[key] = Server(self.probe, target, self.clock)
        server.target = target
        return server

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
            server.placement.forget(conversation.key)
        return True

    async def close(self) -> None:
        for server in self.servers.values():
            server.close()
        for pool in self._pools.values():
            pool.close()
        await self.probe.close()


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


def _address(base_url: str) -> Address:
    root = server_root(base_url)
    if socket := socket_path(root):
        return Address("unix", socket, 0, "")
    parts = urlsplit(root)
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or default, parts.path)
