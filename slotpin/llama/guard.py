"""Child processes that can't outlive this one, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs "$@" and holds standard input, whose other end only slotpin has. End of input means that slotpin is gone: end
# the whole process group, with SIGTERM first because ninja ends its compilers, which have groups of their own, only
# then. SIGTERM is passed on, and the exit status is the command's.
_GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM
{ read -r _ <&3; trap '' TERM; kill -TERM 0; sleep 1; kill -KILL 0; } >/dev/null 2>&1 &
watcher=$!
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || break
done
kill -KILL "$watcher"
exit "$status"
"""

# Asks the kernel for SIGKILL at the parent's death (prctl PR_SET_PDEATHSIG is 1, kept over exec), then becomes the
# command. The parent may have died before the request: then the parent id has changed already.
_TIED = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)) != 0:
    sys.exit("error: prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("error: the parent process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: Sequence[str]) -> list[str]:
    """`command` under a small shell that kills it, with its process group, when the shell's standard input ends.

    Start it with a pipe as standard input and in a session of its own. For any POSIX system.
    """
    return ["/bin/sh", "-c", _GUARD, "slotpin-guard", *command]


def tied(command: Sequence[str]) -> list[str]:
    """`command` as a direct child that the kernel kills at the death of the thread that starts it. Linux only.

    `command[0]` is a path. Start it from the main thread: another thread's end would kill it.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
