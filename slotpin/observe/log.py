"""Events with fields: lines for people on a terminal, JSON for programs otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, Literal, TextIO, cast

import msgspec

from slotpin.observe import lines


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A module that can't be imported for now."""
    modules = cast("dict[str, object]", sys.modules)
    there = modules.get(name)
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]
        if there is not None:
            modules[name] = there


with _hidden("rich"):  # structlog takes it where it can: 5 MB to draw what is drawn here without it
    import structlog

Log = structlog.typing.FilteringBoundLogger


def configure(form: Literal["auto", "console", "json"], level: str) -> None:
    """Send every event, and what libraries log, to stderr."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        _without_nothing,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.format_exc_info,
    ]
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    last: structlog.typing.Processor = (
        lines.renderer(colours=colours) if console else structlog.processors.JSONRenderer(serializer=_encode)
    )
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=(
            structlog.WriteLoggerFactory(cast(TextIO, _Lossy(sys.stderr)))
            if console
            else structlog.BytesLoggerFactory(cast(BinaryIO, _Lossy(sys.stderr.buffer)))
        ),
        cache_logger_on_first_use=False,
    )
    _CURRENT.bind()
    logging.basicConfig(handlers=[_Forward()], level=max(threshold, logging.WARNING), force=True)


def get() -> Log:
    """Logs as the last `configure` says, also if that comes later."""
    return cast(Log, _CURRENT)


class _Current:
    """Its methods are those of a logger that is bound once for each `configure`; else each event would bind anew."""

    def bind(self) -> None:
        bound = structlog.get_logger().bind()
        for name in _METHODS:
            setattr(self, name, getattr(bound, name))

    def __getattr__(self, name: str) -> Any:
        """Before the first `configure`."""
        if name not in _METHODS:
            raise AttributeError(name)
        self.bind()
        return getattr(self, name)


class _Lossy:
    """A file that loses what can't be written: a full disk, or a reader that has gone, must stop nothing else."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file

    def write(self, text: Any) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


_METHODS = ("debug", "info", "warning", "error", "exception", "log", "is_enabled_for")
_CURRENT = _Current()


def _without_nothing(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: value for name, value in event.items() if value is not None}


def _encode(event: object, **_: object) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)


class _Forward(logging.Handler):
    """What asyncio and other libraries log becomes an event like any other."""

    def emit(self, record: logging.LogRecord) -> None:
        get().log(record.levelno, "library", logger=record.name, message=record.getMessage(), exc_info=record.exc_info)
