"""Log events as lines for people: the local time, then what happened, as short as it can be said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

Event = MutableMapping[str, Any]

_BOLD, _YELLOW, _RED, _DIM, _RESET = "\x1b[1m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
_COLOURS = {"warning": _YELLOW, "error": _RED, "critical": _RED}
# What is usual, and what its client has wanted so; the rest stands out.
_OUTCOMES = {"completed": "", "client_left": _BOLD}
# Those that reached no slot.
_NOWHERE = frozenset({"refused", "unreachable"})


def renderer(*, colours: bool) -> Callable[[object, str, Event], str]:
    """A last processor for structlog; the event needs `level` and `timestamp`."""

    def render(_logger: object, _method: str, event: Event) -> str:
        level, timestamp = str(event.pop("level")), event.pop("timestamp")
        name, problem = str(event.pop("event")), event.pop("exception", None)
        said = _LINES.get(name, _other)
        text = said(event) if said is not _other else _other({"event": name, **event})
        if level not in ("info", "debug"):
            text = f"{level}: {text}"
        if colours:
            timestamp = f"{_DIM}{timestamp}{_RESET}"
            style = _COLOURS.get(level, "") or _OUTCOMES.get(event.get("outcome", "completed"), _BOLD + _YELLOW)
            text = f"{style}{text}{_RESET}" if style else text
        return f"{timestamp} {text}" + (f"\n{problem}" if problem else "")

    return render


def exchange(event: Mapping[str, Any]) -> str:
    """`main       slot 0  pinned  re-used 812 of 846  1.2 s  34bdd6a85727`."""
    slot, outcome = event.get("slot"), event["outcome"]
    where = "no slot " if outcome in _NOWHERE else "any slot" if slot is None else f"slot {slot:<3}"
    parts = [f"{event['role']:9}", where, event["reason"]]
    if outcome != "completed":
        parts.append(outcome.replace("_", " "))
    if (evaluated := event.get("evaluated")) is not None:
        parts.append(f"re-used {event['cached']:,} of {evaluated + event['cached']:,}")
    if event.get("cause"):
        parts.append(f"lost {event['lost']:,} ({event['cause']})")
    if (waited := event.get("waited_ms") or 0) >= 100:
        parts.append(f"waited {seconds(waited / 1000)}")
    return "  ".join([*parts, seconds(event["ms"] / 1000), event["request"]])


def _warning(event: Event) -> str:
    """The request stands at the end: `slotpin explain` says more of it."""
    about = f" [request {event['request']}]" if "request" in event else ""
    return f"{event['cause']}: {event['message']}{about}"


def _other(event: Event) -> str:
    name = event.pop("event").replace("_", " ")
    fields = (f"{key}={_value(value)}" for key, value in event.items())
    return "  ".join([name, *fields])


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return repr(value) if isinstance(value, str) and " " in value else str(value)


def seconds(value: float) -> str:
    """`0.43 s`, `12.0 s`, `3 min 20 s`, `2 h 05 min`."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


_LINES: dict[str, Callable[[Event], str]] = {"exchange": exchange, "warning": _warning}
