"""Processes held to a share of a core each, by the kernel's CPU quotas.

Replicas that share a machine's cores wait for the machine, whichever of them gets a request; replicas with GPUs wait
for their own. With a quota each is a resource of its own again, so that spreading work over them can be seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD_MICROSECONDS = 10_000  # in which a process may use its share: a tenth of Linux' default, so pauses are short
_GROUPS = Path("/sys/fs/cgroup")


class QuotaError(Exception):
    """This machine lets nobody set CPU quotas; the text says what is missing."""


@contextmanager
def held_to(cores: float, pids: Iterable[int]) -> Iterator[None]:
    """Bind each process, with all its threads and all that it has started, to so many cores, until the block ends.

    Raises QuotaError where control groups cannot be made: it takes root, and a container that allows it.
    """
    made: list[Path] = []
    try:
        try:
            root = _root()
            for pid in pids:
                group = root / f"warmkv-{os.getpid()}-{pid}"
                group.mkdir()
                made.append(group)
                _limit(group, round(cores * PERIOD_MICROSECONDS))
                (group / "cgroup.procs").write_text(str(pid))
                for other in _descendants(pid):
                    with suppress(ProcessLookupError):  # it has ended
                        (group / "cgroup.procs").write_text(str(other))
        except OSError as error:
            raise QuotaError(f"no CPU quotas here: {error}") from error
        yield
    finally:
        for group in made:
            _remove(group)


def _root() -> Path:
    """Return the control group that hands out processors, in version 1 or 2."""
    if (_GROUPS / "cpu" / "tasks").exists():
        return _GROUPS / "cpu"
    if (_GROUPS / "cgroup.controllers").exists():
        (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
        return _GROUPS
    raise FileNotFoundError(f"{_GROUPS} has no controller of processors")


def _descendants(pid: int) -> Iterator[int]:
    """Yield what a process has started, and what that has: vLLM computes in processes of its own."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended
            for child in children.read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _limit(group: Path, quota: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def _remove(group: Path) -> None:
    """Let its processes go. A group that stays nevertheless is empty and limits nobody."""
    with suppress(OSError):  # its processes may be ending
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
    for _ in range(50):
        with suppress(OSError):  # busy until the kernel has let its last process go
            group.rmdir()
            return
        time.sleep(0.1)
