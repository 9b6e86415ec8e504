"""Read the configuration again when its file changes and on SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from slotpin.config import ConfigError, Loaded, changed
from slotpin.observe import log as logs
from slotpin.observe.log import Log
from slotpin.proxy.state import State

LOOK_SECONDS = 1.0

_Stamp = tuple[int, int, int]


class Reloader:
    """`load` reads the configuration anew. A file that does not validate leaves the running settings alone."""

    def __init__(self, state: State, path: Path | None, load: Callable[[], Loaded], log: Log) -> None:
        self._state = state
        self._path = path
        self._load = load
        self._log = log
        self._seen = self._stamp()

    async def watch(self) -> None:
        """Look at the file once a second, for ever."""
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._path is not None and self._stamp() != self._seen:
                self.reload()

    def reload(self) -> None:
        self._seen = self._stamp()
        before = self._state.running
        try:
            loaded = self._load()
        except ConfigError as problem:
            for line in problem.lines:
                self._log.error("config_rejected", problem=line, generation=before.pin.generation)
            return
        settings = loaded.settings
        keys = changed(before.settings, settings)
        if not keys:
            return
        self._state.apply(settings)
        logs.configure(settings.log.format, settings.log.level)
        self._log.info("config_reloaded", changed=keys, generation=self._state.running.pin.generation)
        for note in loaded.notes:
            self._log.warning("config_note", note=note)
        if restart := [key for key in keys if key in ("listen.host", "listen.port") or key.startswith("sharing.")]:
            self._log.warning("config_needs_restart", changed=restart)

    def _stamp(self) -> _Stamp | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None
