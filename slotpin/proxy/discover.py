"""What stands behind the proxy, for the lines that are printed at the start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from slotpin.pinning.decision import Probed
from slotpin.proxy.probe import PROBE_SECONDS, Probe, Target
from slotpin.proxy.upstream import UpstreamError


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
    return Found(*await asyncio.gather(probe.topology(target), _model(probe, target)))


async def _model(probe: Probe, target: Target) -> str | None:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, body = await probe.fetch(target, "/v1/models")
        models = msgspec.json.decode(body, type=_Models).data
    except (TimeoutError, UpstreamError, ValueError):
        return None
    return models[0].id if models else None
