"""A record of an exchange that went well, and others like it."""

from __future__ import annotations

from typing import Any

from slotpin.observe.records import Record


def record(**fields: Any) -> Record:
    whole: dict[str, Any] = {
        "id": "34bdd6a85727",
        "arrived": 1_790_000_000.0,
        "client": "pi",
        "model": "local",
        "server": "",
        "role": "main",
        "found_by": "default",
        "conversation": "c1",
        "action": "pin",
        "reason": "pinned",
        "detail": "",
        "warnings": (),
        "slot": 0,
        "slots": 2,
        "gate": 0,
        "generation": 1,
        "outcome": "completed",
        "status": 200,
        "planned": 0.0003,
        "waited": 0.0,
        "seconds": 1.2,
        "evaluated": 34,
        "cached": 812,
        "generated": 12,
        "prompt_ms": 40.0,
        "expected": 812,
        "lost": 0,
        "cause": None,
        "cause_detail": "",
    }
    return Record(**(whole | fields))
