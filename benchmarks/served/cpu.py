"""The processes of a server: the CPU time of its parts, and how it is kept from using any."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def used_by_title(root: int, parts: Mapping[str, str]) -> dict[str, float]:
    """Return the CPU seconds of the processes below `root`, summed by part: the first whose word their title holds."""
    used: dict[str, float] = {}
    for process, (title, seconds) in _below(root).items():
        if process != root and (part := next((part for part, word in parts.items() if word in title), None)):
            used[part] = used.get(part, 0.0) + seconds
    return used


def used_by_root(root: int, itself: str, others: str) -> dict[str, float]:
    """Return the CPU seconds of a process and of all below it, under two names."""
    found = _below(root)
    return {
        itself: sum(seconds for process, (_, seconds) in found.items() if process == root),
        others: sum(seconds for process, (_, seconds) in found.items() if process != root),
    }


def descendants(root: int) -> set[int]:
    """Return the processes below one, without itself."""
    return set(_below(root)) - {root}


@contextmanager
def stopped(processes: Collection[int]) -> Iterator[None]:
    """Let processes stand still for a while: a server that waits for requests still uses a tenth of a core or two."""
    try:
        _send(processes, signal.SIGSTOP)
        yield
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: Collection[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process, number)


def _below(root: int) -> dict[int, tuple[str, float]]:
    """Return title and CPU seconds of a process and all its descendants."""
    parents: dict[int, int] = {}
    known: dict[int, tuple[str, float]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        known[int(folder.name)] = title, (int(fields[11]) + int(fields[12])) / TICKS
    found: dict[int, tuple[str, float]] = {}
    for process, what in known.items():
        above: int | None = process
        while above is not None and above != root:
            above = parents.get(above)
        if above is not None:
            found[process] = what
    return found
