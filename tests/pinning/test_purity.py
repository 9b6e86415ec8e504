"""The pure core knows no sockets, no event loop, no log and no shell above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slotpin.pinning

FORBIDDEN = ("aiohttp", "structlog", "asyncio", "slotpin.proxy", "slotpin.observe", "slotpin.config", "socket", "time")
FILES = sorted(Path(slotpin.pinning.__path__[0]).rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only, so that this test can read them"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in FORBIDDEN)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_source_imports_what_does_io(file: Path) -> None:
    assert [module for module in imports(file.read_text("utf-8")) if forbidden(module)] == []


def test_the_check_sees_every_form_of_import() -> None:
    source = "import aiohttp.web\nfrom slotpin import proxy\ndef f() -> None:\n    from asyncio import sleep\n"
    assert [module for module in imports(source) if forbidden(module)] == [
        "aiohttp.web",
        "slotpin.proxy",
        "asyncio",
        "asyncio.sleep",
    ]


def test_importing_all_of_it_loads_nothing_that_does_io() -> None:
    names = [f"slotpin.pinning.{file.stem}" for file in FILES if file.stem != "__init__"]
    assert "slotpin.pinning.decision" in names
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code, *names], check=True, capture_output=True, text=True, cwd=FILES[0].parents[2]
    ).stdout.split()
    assert set(names) <= set(loaded)
    heavy = ("aiohttp", "structlog", "asyncio", "slotpin.proxy", "slotpin.observe", "slotpin.config")
    assert [name for name in loaded if name.startswith(heavy)] == []
