"""What stands behind the proxy, for the lines that are printed at the start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec

from slotpin.pinning.decision import Probed
from slotpin.proxy.probe import PROBE_SECONDS, Probe, Target
from slotpin.proxy.questions import Questions


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Found:
    """`model` is None where `GET /v1/models` names none."""

    probed: Probed
    model: str | None


async def discover(probe: Probe, target: Target) -> Found:
    return Found(*await asyncio.gather(probe.topology(target), _model(target)))


async def _model(target: Target) -> str | None:
    headers = {"Authorization": f"Bearer {target.api_key}"}
    try:
        async with (
            asyncio.timeout(PROBE_SECONDS),
            Questions() as questions,
            questions.ask("GET", target.root_url, "/v1/models", headers=headers) as answer,
        ):
            models = msgspec.json.decode(await answer.read(), type=_Models).data
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return None
    return models[0].id if models else None
