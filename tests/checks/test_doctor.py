"""`slotpin doctor` as a user runs it, on servers of all kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from slotpin.checks.doctor import contexts, idle_slots, memory
from slotpin.checks.findings import Finding, Level, exit_code
from slotpin.checks.idle_slots import Idle, Seen, without_provoking
from slotpin.checks.look import Slot
from slotpin.config import LlamaCppSlots, Settings
from tests.checks.servers import FOUR, RECOMMENDED, llama, other_protocol, unused_port, web_server
from tests.real.client import fetch
from tests.support.llama import patched_binary
from tests.support.processes import wait_until
from tests.support.program import Program, run

AUTO = ("--enabled", "auto")
FINE = {"ok", "note"}


@dataclass(frozen=True, slots=True)
class Report:
    """`findings` by what was looked at."""

    exit_code: int
    findings: Mapping[str, Mapping[str, str | None]]

    def level(self, check: str) -> str | None:
        return self.findings[check]["level"]

    def text(self, check: str) -> str:
        return self.findings[check]["text"] or ""

    def remedy(self, check: str) -> str:
        return self.findings[check]["remedy"] or ""

    @property
    def bad(self) -> set[str]:
        """The checks that found something to mend."""
        return {check for check, finding in self.findings.items() if finding["level"] not in FINE}


def doctor(home: Path, *arguments: str, **variables: str) -> Report:
    """Each check has one finding in these tests, or the last one counts."""
    port = () if "--port" in arguments else ("--port", str(unused_port()))
    done = run(home, "doctor", "--json", *port, *arguments, **variables)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["exitCode"] == done.returncode
    return Report(done.returncode, {finding["check"]: finding for finding in report["findings"]})


# --- the five servers, and the patched one --------------------------------------------------------------------------


def test_default_flags(tmp_path: Path) -> None:
    with llama() as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
    assert report.exit_code == 1
    assert report.bad == {"idle slots"}
    assert "the server clears them" in report.text("idle slots")
    assert report.remedy("idle slots").startswith("llama-server … --no-cache-idle-slots")
    assert "unified" in report.text("KV memory")
    assert report.text("slots").startswith("4: ")


def test_recommended_flags_also_the_second_time(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        for _ in range(2):
            report = doctor(tmp_path, *AUTO, *server.upstream)
            assert report.bad == set()
            assert report.exit_code == 0
            assert report.level("idle slots") == "ok"
            assert report.text("slots") == "2: main requests on slot 0, side requests on slot 1"
            assert report.text("context") == "8192 tokens a slot"
            assert report.text("llama-server").endswith("a stock server")
            assert report.level("/v1/messages") == "note"


def test_one_slot(tmp_path: Path) -> None:
    with llama("--parallel", "1") as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
        assert server.held == [0]
    assert report.exit_code == 2
    assert report.bad == {"slots"}
    assert report.text("slots").startswith("1 slot: ")
    assert "--parallel 4" in report.remedy("slots")


def test_wrong_key(tmp_path: Path) -> None:
    with llama(*RECOMMENDED, "--api-key", "right") as server:
        report = doctor(tmp_path, *AUTO, *server.upstream, SLOTPIN_COMPACTOR_API_KEY="wrong")
        assert report.exit_code == 2
        assert report.bad == {"API key"}
        assert "SLOTPIN_COMPACTOR_API_KEY" in report.remedy("API key")
        assert "wrong" not in json.dumps(report.findings)
        report = doctor(tmp_path, *AUTO, *server.upstream, SLOTPIN_COMPACTOR_API_KEY="right")
        assert report.exit_code == 0
        assert report.level("idle slots") == "ok"


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<h1>It works</h1>"), (404, b""), (200, b"{}"), (302, b""), (500, b"{")]
)
def test_not_a_llama_server(tmp_path: Path, status: int, body: bytes) -> None:
    with web_server(status, body) as url:
        report = doctor(tmp_path, *AUTO, "--upstream", f"{url}/v1")
    assert report.exit_code == 2
    assert report.bad == {"llama-server"}
    assert report.text("llama-server").startswith(f"{url} is not a llama-server (/props: ")
    assert "--upstream" in report.remedy("llama-server")


@pytest.mark.parametrize("greeting", [b"220 mail.example ESMTP\r\n", b"\0\0\0", b""])
def test_no_http_server(tmp_path: Path, greeting: bytes) -> None:
    with other_protocol(greeting) as url:
        report = doctor(tmp_path, *AUTO, "--upstream", f"{url}/v1")
    assert report.exit_code == 2
    assert report.bad == {"llama-server"}


def test_nothing_listens(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    report = doctor(tmp_path, *AUTO, "--upstream", f"{url}/v1")
    assert report.exit_code == 2
    assert report.bad == {"llama-server"}
    assert report.text("llama-server") == f"{url}: nothing listens there"


def test_a_model_that_is_loading(tmp_path: Path) -> None:
    with web_server(503, b'{"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}') as url:
        report = doctor(tmp_path, *AUTO, "--upstream", f"{url}/v1")
    assert report.exit_code == 2
    assert report.text("llama-server") == f"{url}: the model is loading"


def test_patched_server(tmp_path: Path) -> None:
    with llama("--parallel", "4", "--kv-unified", binary=patched_binary()) as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
        assert server.held == [0, 0, 0, 0]  # what it does is known, so no prompt was sent
        assert report.remedy("KV memory").startswith("grep kv_unified LOG")
        probed = doctor(tmp_path, *AUTO, "--probe", *server.upstream)
        cache = {"SLOTPIN_CACHE_DIR": str(server.log_path.parents[1])}
        named = doctor(tmp_path, *AUTO, *server.upstream, **cache)
    assert report.bad == set()
    assert report.exit_code == 0
    assert report.text("llama-server").endswith("slotpin's own")
    assert report.level("/v1/messages") == "ok"
    assert (report.level("idle slots"), report.text("idle slots")[:5]) == ("ok", "kept:")
    assert "kept its tokens" in probed.text("idle slots")
    assert named.remedy("KV memory") == f"grep kv_unified {server.log_path}"


# --- other servers --------------------------------------------------------------------------------------------------


def test_slots_switched_off(tmp_path: Path) -> None:
    with llama("--parallel", "2", "--no-slots") as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
    assert report.exit_code == 2
    assert report.bad == {"slots"}
    assert report.remedy("slots").endswith("--slots")


def test_router(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with llama("--models-dir", str(tmp_path / "models"), model=False) as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
    assert report.exit_code == 2
    assert report.bad == {"slots"}
    assert "router mode" in report.text("slots")


def test_a_sleeping_server_is_not_woken(tmp_path: Path) -> None:
    def sleeps() -> bool:
        return bool(fetch(f"{server.url}/props").json["is_sleeping"])

    with llama(*RECOMMENDED, "--sleep-idle-seconds", "1") as server:
        wait_until(sleeps, "the server sleeps")
        report = doctor(tmp_path, *AUTO, *server.upstream)
        assert sleeps()
    assert report.exit_code == 1
    assert report.bad == {"slots"}


# --- idle slots -----------------------------------------------------------------------------------------------------


def test_a_slot_in_use_is_never_touched(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        server.use(0, "a conversation")
        before = server.slots
        for flags in ((), ("--probe",)):
            report = doctor(tmp_path, *AUTO, *flags, *server.upstream)
            assert report.exit_code == 0
            assert report.text("idle slots").startswith("left out: it takes two slots that nobody uses")
        assert server.slots == before


def test_beside_slots_in_use_only_when_asked_for(tmp_path: Path) -> None:
    with llama(*FOUR) as server:
        server.use(1, "a conversation")
        before = server.slots
        report = doctor(tmp_path, *AUTO, *server.upstream)
        assert "those in use (1)" in report.text("idle slots")
        assert server.slots == before
        report = doctor(tmp_path, *AUTO, "--probe", *server.upstream)
        assert report.level("idle slots") == "ok"
        assert server.slots[1] == before[1]
        assert [tokens > 0 for tokens in server.held] == [False, True, True, True]


def test_cleared_slots_are_seen_without_a_prompt(tmp_path: Path) -> None:
    with llama() as server:
        server.use(0, "a conversation")
        server.use(1, "another one")
        before = server.slots
        report = doctor(tmp_path, *AUTO, "--no-probe", *server.upstream)
        assert server.slots == before
    assert report.exit_code == 1
    assert report.text("idle slots").startswith("the server seems to clear them: slot 0 has worked and is empty now")


def test_no_probe(tmp_path: Path) -> None:
    with llama() as server:
        report = doctor(tmp_path, *AUTO, "--no-probe", *server.upstream)
        assert server.held == [0, 0, 0, 0]
    assert report.exit_code == 0
    assert report.text("idle slots") == "left out: --no-probe"


def test_clearing_is_unsafe_where_slotpin_pins_without_looking(tmp_path: Path) -> None:
    with llama() as server:
        report = doctor(tmp_path, "--enabled", "true", *server.upstream)
    assert report.level("idle slots") == "unsafe"
    assert report.exit_code == 2


@pytest.mark.parametrize(
    ("slots", "idle"),
    [
        ([Slot(0), Slot(1)], Idle.UNKNOWN),
        ([Slot(0, id_task=3, n_prompt_tokens=5), Slot(1)], Idle.UNKNOWN),
        ([Slot(0, id_task=3, n_prompt_tokens=0), Slot(1)], Idle.EMPTIED),
        ([Slot(0, id_task=3, n_prompt_tokens=0, is_processing=True), Slot(1)], Idle.UNKNOWN),
        ([Slot(0, id_task=3), Slot(1)], Idle.UNKNOWN),
        ([Slot(0, id_task=-1, n_prompt_tokens=0), Slot(1)], Idle.UNKNOWN),
    ],
)
def test_what_a_look_tells(slots: list[Slot], idle: Idle) -> None:
    assert without_provoking(slots, "").idle is idle


@pytest.mark.parametrize(
    ("patched", "remedy"), [(False, "llama-server … --no-cache-idle-slots"), (True, "slotpin up --ctx-size N")]
)
def test_an_emptied_slot_has_another_cause_on_slotpin_s_own_server(patched: bool, remedy: str) -> None:
    found = idle_slots(Seen(Idle.EMPTIED, "slot 0 is empty"), Settings(), patched=patched)
    assert found.level is Level.BETTER
    assert found.remedy.startswith(remedy)


# --- configuration, slotpin, Pi -------------------------------------------------------------------------------------


def test_enabled_false_is_a_finding(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *server.upstream)
    assert report.exit_code == 1
    assert report.bad == {"pinning"}
    assert report.remedy("pinning").startswith("slotpin serve --enabled auto")


def test_a_configuration_that_is_not_valid(tmp_path: Path) -> None:
    (tmp_path / "slotpin.json").write_text('{"llamaCppSlots": {"mainIdSlot": -1}}')
    report = doctor(tmp_path)
    assert report.exit_code == 2
    assert set(report.findings) == {"configuration"}
    assert "$.llamaCppSlots.mainIdSlot: -1 is not allowed" in report.text("configuration")
    assert report.remedy("configuration") == f"slotpin config check {tmp_path / 'slotpin.json'}   # after mending it"


def test_notes_on_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "slotpin.json").write_text('{"llamaCppSlots": {"enabled": "auto", "compactorIdSlot": 0}}')
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, "--config", "slotpin.json", *server.upstream)
    assert report.exit_code == 2
    assert report.level("configuration") == "could be better"
    assert report.level("slots") == "unsafe"


def test_ids_that_are_one_slot(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *AUTO, "--set", "llamaCppSlots.compactorIdSlot=2", *server.upstream)
    assert report.exit_code == 2
    assert report.text("slots") == "mainIdSlot 0 and compactorIdSlot 2 are slot 0 of 2"


def test_two_servers_need_no_pinning(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{unused_port()}"
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *AUTO, *server.upstream, "--set", f"compactor.baseUrl={nobody}")
    assert report.exit_code == 2
    assert report.level("pinning") == "ok"
    assert report.text("side llama-server") == f"{nobody}: nothing listens there"


def test_slotpin_itself(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server, Program(tmp_path, "serve", *AUTO, "--port", "0", *server.upstream) as program:
        port = program.url.rpartition(":")[2]
        report = doctor(tmp_path, *AUTO, "--port", port, *server.upstream)
        assert report.exit_code == 0
        assert report.level("slotpin") == "ok"
        report = doctor(tmp_path, "--enabled", "true", "--port", port, *server.upstream)
        assert report.text("slotpin").endswith("with enabled: auto (this configuration: true)")
        report = doctor(tmp_path, "--port", port, *server.upstream)
        assert report.text("slotpin").endswith("with enabled: auto")
        report = doctor(tmp_path, *AUTO, "--port", port, "--upstream", f"{program.url}/v1")
        assert report.level("configuration") == "unsafe"
        assert "run in a circle" in report.text("configuration")


def test_slotpin_is_not_there_or_another_program_is(tmp_path: Path) -> None:
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
        assert (report.level("slotpin"), report.remedy("slotpin")) == ("note", "slotpin serve")
        with web_server(200, b"{}") as other:
            report = doctor(tmp_path, *AUTO, "--port", other.rpartition(":")[2], *server.upstream)
        assert report.level("slotpin") == "could be better"
        assert report.text("slotpin") == f"another program listens on {other}, so slotpin can't"


@pytest.mark.parametrize(("window", "level"), [("8192", "ok"), ("8193", "could be better"), (None, "could be better")])
def test_what_pi_believes(tmp_path: Path, window: str | None, level: str) -> None:
    port = str(unused_port())
    folder = tmp_path / "agent"
    folder.mkdir()
    said = f', "contextWindow": {window}' if window else ""
    (folder / "models.json").write_text(
        f"""{{ // the local one
        "providers": {{
            "local": {{"baseUrl": "http://localhost:{port}/main/v1", "models": [{{"id": "m"{said}}},]}},
            "other": {{"baseUrl": "https://example.com//v1", "models": [{{"id": "x", "contextWindow": 1000000}}]}}
        }}}}"""
    )
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *AUTO, "--port", port, *server.upstream, PI_CODING_AGENT_DIR=str(folder))
    assert report.level("Pi") == level
    if level != "ok":
        assert report.remedy("Pi") == f'"contextWindow": 8192 for local/m in {folder / "models.json"}'


def test_a_broken_file_of_pi_is_a_note(tmp_path: Path) -> None:
    (tmp_path / ".pi" / "agent").mkdir(parents=True)
    (tmp_path / ".pi" / "agent" / "models.json").write_text("{")
    with llama(*RECOMMENDED) as server:
        report = doctor(tmp_path, *AUTO, *server.upstream)
    assert report.exit_code == 0
    assert report.level("Pi") == "note"


# --- what servers show in other versions ----------------------------------------------------------------------------


def sized(*n_ctx: int | None) -> list[Slot]:
    return [Slot(number, n_ctx=size) for number, size in enumerate(n_ctx)]


@pytest.mark.parametrize(
    ("slots", "main", "level", "part"),
    [
        (sized(4096, 4096), 0, Level.OK, "4096 tokens a slot"),
        (sized(4096, 2048), 0, Level.NOTE, "slot 1 has 2048"),
        (sized(2048, 4096), 0, Level.BETTER, "the main slot 0 has 2048 tokens, slot 1 has 4096"),
        (sized(2048, 4096), 3, Level.NOTE, "slot 0 has 2048"),
        (sized(4096, None), 0, Level.NOTE, "does not say"),
    ],
)
def test_smaller_slots(slots: list[Slot], main: int, level: Level, part: str) -> None:
    (found,) = contexts(slots, Settings(llama_cpp_slots=LlamaCppSlots(main_id_slot=main)))
    assert found.level is level
    assert part in found.text


def test_slots_that_hold_more_than_one_s_context_do_not_share_it() -> None:
    slots = [Slot(number, n_ctx=100, id_task=number, n_prompt_tokens=tokens) for number, tokens in enumerate((60, 50))]
    assert memory(slots, Seen(Idle.KEPT, "")).level is Level.OK
    assert memory(slots[:1], Seen(Idle.KEPT, "")).text.startswith("unified or split is unknown")


@pytest.mark.parametrize(
    ("levels", "code"),
    [([], 0), ([Level.OK, Level.NOTE], 0), ([Level.BETTER, Level.OK], 1), ([Level.UNSAFE, Level.BETTER], 2)],
)
def test_exit_code(levels: list[Level], code: int) -> None:
    assert exit_code([Finding(level, "x", "y") for level in levels]) == code


def test_the_table(tmp_path: Path) -> None:
    port = str(unused_port())
    done = run(tmp_path, "doctor", "--port", port, "--upstream", f"http://127.0.0.1:{unused_port()}/v1")
    assert done.returncode == 2
    assert done.stderr == ""
    rows = [
        line for line in done.stdout.splitlines() if line.startswith(("ok ", "note ", "could be better ", "unsafe "))
    ]
    assert [row.split("  ")[0] for row in rows] == ["ok", "could be better", "note", "unsafe"]
    assert "-> slotpin serve\n" in done.stdout
    assert done.stdout.endswith("\n\n1 unsafe, 1 could be better\n")


def test_a_slotpin_that_wants_a_key(tmp_path: Path) -> None:
    keys = {"SLOTPIN_LISTEN_API_KEYS": '["k"]'}
    with (
        llama(*RECOMMENDED) as server,
        Program(tmp_path, "serve", *AUTO, "--port", "0", *server.upstream, **keys) as program,
    ):
        flags = ("--port", program.url.rpartition(":")[2], *server.upstream)
        report = doctor(tmp_path, *flags)
        assert report.bad == {"slotpin"}
        assert report.text("slotpin") == f"runs on {program.url} and wants a key, so how it pins is not known"
        assert report.remedy("slotpin").startswith("export SLOTPIN_LISTEN_API_KEYS=")
        assert "pinning" not in report.findings
        assert doctor(tmp_path, *flags, **keys).bad == set()
