"""Ending processes with the one that started them, however it ends. Linux."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

WATCH = """
import contextlib, os, signal, sys
watched = []
for pid in sys.argv[1:]:
    with contextlib.suppress(ProcessLookupError):
        watched.append(os.pidfd_open(int(pid)))
print(flush=True)
sys.stdin.read()
for process in watched:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
"""


def kill_with_this_process(pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a process that kills others when this one has ended, even by a signal; kill it to let them live."""
    command = [sys.executable, "-S", "-c", WATCH, *map(str, pids)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert watcher.stdout is not None
    watcher.stdout.readline()  # it has hold of them
    return watcher
