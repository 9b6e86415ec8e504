"""docs/configuration.md and the code say the same."""

from __future__ import annotations

import json
import re
from functools import cache, reduce
from operator import getitem
from pathlib import Path

import pytest

from slotpin.config import KEYS, OTHER_VARIABLES, CustomRecogniser, Settings, load
from tests.config.test_errors import BAD_FILES, BAD_FLAGS, BAD_VARIABLES

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
TEXT = DOCS.read_text()
RULE = "recognisers.custom[]."


@cache
def rows() -> dict[str, list[str]]:
    """Key -> the cells of its row."""
    found: dict[str, list[str]] = {}
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            key, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            key = key.strip("`")
            assert key not in found, f"{key} has two rows"
            found[key] = [key, *cells]
    return found


def defaults() -> list[tuple[str, object]]:
    dump = Settings().model_dump(mode="json", by_alias=True)
    return [(key, reduce(getitem, key.split("."), dump)) for key in KEYS]


def test_every_key_has_a_row_and_every_row_is_a_key() -> None:
    rule_keys = {f"{RULE}{field.alias}" for field in CustomRecogniser.model_fields.values()}
    assert set(rows()) == set(KEYS) | rule_keys


@pytest.mark.parametrize(("key", "default"), defaults())
def test_a_row_has_the_default_and_the_variable(key: str, default: object) -> None:
    _, _, documented, variable, meaning = rows()[key]
    if key == "compactor.apiKey":
        default = Settings().compactor.api_key.get_secret_value()
    expected = "main.baseUrl" if key == "compactor.baseUrl" else json.dumps(default)
    assert documented == f"`{expected}`"
    assert variable == f"`{KEYS[key].variable}`"
    assert len(meaning) > 10


def test_a_rules_row_has_the_default() -> None:
    for field in CustomRecogniser.model_fields.values():
        _, _, documented, meaning = rows()[f"{RULE}{field.alias}"]
        assert documented == ("required" if field.is_required() else f"`{json.dumps(field.default)}`")
        assert len(meaning) > 10


def test_no_other_variable_or_key_is_named() -> None:
    variables = {key.variable for key in KEYS.values()} | OTHER_VARIABLES
    assert set(re.findall(r"\bSLOTPIN_[A-Z_]*[A-Z]", TEXT)) == variables
    sections = {key.partition(".")[0] for key in KEYS}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for name in re.findall(r"`([A-Za-z]+(?:\.[A-Za-z\[\]-]+)+)`", prose):
        if name.partition(".")[0] in sections:
            assert name in KEYS or name in rows(), name


def test_the_examples_load(tmp_path: Path) -> None:
    examples = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        path = tmp_path / "slotpin.json"
        path.write_text(example)
        assert load(path, {}, {}).settings.llama_cpp_slots.enabled == "auto"
    assert json.loads(examples[0]) == json.loads((DOCS.parents[1] / "config.example.json").read_text())


def test_the_errors_shown_are_real() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    from_files = {f"slotpin.json{line}" for _, lines in BAD_FILES.values() for line in lines}
    others = {line for _, lines in (*BAD_VARIABLES.values(), *BAD_FLAGS.values()) for line in lines}
    assert set(block.splitlines()) <= from_files | others
