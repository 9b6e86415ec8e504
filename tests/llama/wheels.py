"""Small wheels, made by hand."""

from __future__ import annotations

import zipfile
from pathlib import Path

from slotpin.llama.packages import Package, sha256


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Package:
    """A valid wheel of `name` 1.0.0 in `folder` with `files` by their path."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{module}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return Package(name, "1.0.0", path.name, sha256(path))
