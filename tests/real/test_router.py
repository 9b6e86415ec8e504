"""A router in front of two models: each has slots of its own, and a look never loads one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.real.client import fetch
from tests.real.prompts import chat
from tests.real.servers import Router, Slotpin, router, slotpin
from tests.support.tiny_model import full_attention

MAIN, COMPACTOR = "/v1/chat/completions", "/compactor/v1/chat/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copy(full_attention(), folder / f"{name}.gguf")
    with router(folder) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, models: Router) -> Iterator[Slotpin]:
    with slotpin(tmp_path_factory.mktemp("slotpin"), models.url) as running:
        yield running


def test_models_are_pinned_once_they_are_loaded(proxy: Slotpin, models: Router) -> None:
    assert models.loaded == set()
    for count, name in enumerate(("one", "two"), 1):
        body = chat() | {"model": name}
        refused = proxy.post(COMPACTOR, body)
        assert (refused.status, refused.reason) == (503, "model_not_loaded")
        assert len(models.loaded) == count - 1

        first = proxy.post(MAIN, body)
        assert (first.status, first.slot, first.reason) == (200, None, "model_not_loaded")
        assert name in models.loaded

        main = proxy.post(MAIN, body)
        assert (main.status, main.slot, main.reason) == (200, 0, "pinned")
        side = proxy.post(COMPACTOR, body)
        assert (side.status, side.slot, side.reason) == (200, 1, "pinned")
        slots = fetch(f"{models.url}/slots?model={name}").json
        assert {slot["id"] for slot in slots if "id_task" in slot} == {0, 1}


def test_request_without_a_model_is_passed_on(proxy: Slotpin, models: Router) -> None:
    answer = proxy.post(MAIN, chat())
    direct = fetch(models.url + MAIN, chat())
    assert answer.reason == "probe_failed"
    assert (answer.status, answer.body) == (direct.status, direct.body)
