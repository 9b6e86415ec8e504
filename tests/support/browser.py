"""A headless Chromium, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.debian import debian_program
from tests.support.processes import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-port=0",
)
START_SECONDS = 60.0


class Page:
    """One tab. `asked` are the URLs of all requests that it has made, `complaints` what it logged as an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.asked: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        said = await self._ask(method, params)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await answer

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, script: str, seconds: float = 15) -> None:
        """Wait until an expression is true; one that fails is not, as while another document comes."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self._is_true(script):
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {script}"
            await asyncio.sleep(0.05)

    async def _is_true(self, script: str) -> bool:
        said = await self._ask("Runtime.evaluate", {"expression": script, "returnByValue": True})
        return "result" in said and said["result"]["result"].get("value") is True

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[key]
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def show(self, width: int, height: int, scheme: str) -> None:
        """`scheme` is light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self) -> bytes:
        """Of the whole page, as PNG."""
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(said["data"])

    async def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader is told: role, name and whether it can be reached by keyboard."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            {
                "role": node.get("role", {}).get("value"),
                "name": node.get("name", {}).get("value", ""),
                "focusable": any(each["name"] == "focusable" for each in node.get("properties", [])),
            }
            for node in nodes
            if not node["ignored"]
        ]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    def close(self) -> None:
        self._reader.cancel()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
                continue
            params = said["params"]
            match said["method"]:
                case "Network.requestWillBeSent":
                    self.asked.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(params["exceptionDetails"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(params["entry"]["text"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser of its own with one tab."""
    chromium = debian_program("chromium", "chromium", "chromium-common")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            chromium.path,
            *FLAGS,
            f"--user-data-dir={home}",
            "about:blank",
            env={**os.environ, **chromium.environment, "HOME": home},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await asyncio.to_thread(_port, Path(home) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with http.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    try:
                        yield page
                    finally:
                        page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _port(file: Path) -> int:
    """Where DevTools listens: the browser writes it into its folder."""
    wait_until(lambda: file.exists() and "\n" in file.read_text(), "Chromium listens", START_SECONDS)
    return int(file.read_text().splitlines()[0])
