"""Pi, and the Node.js that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.npm import program


@dataclass(frozen=True, slots=True)
class Installed:
    """`cli` is the program that `node` runs."""

    node: Path
    cli: Path


def installed() -> Installed:
    return Installed(
        program("pi", "node-*/bin/node"), program("pi", "@earendil-works/pi-coding-agent/dist/bundle/cli.js")
    )


if __name__ == "__main__":
    print(installed().cli)
