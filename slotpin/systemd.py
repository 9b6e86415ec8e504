"""What a service manager and slotpin say to each other: sd_notify(3) and sd_listen_fds(3), without a library."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from slotpin.errors import UserError

FIRST_FD = 3  # SD_LISTEN_FDS_START


def listening_socket(environment: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The one that the service manager has opened for this process; None where it hasn't. Raises UserError.

    Programs that this process starts must not take it for theirs: the socket is not inherited further, and
    `LISTEN_PID` says whom it is for.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environment.get("LISTEN_FDS", "0")
    if count == "0":
        return None
    if count != "1":
        raise UserError(
            f"LISTEN_FDS is {count}, and slotpin listens on one socket; give its .socket unit one Listen line"
        )
    try:
        found = socket.socket(fileno=FIRST_FD)
    except OSError as problem:
        raise UserError(f"LISTEN_FDS is 1, but descriptor {FIRST_FD} is no socket: {problem.strerror}") from None
    found.set_inheritable(False)
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if found.type != socket.SOCK_STREAM or not listens:
        raise UserError("the socket that was passed on does not listen; use ListenStream= without Accept=yes")
    return found


def notify(state: str) -> None:
    """Tell it something, such as `READY=1`. Without a service manager, or with one that is gone, nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # abstract
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            return


async def keep_watchdog() -> None:
    """As long as the event loop turns, say so twice in the time after which the service manager would end us."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    try:
        seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return
    while seconds > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 2)
