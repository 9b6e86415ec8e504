"""What Pi believes about the models behind slotpin: its `models.json` (docs/models-configuration.md of Pi)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from slotpin.pi.folder import MODELS, agent_folder
from slotpin.pi.json_edit import BadJsonError, read
from slotpin.pinning.endpoints import same_endpoint

DEFAULT_CONTEXT_WINDOW = 128000  # Pi's, for a model that does not say


class _Model(msgspec.Struct):
    id: str
    context_window: float = msgspec.field(default=DEFAULT_CONTEXT_WINDOW, name="contextWindow")


class _Provider(msgspec.Struct):
    base_url: str = msgspec.field(default="", name="baseUrl")
    models: list[_Model] = []


class _File(msgspec.Struct):
    providers: dict[str, _Provider] = {}


@dataclass(frozen=True, slots=True)
class Believed:
    """One model of a provider that leads to slotpin."""

    provider: str
    model: str
    context_window: int


def models_file(environ: Mapping[str, str]) -> Path:
    return agent_folder(environ) / MODELS


def believed(file: Path, slotpin_url: str) -> list[Believed] | str:
    """The models of all providers whose `baseUrl` is at `slotpin_url`, or why the file can't be read."""
    try:
        content = msgspec.convert(read(file.read_text(encoding="utf-8"), lenient=True).value, _File)
    except FileNotFoundError:
        return []
    except OSError as error:
        return error.strerror or str(error)
    except (BadJsonError, msgspec.ValidationError, UnicodeDecodeError) as error:
        return str(error)
    return [
        Believed(name, model.id, int(model.context_window))
        for name, provider in content.providers.items()
        if _leads_to(provider.base_url, slotpin_url)
        for model in provider.models
    ]


def _leads_to(base_url: str, slotpin_url: str) -> bool:
    """Same server, on whatever path: `/main/v1` and `/v1` are both slotpin's."""
    try:
        parts = urlsplit(base_url)
        return same_endpoint(f"{parts.scheme}://{parts.netloc}", slotpin_url)
    except ValueError:  # a bad port
        return False
