"""A run with a real llama-server, looked at by a person: in a terminal, and in a browser.

`UPDATE_IMAGES=1 python -m pytest tests/observe/test_live.py` writes what is seen there to docs/images.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slotpin.observe.ask import Place, look
from slotpin.observe.board import Board
from slotpin.observe.screen import screen
from tests.real.client import OpenRequest, fetch
from tests.real.prompts import chat, prose
from tests.real.servers import Llama, Slotpin, llama, slotpin
from tests.support.browser import Page, browser
from tests.support.processes import wait_until
from tests.support.program import run
from tests.support.proxy import on_loop, running_proxy, settings_for
from tests.support.stub_upstream import stub_upstream

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHAT, SIDE = "/v1/chat/completions", "/compactor/v1/chat/completions"
AGENTS = {"pi": "Pi/1.6.0", "opencode": "opencode/1.2.0"}
TURNS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[Llama]:
    with llama("--parallel", "4", "--ctx-size", "16384", "--kv-unified", "--no-cache-idle-slots") as running:
        yield running


@pytest.fixture(scope="module")
def live(server: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slotpin]:
    """Two conversations and a side request are over; a turn of the first runs, and another one waits for it."""
    with slotpin(tmp_path_factory.mktemp("slotpin"), server.url) as proxy:
        conversations = {name: [{"role": "system", "content": prose(250, name)}] for name in AGENTS}
        for turn in range(TURNS):
            for name, messages in conversations.items():
                messages.append({"role": "user", "content": prose(40 + 30 * turn, f"{name} {turn}")})
                answer = fetch(f"{proxy.url}{CHAT}", body(messages, 12), {"User-Agent": AGENTS[name]})
                assert answer.reason == "pinned", answer
                messages.append(answer.json["choices"][0]["message"])
            if turn == 3:
                # Here the client changes what it has sent before, so that most of its cache is lost.
                conversations["opencode"][1]["content"] = prose(45, "other")
        fetch(f"{proxy.url}{SIDE}", chat(prose(180, "side"), tokens=8), {"User-Agent": AGENTS["pi"]})
        messages = [*conversations["pi"], {"role": "user", "content": "go on"}]
        long = body(messages, 14000) | {"stream": True, "ignore_eos": True}
        first = OpenRequest(f"{proxy.url}{CHAT}", long, {"User-Agent": AGENTS["pi"]})
        first.read_until(b"data:")
        second = OpenRequest(f"{proxy.url}{CHAT}", long, {"User-Agent": AGENTS["pi"]})
        wait_until(lambda: len(proxy.status["underWay"]) == 2, "the second one waits")
        yield proxy
        second.close()
        first.close()


def body(messages: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": tokens, "temperature": 0}


def test_the_board_is_what_happened(server: Llama, live: Slotpin) -> None:
    board: Board = asyncio.run(look(Place(live.url, "none")))
    slots = {slot.id: slot for slot in board.slots}
    assert slots.keys() == {0, 1, 2, 3}
    assert [slots[slot].client for slot in (0, 1, 2)] == ["pi", "pi", "opencode"]
    assert [slots[slot].role for slot in (0, 1, 2, 3)] == ["main", "compactor", "main", None]
    assert (slots[0].busy, slots[0].waiting, slots[2].busy, slots[2].waiting) == (True, 1, False, 0)
    assert [record.outcome for record in board.under_way] == ["under_way", "waiting"]
    assert board.under_way[0].id == slots[0].running
    # What slotpin says of a slot that it did not look at is what the server has there.
    held = {slot["id"]: slot.get("n_prompt_tokens", 0) for slot in server.slots}
    for slot in (1, 2):
        assert abs(held[slot] - (slots[slot].tokens or 0)) <= 4
    assert len(slots[2].reused) == TURNS
    assert slots[2].reused[0] == 0 and slots[2].reused[4] < 60 < slots[2].reused[5]
    assert board.totals.exchanges == 2 * TURNS + 1
    assert board.totals.cached > board.totals.evaluated > 0
    assert board.totals.spared_seconds > 0
    assert [warned.cause for warned in board.warnings] == ["cache_lost:prompt_changed"]


def test_in_a_terminal(live: Slotpin, tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"), force_terminal=True, highlight=False)
    with console.file:
        console.print(screen(asyncio.run(look(Place(live.url, "none"))), live.url, console))
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8484", console.export_text(clear=False))
    assert re.search(r"^ +0 +pi c\d+ +main +busy \d.*▇.* 1 *$", text, re.MULTILINE)
    assert re.search(r"^ +2 +opencode c\d+ +main +idle", text, re.MULTILINE)
    assert re.search(r"^main +for slot 0 ", text, re.MULTILINE)
    assert "cache_lost:prompt_changed" in text
    # The command prints the same.
    printed = run(tmp_path, "status", "--url", live.url).stdout
    assert [line.split()[:3] for line in printed.splitlines()[5:10]] == [
        line.split()[:3] for line in text.splitlines()[5:10]
    ]
    if os.environ.get("UPDATE_IMAGES"):
        drawn = console.export_svg(title="slotpin top", unique_id="top")
        drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # from elsewhere
        # As a user has it: both on their own ports.
        drawn = drawn.replace(live.url.rpartition(":")[2], "8484").replace(server_port(live), "8080")
        (IMAGES / "top.svg").write_text(drawn)


def server_port(live: Slotpin) -> str:
    upstream: str = live.status["upstream"]
    return upstream.rpartition(":")[2]


def test_in_a_browser(live: Slotpin) -> None:
    asyncio.run(asyncio.wait_for(_look_at_the_page(live), 120))


async def _look_at_the_page(live: Slotpin) -> None:
    async with browser() as page:
        for scheme, ground in (("light", (251, 251, 250)), ("dark", (22, 23, 26))):
            await page.show(1000, 800, scheme)
            await page.open(f"{live.url}/slotpin/")
            await page.until(f"document.querySelectorAll('#plot .bar').length === {2 * TURNS + 1}")
            await page.until("document.querySelectorAll('#slots th').length === 4")
            assert await page.run("getComputedStyle(document.body).backgroundColor") == f"rgb{ground}"
            if os.environ.get("UPDATE_IMAGES"):
                await page.run("at('about').textContent = at('about').textContent.replace(/:\\d+/, ':8080')")
                (IMAGES / f"page-{scheme}.png").write_bytes(await page.screenshot())
        await _check_text(page)
        await _check_keyboard(page)
        await _check_names(page)
        # It is live.
        answer = await asyncio.to_thread(fetch, f"{live.url}{SIDE}", chat("x", tokens=2), {"User-Agent": "late/1"})
        assert answer.status == 200
        await page.until(f"document.querySelector('#latest th').textContent === '{answer.request}'")
        # Where the plot is drawn smaller, its numbers can still be read.
        await page.show(500, 800, "light")
        await page.until("NARROW.matches && document.querySelector('#plot .grid').getAttribute('x1') === '118'")
        boxes = await page.run(
            "[...document.querySelectorAll('#plot text')].map((text) => text.getBoundingClientRect())"
            ".map((box) => [box.height, box.left - at('plot').getBoundingClientRect().left])"
        )
        assert all(height >= 11 and left >= 0 for height, left in boxes), boxes
        # On a telephone nothing but the tables scrolls to the side.
        await page.show(375, 700, "light")
        assert await page.run("document.documentElement.scrollWidth <= 375")
        assert {url.removeprefix(live.url) for url in page.asked} == {"/slotpin/", "/slotpin/events"}
        assert page.complaints == []


@on_loop
async def test_the_page_says_when_slotpin_is_gone_and_when_it_is_back() -> None:
    async with stub_upstream() as stub, browser() as page:
        async with running_proxy(settings_for(stub)) as running:
            port = running.port
            await running.fetch()
            await page.open(f"{running.proxy.url}/slotpin/")
            await page.until("document.querySelectorAll('#latest th').length === 1")
            assert await page.run("at('lost').textContent") == ""
        await page.until("at('lost').textContent.startsWith('slotpin does not answer')")
        async with running_proxy(settings_for(stub, listen={"port": port})) as running:
            await page.until("at('lost').textContent === '' && document.querySelectorAll('#latest th').length === 0")


async def _check_text(page: Page) -> None:
    rows = await page.run("[...document.querySelectorAll('#slots tr')].map((row) => row.innerText)")
    assert re.match(r"0\s+pi c\d+\s+main\s+busy ", rows[0]) and rows[0].endswith("1")
    assert re.match(r"2\s+opencode c\d+\s+main\s+idle", rows[2])
    assert "cache_lost:prompt_changed" in await page.run("at('warning-list').innerText")
    assert re.match(r"[\d,]+ \(\d\d%\)", await page.run("at('t-cached').innerText"))
    assert re.match(r"\d.* s|\d+ min", await page.run("at('t-spared').innerText"))
    # Bars are as high as their numbers.
    heights = await page.run(
        "records.map((record) => {"
        "  const bar = document.querySelector(`[data-request='${record.id}']`);"
        "  const [, cached, evaluated] = [...bar.children].map((rect) => Number(rect.getAttribute('height')));"
        "  return [record.cached, cached, record.evaluated, evaluated];"
        "})"
    )
    scale = heights[0][3] / heights[0][2]
    for tokens_cached, cached, tokens_evaluated, evaluated in heights:
        assert cached == pytest.approx(tokens_cached * scale)
        assert evaluated == pytest.approx(tokens_evaluated * scale)


async def _check_keyboard(page: Page) -> None:
    """With Tab to the plot's bars, through them with the arrows."""
    for _ in range(10):
        await page.press("Tab")
        if await page.run("document.activeElement.classList.contains('bar')"):
            break
    focused = "document.activeElement.getAttribute('aria-label')"
    last = await page.run(focused)
    assert " compactor of pi: " in last
    assert await page.run("at('picked').textContent") == last
    await page.press("ArrowLeft")
    assert " main of opencode c" in await page.run(focused)
    await page.press("Home")
    assert await page.run("document.activeElement.dataset.request === records[0].id")
    # Another choice of what is shown.
    await page.run("at('which').value = 'compactor'; at('which').dispatchEvent(new Event('change'))")
    assert await page.run("document.querySelectorAll('#plot .bar').length") == 1
    await page.run("at('which').value = ''; at('which').dispatchEvent(new Event('change'))")


async def _check_names(page: Page) -> None:
    """Whatever can be reached, or is a picture, a table or a region, says what it is."""
    nodes = await page.accessible()
    nameless = [
        node
        for node in nodes
        if (node["focusable"] or node["role"] in ("image", "region", "group", "combobox")) and not node["name"]
    ]
    assert nameless == []
    assert {"Slots", "Latest requests", "Prompt tokens of each turn"} <= {node["name"] for node in nodes}
