"""What Prometheus reads, and what goes by it: the documentation, the dashboard, the alerts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.debian import debian_program
from tests.support.proxy import Running, on_loop, running_proxy, settings_for
from tests.support.stub_upstream import Connection, Request, answer, stub_upstream

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "slotpin.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "slotpin.json"
CHAT, SIDE = "/v1/chat/completions", "/compactor/v1/chat/completions"
TURN = b'{"messages":[{"role":"user","content":"a"}]}'


async def counted(connection: Connection, _: Request) -> None:
    await connection.send(answer(b'{"timings":{"prompt_n":100,"cache_n":300,"predicted_n":7,"prompt_ms":250.0}}'))


async def scraped(running: Running) -> str:
    response = await running.fetch("/slotpin/metrics", None)
    assert response.status == 200
    assert (response.get(b"Content-Type") or b"").startswith(b"text/plain")
    return response.body.decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values, those in the order of their labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names(text: str) -> set[str]:
    """As they stand in expressions, histograms by each of their three."""
    return {name for name, *_ in samples(text) if name.startswith("slotpin_")}


@on_loop
async def test_what_came_through_is_counted() -> None:
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(CHAT, TURN)
        await running.fetch(CHAT, TURN)
        await running.fetch(SIDE, TURN)
        await running.fetch(SIDE, b'{"messages":[],"id_slot":-1}')
        await running.fetch("/v1/models", None)
        found = samples(await scraped(running))
        assert found["slotpin_exchanges_total", "completed", "pinned", "main"] == 2
        assert found["slotpin_exchanges_total", "refused", "explicit_unpredictable", "compactor"] == 1
        assert found["slotpin_outcomes_total", "refused", "compactor"] == 1
        assert found["slotpin_outcomes_total", "unreachable", "main"] == 0
        assert found["slotpin_prompt_tokens_total", "main", "evaluated"] == 200
        assert found["slotpin_prompt_tokens_total", "main", "reused"] == 600
        assert found["slotpin_prompt_tokens_lost_total", "server_restarted"] == 0
        assert found["slotpin_prompt_evaluation_seconds_total", "main"] == 0.5
        assert found["slotpin_spared_evaluation_seconds_total",] == pytest.approx(9 * 0.25)
        assert found["slotpin_gate_wait_seconds_count",] == 3
        assert found["slotpin_added_latency_seconds_count",] == 4
        assert found["slotpin_added_latency_seconds_bucket", "+Inf"] == 4
        assert found["slotpin_probe_seconds_count",] == len(stub.probes)
        assert found["slotpin_probe_failures_total",] == 0
        assert found["slotpin_relayed_requests_total",] == 1
        assert found["slotpin_exchanges_under_way", "waiting"] == 0
        assert found["slotpin_warnings_total", "explicit_unpredictable"] == 1
        assert found["process_start_time_seconds",] > 0


@pytest.mark.parametrize("accept", [b"", b"*/*", b"application/openmetrics-text;version=abc", b";;,=\xff"])
@on_loop
async def test_any_accept_header_gets_metrics(accept: bytes) -> None:
    async with stub_upstream() as stub, running_proxy(settings_for(stub)) as running:
        response = await running.fetch("/slotpin/metrics", None, [b"Accept: " + accept])
        assert response.status == 200 and b"slotpin_build_info" in response.body


@on_loop
async def test_a_failing_probe_is_counted() -> None:
    async with (
        stub_upstream(slots=answer(b"{}", b"501 Not Implemented")) as stub,
        running_proxy(settings_for(stub)) as running,
    ):
        await running.fetch(CHAT, TURN)
        found = samples(await scraped(running))
        assert found["slotpin_probe_failures_total",] == found["slotpin_probe_seconds_count",] == 1


async def everything() -> str:
    """With each metric that there is."""
    async with stub_upstream(counted) as stub, running_proxy(settings_for(stub)) as running:
        await running.fetch(CHAT, TURN)
        await running.fetch(SIDE, b'{"messages":[],"id_slot":-1}')
        return await scraped(running)


@on_loop
async def test_each_metric_is_documented() -> None:
    metrics = names(await everything())
    found = {re.sub("_(bucket|sum|count)$", "", name) for name in metrics}
    text = (ROOT / "docs" / "observe.md").read_text()
    assert set(re.findall(r"^\| `(slotpin_\w+)` \|", text, re.MULTILINE)) == found


@on_loop
async def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    metrics = names(await everything())
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [entry["query"] for entry in dashboard["templating"]["list"]]
    assert len(asked) > 15
    for text in (*asked, RULES.read_text()):
        used = set(re.findall(r"\bslotpin_\w+", text))
        assert used <= metrics
    # No panel stands on another.
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@on_loop
async def test_prometheus_finds_nothing_to_complain_of() -> None:
    text = await everything()
    own = "".join(f"{line}\n" for line in text.splitlines() if "process_" not in line)
    said = promtool("check", "metrics", feed=own)
    assert said == ""


def test_the_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "slotpin.rules.test.yml")


def promtool(*arguments: str, feed: str = "") -> str:
    """Its output; the test fails if it does."""
    program = debian_program("promtool", "prometheus")
    done = subprocess.run(
        [program.path, *arguments], input=feed, capture_output=True, text=True, cwd=RULES.parent, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
