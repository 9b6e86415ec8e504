"""What a check found: how good it is, in which words, and what mends it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing, nothing to mend
    BETTER = "could be better"
    UNSAFE = "unsafe"


_EXIT = {Level.OK: 0, Level.NOTE: 0, Level.BETTER: 1, Level.UNSAFE: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at, `text` says what was seen in one line, `remedy` is a command or empty."""

    level: Level
    check: str
    text: str
    remedy: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """0 fine, 1 could be better, 2 unsafe."""
    return max((_EXIT[finding.level] for finding in findings), default=0)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "exitCode": exit_code(findings),
        "findings": [
            {"level": str(found.level), "check": found.check, "text": found.text, "remedy": found.remedy or None}
            for found in findings
        ],
    }


def lines(findings: Sequence[Finding]) -> list[str]:
    """A table for people: level, check, text; below it the remedy."""
    widths = [max(len(str(found.level)) for found in findings), max(len(found.check) for found in findings)]
    indent = " " * (sum(widths) + 4)
    table = []
    for found in findings:
        table.append(f"{found.level:<{widths[0]}}  {found.check:<{widths[1]}}  {found.text}")
        if found.remedy:
            table.append(f"{indent}-> {found.remedy}")
    return [*table, "", _summary(findings)]


def _summary(findings: Sequence[Finding]) -> str:
    counts = [(level, sum(found.level is level for found in findings)) for level in (Level.UNSAFE, Level.BETTER)]
    return ", ".join(f"{count} {level}" for level, count in counts if count) or "all is well"
