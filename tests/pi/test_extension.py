"""The companion extension in the real Pi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import slotpin.pi as package
from tests.real.servers import Slotpin, llama, slotpin
from tests.support.pi import rpc
from tests.support.pi.rpc import SHORT, Event, Pi, answers
from tests.support.relay import relay

EXTENSION = Path(package.__path__[0]) / "extension" / "slotpin.ts"
CHAT = "/v1/chat/completions"
TURN = "Remember this, please: " + "the quick brown fox jumps over the lazy dog, " * 40


def pi(home: Path, url: str, *flags: str, **sampling: object) -> Pi:
    """One with the extension, whose answers are short."""
    home.mkdir(exist_ok=True)
    model = {"samplingParams": {"grammar": SHORT, **sampling}}
    return Pi(home, url, "-nt", "-e", str(EXTENSION), *flags, model=model, compaction={"keepRecentTokens": 200})


def turns(session: Pi, count: int = 2) -> None:
    for _ in range(count):
        (answer,) = answers(session.prompt(TURN))
        assert answer["stopReason"] == "stop", answer


def session_id(session: Pi) -> str:
    found: str = session.call("get_state")["data"]["sessionId"]
    return found


def forget(proxy: Slotpin, session: Pi) -> None:
    """So that its next summary has no turn that it belongs to."""
    assert proxy.post("/slotpin/forget", {}, X_Slotpin_Session=session_id(session)).status == 200


def shown(session: Pi, method: str) -> list[Event]:
    """What extensions have asked to be shown so far."""
    requests = [event for event in session.events if event["type"] == "extension_ui_request"]
    return [request for request in requests if request["method"] == method]


def own(head: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in head.items() if name.startswith("x-slotpin-")}


def summary(id_: str) -> dict[str, str]:
    return {"x-slotpin-session": id_, "x-slotpin-role": "compactor", "x-slotpin-on-unsafe": "pass"}


def decisions(proxy: Slotpin) -> list[tuple[Any, ...]]:
    return [
        (event["role"], event["found_by"], event.get("slot"), event["reason"]) for event in proxy.program.exchanges()
    ]


def test_turns_and_summaries_carry_their_session_and_role(tmp_path: Path) -> None:
    with llama() as server, slotpin(tmp_path, server.url) as proxy, relay(proxy.url) as wire:
        with pi(tmp_path / "pi", wire.url) as session:
            turns(session)
            assert session.call("compact")["success"]
            turns(session, 1)
            id_ = session_id(session)
        turn = {"x-slotpin-session": id_, "x-slotpin-role": "main"}
        heads = sorted((own(head) for head in wire.heads(CHAT)), key=len)
        assert heads == [turn, turn, turn, summary(id_)]
        main, side = ("main", "header", 0, "pinned"), ("compactor", "header", 1, "pinned")
        assert decisions(proxy) == [main, main, side, main]
        # Twice for the summary, whose answer Pi does not show to extensions; never for a turn.
        assert len(wire.heads("/slotpin/status")) == 2


# RPC has no command for /tree.
LEAVE = """
export default function (pi) {
  pi.registerCommand("leave", {
    handler: async (_args, ctx) => {
      const first = ctx.sessionManager.getEntries().find((entry) => entry.message?.role === "user");
      await ctx.navigateTree(first.id, { summarize: true });
      ctx.ui.notify("left", "info");
    },
  });
}
"""


def test_a_branch_summary_carries_the_session(tmp_path: Path) -> None:
    (tmp_path / "leave.ts").write_text(LEAVE)
    with llama() as server, slotpin(tmp_path, server.url) as proxy, relay(proxy.url) as wire:
        with pi(tmp_path / "pi", wire.url, "-e", str(tmp_path / "leave.ts")) as session:
            turns(session)
            forget(proxy, session)
            assert session.call("prompt", message="/leave")["success"]
            session.wait(lambda event: event.get("message") == "left", "the branch is left")
            id_ = session_id(session)
            notices = [notice["message"] for notice in shown(session, "notify")]
        turn = {"x-slotpin-session": id_, "x-slotpin-role": "main"}
        assert [*map(own, wire.heads(CHAT))].count(turn) == 2
        assert [*map(own, wire.heads(CHAT))].count(summary(id_)) == 1
        assert decisions(proxy)[-1] == ("compactor", "header", 1, "no_binding")
    assert len(notices) == 2
    assert notices[0].startswith("slotpin: ")


def test_the_status_line_shows_the_slot_and_the_re_used_share(tmp_path: Path) -> None:
    with llama() as server, slotpin(tmp_path, server.url) as proxy, pi(tmp_path / "pi", proxy.url) as session:
        turns(session)
        first, second = (request["statusText"] for request in shown(session, "setStatus"))
        reuse = proxy.status["conversations"][0]["reuse"]
    shares = [round(100 * turn["cached"] / (turn["cached"] + turn["evaluated"])) for turn in reuse]
    assert shares[1] > 20
    assert (first, second) == tuple(f"slotpin: slot 0, {share}% re-used" for share in shares)


def test_each_of_three_sessions_has_its_slot_and_its_own_compaction(tmp_path: Path) -> None:
    with llama("--parallel", "4") as server, slotpin(tmp_path, server.url) as proxy, ExitStack() as stack:
        sessions = [stack.enter_context(pi(tmp_path / f"pi{number}", proxy.url)) for number in range(3)]
        begun = [session.begin(f"I am number {number}. {TURN}") for number, session in enumerate(sessions)]
        for session, since in zip(sessions, begun, strict=True):
            session.settled(since)
        for session in sessions:
            turns(session, 1)
        slots = {conversation["slot"] for conversation in proxy.status["conversations"]}
        assert slots == {0, 2, 3}
        for session in sessions:
            assert session.call("compact")["success"]
        assert [each for each in decisions(proxy) if each[0] == "compactor"] == [
            ("compactor", "header", 1, "pinned")
        ] * 3
        # A session that slotpin forgets has no ticket for its compaction, though the others have theirs.
        turns(sessions[0], 2)
        forget(proxy, sessions[0])
        assert sessions[0].call("compact")["success"]
        assert decisions(proxy)[-1][3] == "no_binding"


def test_a_warning_is_shown_once_a_minute(tmp_path: Path) -> None:
    with llama() as server, slotpin(tmp_path, server.url) as proxy:
        with pi(tmp_path / "pi", proxy.url, cache_prompt=False) as session:
            turns(session)
            (notice,) = shown(session, "notify")
        assert len(proxy.program.exchanges()) == 2
    assert notice["notifyType"] == "warning"
    assert notice["message"].startswith("slotpin: cache_prompt_off: ")


def test_a_warning_about_a_compaction_is_shown(tmp_path: Path) -> None:
    with llama() as server, slotpin(tmp_path, server.url) as proxy, pi(tmp_path / "pi", proxy.url) as session:
        turns(session)
        forget(proxy, session)
        assert shown(session, "notify") == []
        assert session.call("compact")["success"]
        (notice,) = shown(session, "notify")
    assert notice["notifyType"] == "warning"
    assert notice["message"].startswith("slotpin: ")
    assert "no_binding" in decisions(proxy)[-1]


def test_with_one_slot_a_compaction_succeeds_and_the_user_knows_why(tmp_path: Path) -> None:
    with llama("--parallel", "1") as server, slotpin(tmp_path, server.url) as proxy:
        with pi(tmp_path / "pi", proxy.url) as session:
            turns(session)
            assert session.call("compact")["success"]
            (notice,) = shown(session, "notify")
        assert decisions(proxy)[-1] == ("compactor", "header", None, "too_few_slots")
    assert "--parallel 2" in notice["message"]


def test_it_shows_nothing_in_front_of_a_plain_llama_server(tmp_path: Path) -> None:
    with llama() as server, pi(tmp_path / "pi", server.url) as session:
        turns(session)
        assert session.call("compact")["success"]
        turns(session, 1)
        assert nothing_shown(session.events)


def nothing_shown(events: Sequence[Event]) -> bool:
    return not any(event["type"] in ("extension_ui_request", "extension_error") for event in events)


def test_it_leaves_requests_to_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "PROVIDER", "other")
    with llama() as server, relay(server.url) as wire:
        with pi(tmp_path / "pi", wire.url) as session:
            turns(session)
            assert session.call("compact")["success"]
            assert nothing_shown(session.events)
        assert [own(head) for head in wire.heads(CHAT)] == [{}, {}, {}]
        assert wire.heads("/slotpin/status") == []
