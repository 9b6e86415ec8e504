"""The documentation names what the code has, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from slotpin.cli import main
from slotpin.observe import status
from slotpin.pinning.reasons import EXPLANATIONS, Reason
from slotpin.pinning.roles import BUILTIN, BUILTIN_NAMES, OnUnsafe
from slotpin.proxy.exchange import Outcome

ROOT = Path(__file__).parents[1]
DECISIONS = (ROOT / "docs" / "decisions.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def section(text: str, heading: str) -> str:
    """The text under a heading of the second level."""
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands in code marks in the first cell of each row of a table."""
    return [found[1] for line in text.splitlines() if (found := re.match(r"\| `([^`]+)` \|", line))]


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.CACHE_PROMPT_OFF])
def test_each_reason_code_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in DECISIONS


NEVER_REFUSED = (Reason.CACHE_PROMPT_OFF, Reason.SLOT_SHARED, Reason.SLOT_EMPTIED, Reason.PINNING_STOPPED)


def test_refusals_are_listed_under_the_status_that_they_get() -> None:
    rows = {row[1]: row[2] for row in re.finditer(r"\| (409|503)[^|]*\| ([^:]+):", section(DECISIONS, "Refusals"))}
    refusing = {reason: found for reason, found in EXPLANATIONS.items() if reason not in NEVER_REFUSED}
    for status_code, passes in (("409", False), ("503", True)):
        listed = set(re.findall(r"`([a-z_]+)`", rows[status_code]))
        assert listed == {str(reason) for reason, found in refusing.items() if found.passes is passes}


def test_each_recogniser_is_listed_with_what_an_unsafe_verdict_does() -> None:
    rows = dict(re.findall(r"\| `([a-z-]+)` \|[^|]*\| (passed on|refused)", section(DECISIONS, "The role")))
    words = {OnUnsafe.PASS: "passed on", OnUnsafe.REFUSE: "refused"}
    assert rows == {rule.name: words[rule.on_unsafe] for rule in BUILTIN}
    assert tuple(rows) == BUILTIN_NAMES


def test_each_log_event_is_documented() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "slotpin").rglob("*.py"))
    calls = r"log\.(?:debug|info|warning|error|exception)\(\s*\"([a-z_]+)\""
    events = set(re.findall(calls, sources)) | {"library"}
    assert set(first_cells(section(OPERATIONS, "Log events"))) == events


def outcomes() -> list[str]:
    """How an exchange can end."""
    return [name for part in get_args(Outcome) for name in get_args(part)]


def test_each_outcome_is_documented() -> None:
    assert len(outcomes()) > 5
    said = section(OPERATIONS, "Log events").split("Outcomes:")[1]
    assert [name for name in outcomes() if f"`{name}`" not in said] == []


def test_each_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert commands
    for command in commands:
        assert f"`slotpin {command}" in section(OPERATIONS, "Commands")


def test_each_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "transport.md").read_text()
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not re.match(r"\| (---|\w+ \| held by)", line)
    ]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)::([a-z0-9_]+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_status_fields_are_camel_case() -> None:
    source = Path(status.__file__).read_text()
    names = set(re.findall(r'"([A-Za-z_]+)":', source)) - {"n_ctx"}  # llama-server's own name
    assert [name for name in names if "_" in name] == []
