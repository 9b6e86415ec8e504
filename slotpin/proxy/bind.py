"""Where slotpin listens: a TCP port or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slotpin.errors import UserError
from slotpin.pinning.endpoints import socket_path

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Bound:
    """`file`: of a unix socket, with its inode, since another process may have put its own there."""

    server: asyncio.Server
    url: str
    file: tuple[Path, int] | None = None

    def close(self) -> None:
        """Take no more connections; those that are open stay."""
        self.server.close()
        if self.file is not None:
            path, inode = self.file
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()


async def bind(
    host: str, port: int, protocol: Callable[[], asyncio.Protocol], inherited: socket.socket | None = None
) -> Bound:
    """Listen; raises UserError when that can't be done."""
    loop = asyncio.get_running_loop()
    if inherited is not None:  # what is given back as a file is the service manager's
        on_path = inherited.family == socket.AF_UNIX
        serve = loop.create_unix_server if on_path else loop.create_server
        server = await serve(protocol, sock=inherited, backlog=BACKLOG)
        return Bound(server, host if on_path else _url(host, port))
    if path := socket_path(host):
        try:
            _remove_left_behind(path)
            server = await loop.create_unix_server(protocol, path, backlog=BACKLOG)
            return Bound(server, host, (Path(path), os.lstat(path).st_ino))
        except OSError as problem:
            raise UserError(f"cannot listen on {host}: {_no_socket(Path(path), problem)}") from None
    try:
        server = await loop.create_server(protocol, host, port, backlog=BACKLOG)
    except (OSError, OverflowError) as problem:
        raise UserError(f"cannot listen on {host}:{port}: {_no_port(problem)}") from None
    address, port = server.sockets[0].getsockname()[:2]
    return Bound(server, _url(address, port))


def address_of(listening: socket.socket) -> tuple[str, int]:
    """As `listen.host` and `listen.port` would have it."""
    name = listening.getsockname()
    return (f"unix:{name}", 0) if listening.family == socket.AF_UNIX else (name[0], name[1])


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _remove_left_behind(path: str) -> None:
    """The socket of a process that was killed. Raises OSError where there is something else."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(errno.EEXIST, "exists")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:
            pass  # so busy that its queue is full
    raise OSError(errno.EADDRINUSE, "in use")


def _no_socket(path: Path, problem: OSError) -> str:
    match problem.errno:
        case errno.EADDRINUSE:
            return "another program listens there; choose another path with --host or listen.host"
        case errno.EEXIST:
            return "there is a file that is no socket; choose another path with --host or listen.host"
        case errno.ENOENT | errno.ENOTDIR if not path.parent.is_dir():
            return f"there is no folder {path.parent}; make it, or choose another path with --host or listen.host"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOENT:
            return f"slotpin can't make a file there; choose a folder of your own instead of {path.parent}"
    return f"{problem.strerror or problem}; see listen.host"


def _no_port(problem: Exception) -> str:
    match problem.errno if isinstance(problem, OSError) else None:
        case errno.EADDRINUSE:
            return "the port is in use; choose another with --port or listen.port"
        case errno.EACCES:
            return "that needs more rights; choose a port above 1023"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; see listen.host"
    return f"{problem}; see listen.host and listen.port"
