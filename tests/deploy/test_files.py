"""The files under `deploy/` agree with slotpin: command lines, settings, ports, paths, times, headers."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from slotpin.cli import build_parser
from slotpin.config import Listen, Timeouts
from slotpin.pinning.conversations import SESSION_HEADERS
from tests.real.client import fetch
from tests.support.needs import needed
from tests.support.program import TOP, Program, run

DEPLOY = TOP / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
CONTAINERFILES = sorted((DEPLOY / "container").glob("Containerfile*"))
# The higher, the more is open; systemd's own words begin "EXPOSED" at 7 and "MEDIUM" at 5.
EXPOSURE = {"slotpin.service": 1.5, "slotpin-up.service": 4.0}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(name) if document["kind"] == kind]


def understood(words: Sequence[str]) -> None:
    """Raises SystemExit for a command line that slotpin does not take."""
    build_parser().parse_args(list(words))


def in_force(home: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    done = run(home, "config", "show", "--json", **variables)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)["settings"]
    return shown


def settings_of(unit: Path) -> dict[str, list[str]]:
    pairs = [line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"[A-Za-z]+=", line)]
    return {name: [value for other, value in pairs if other == name] for name, _ in pairs}


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([a-z]*)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "min": 60, "m": 60, "h": 3600}[unit]


# systemd


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.suffix == ".service"], ids=lambda unit: unit.name)
def test_a_units_command_line_and_times_are_slotpins(unit: Path) -> None:
    settings = settings_of(unit)
    program, *words = shlex.split(re.sub(r"\$\{(PARALLEL|CTX_SIZE)\}", "4", settings["ExecStart"][0]))
    assert program == "/opt/slotpin/bin/slotpin"
    understood(words)
    assert settings["Type"] == ["notify"]
    assert seconds(settings["TimeoutStopSec"][0]) > Timeouts().drain_seconds
    assert float(settings["WatchdogSec"][0].rstrip("s")) >= 10


def test_the_socket_is_where_slotpin_listens_by_default() -> None:
    default = Listen()
    assert settings_of(DEPLOY / "systemd/slotpin.socket")["ListenStream"] == [f"{default.host}:{default.port}"]


def test_what_the_installation_copies_is_in_the_sources() -> None:
    commands = re.findall(r"^(?:install -D -m 644|cp) (.+) \S+$", (TOP / "docs/deploy.md").read_text(), re.MULTILINE)
    sources = [source for words in commands for source in words.split()]
    assert "config.example.json" in sources
    assert [source for source in sources if not (TOP / source).is_file()] == []


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = needed("systemd-analyze", "systemd")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/slotpin/bin/slotpin", "/bin/true"))
    command = [str(analyze.path), "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)]
    done = subprocess.run(command, env=os.environ | analyze.environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("unit", "most"), EXPOSURE.items())
def test_a_unit_closes_what_slotpin_does_not_need(unit: str, most: float) -> None:
    analyze = needed("systemd-analyze", "systemd")
    flags = ["--offline=true", f"--threshold={round(most * 10)}"]
    command = [str(analyze.path), "security", *flags, str(DEPLOY / "systemd" / unit)]
    done = subprocess.run(command, env=os.environ | analyze.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# launchd


def test_the_launch_agent_runs_what_slotpin_understands(tmp_path: Path) -> None:
    agent = plistlib.loads((DEPLOY / "launchd/slotpin.plist").read_bytes())
    program, *words = agent["ProgramArguments"]
    assert Path(program).name == "slotpin"
    understood(words)
    assert agent["ExitTimeOut"] > Timeouts().drain_seconds
    shown = in_force(tmp_path, {name: value for name, value in agent["EnvironmentVariables"].items() if name != "PATH"})
    assert shown["log"]["format"] == "json"


# Containers


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_a_container_runs_what_slotpin_understands(tmp_path: Path, file: Path) -> None:
    found = instructions(file)
    last = dict(found)
    assert json.loads(last["ENTRYPOINT"]) == ["slotpin"]
    understood(json.loads(last["CMD"]))
    assert last["EXPOSE"] == str(Listen().port)
    assert not last["USER"].startswith(("0", "root"))
    variables = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    shown = in_force(tmp_path, {name: value for name, value in variables.items() if name != "PATH"})
    assert shown["listen"]["host"] == "0.0.0.0"
    copied = [words.split()[:-1] for name, words in found if name == "COPY" and "--from" not in words]
    assert all((TOP / source).exists() for sources in copied for source in sources)


def test_the_compose_file_fits_the_container(tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())["services"]
    slotpin, llama = services["slotpin"], services["llama"]
    context = (DEPLOY / "container" / slotpin["build"]["context"]).resolve()
    assert context == TOP
    assert (context / slotpin["build"]["dockerfile"]).is_file()
    assert slotpin["ports"] == [f"127.0.0.1:{Listen().port}:{Listen().port}"]
    shown = in_force(tmp_path, slotpin["environment"])
    port = llama["command"][llama["command"].index("--port") + 1]
    assert shown["main"]["baseUrl"] == f"http://llama:{port}/v1"
    assert seconds(slotpin["stop_grace_period"]) > shown["timeouts"]["drainSeconds"]


# Balancers


def test_balancers_read_the_headers_that_slotpin_reads() -> None:
    haproxy = (DEPLOY / "haproxy/haproxy.cfg").read_text()
    assert tuple(re.findall(r"set-var\(txn\.session\) req\.fhdr\(([^)]+)\)", haproxy)) == SESSION_HEADERS
    nginx = (DEPLOY / "nginx/nginx.conf").read_text()
    maps = dict(re.findall(r"map \$http_(\w+) \$\w+ \{\s+\"\" +\$(\w+);", nginx))
    wanted = [name.replace("-", "_") for name in reversed(SESSION_HEADERS)]
    assert list(maps) == wanted
    routes = [route["spec"]["rules"][0].get("matches") for route in of_kind("gateway.yaml", "HTTPRoute")]
    assert [match[0]["headers"][0]["name"] for match in routes[:-1]] == list(SESSION_HEADERS)
    assert routes[-1] is None


# Kubernetes


def pod() -> dict[str, Any]:
    (found,) = of_kind("slotpin.yaml", "StatefulSet")
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def test_a_pods_probes_ask_for_what_slotpin_serves(tmp_path: Path) -> None:
    """Without its llama-server a pod is alive and not ready."""
    (container,) = pod()["containers"]
    alive, ready = (container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe"))
    (port,) = container["ports"]
    assert {alive["port"], ready["port"]} == {port["name"]}
    assert port["containerPort"] == Listen().port
    with Program(tmp_path, *container["args"], "--port", "0", "--upstream", "http://127.0.0.1:9/v1") as program:
        assert fetch(program.url + alive["path"]).status == 200
        assert fetch(program.url + ready["path"]).status == 502


def test_a_pods_settings_are_slotpins_and_its_end_takes_long_enough(tmp_path: Path) -> None:
    spec = pod()
    (container,), (llama,) = spec["containers"], spec["initContainers"]
    understood(container["args"])
    shown = in_force(tmp_path, {variable["name"]: variable["value"] for variable in container["env"]})
    port = llama["args"][llama["args"].index("--port") + 1]
    assert shown["main"]["baseUrl"] == f"http://127.0.0.1:{port}/v1"
    assert shown["llamaCppSlots"]["enabled"] == "auto"
    sleeps = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= sleeps + shown["timeouts"]["drainSeconds"] + 10
    assert llama["restartPolicy"] == "Always"  # a sidecar, which ends after the container


def test_kubernetes_names_lead_somewhere() -> None:
    (stateful,), (service,) = of_kind("slotpin.yaml", "StatefulSet"), of_kind("slotpin.yaml", "Service")
    (budget,) = of_kind("slotpin.yaml", "PodDisruptionBudget")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    routes = of_kind("gateway.yaml", "HTTPRoute")
    backends = [backend for route in routes for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    wanted = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert backends == [wanted] * len(routes)
    policies = of_kind("gateway.yaml", "BackendTrafficPolicy")
    assert [policy["spec"]["targetRefs"][0]["name"] for policy in policies] == [r["metadata"]["name"] for r in routes]
    for route, policy in zip(routes, policies, strict=True):
        hashed = policy["spec"]["loadBalancer"]["consistentHash"]
        matches = route["spec"]["rules"][0].get("matches")
        assert hashed.get("header", {}).get("name") == (matches[0]["headers"][0]["name"] if matches else None)
    # A tie of two headers goes to the first by name.
    assert [route["metadata"]["name"] for route in routes] == sorted(route["metadata"]["name"] for route in routes)
