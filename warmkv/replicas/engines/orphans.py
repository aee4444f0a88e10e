"""Ending processes with the one that started them, however it ends. Linux."""

from __future__ import annotations

import os
import subprocess
import sys

LOOK_SECONDS = 0.5
"""Seconds between two looks for processes that have been started."""

WATCH = """
import contextlib, os, select, signal, sys
this, seconds = int(sys.argv[1]), float(sys.argv[2])
watched = {}

def look():
    for pid, handle in list(watched.items()):
        if select.select([handle], [], [], 0)[0]:  # it has ended: another may get its number
            os.close(watched.pop(pid))
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
            children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    parents = [this, *watched]
    while parents:
        for child in children.get(parents.pop(), ()):
            if child not in watched and child != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    watched[child] = os.pidfd_open(child)
                    parents.append(child)

try:
    parent = os.pidfd_open(this)
except ProcessLookupError:
    sys.exit()
starting, tell, ready = True, True, []
while parent not in ready:
    look()
    if tell:
        with contextlib.suppress(OSError):
            print(flush=True)
    ready, _, _ = select.select([parent, *([0] if starting else [])], [], [], seconds if starting else None)
    tell = starting and 0 in ready
    starting = starting and 0 not in ready
look()
for handle in watched.values():
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
"""


def children_end_with_this_process() -> subprocess.Popen[bytes]:
    """Start a process that kills all that this one has started when this one has ended, even by a signal.

    It looks for what is started, by this process and by those, until it is `settled`; what one of those starts and
    leaves behind between two looks is not found. Kill it to let them live.
    """
    command = [sys.executable, "-S", "-c", WATCH, str(os.getpid()), str(LOOK_SECONDS)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert watcher.stdout is not None
    watcher.stdout.readline()  # it has looked
    return watcher


def settled(watcher: subprocess.Popen[bytes]) -> None:
    """Let a watcher look once more, and for no others from then on."""
    assert watcher.stdin is not None
    assert watcher.stdout is not None
    watcher.stdin.write(b"\n")
    watcher.stdin.flush()
    watcher.stdout.readline()
