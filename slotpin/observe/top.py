"""`slotpin status` and `slotpin top`: the board on a terminal, once or until somebody has seen enough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from slotpin.errors import UserError
from slotpin.observe.ask import Place, look
from slotpin.observe.screen import screen


def new_console() -> Console:
    # rich's own heeding of NO_COLOR leaves bold.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, emoji=False, markup=False, color_system=None if plain else "auto")


async def status(place: Place) -> None:
    console = new_console()
    console.print(screen(await look(place), place.url, console))


async def top(place: Place, interval: float, count: int | None) -> None:
    """Show the board every `interval` seconds, `count` times or until q or Ctrl-C. Not on a terminal: as text."""
    console = new_console()
    if not console.is_terminal or console.is_dumb_terminal:
        await _printed(console, place, interval, count)
        return
    with _pressed(b"qQ") as quit_, Live(console=console, screen=True, auto_refresh=False) as live:
        shown = 0
        board = await look(place)  # a slotpin that is not there is an error at the start only
        while True:
            live.update(screen(board, place.url, console), refresh=True)
            shown += 1
            if shown == count:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(quit_.wait(), interval)
            if quit_.is_set():
                return
            try:
                board = await look(place)
            except UserError as error:
                live.update(Text(f"{error}\n\ntrying again every {interval:g} s; q ends it"), refresh=True)


async def _printed(console: Console, place: Place, interval: float, count: int | None) -> None:
    shown = 0
    while True:
        console.print(screen(await look(place), place.url, console))
        shown += 1
        if shown == count:
            return
        console.print()
        await asyncio.sleep(interval)


@contextlib.contextmanager
def _pressed(keys: bytes) -> Iterator[asyncio.Event]:
    """An event that one of these keys sets; where the keyboard can't be read, it stays as it is."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in ("SIGTERM", "SIGHUP"):  # they too leave the terminal as it was
        if number := getattr(signal, name, None):
            with contextlib.suppress(NotImplementedError):  # on Windows
                loop.add_signal_handler(number, event.set)
    try:
        import termios
        import tty

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (
        ImportError,
        AttributeError,
        OSError,
        ValueError,
        termios.error,
    ):  # no terminal, or none at all
        yield event
        return

    def read() -> None:
        if any(key in keys for key in os.read(number, 64)):
            event.set()

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield event
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
