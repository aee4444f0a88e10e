"""Find the files in which this process's control groups (cgroups) have their limits, of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def limit_files(controller: str, unified: str, separate: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield where limits may be, from this process's groups up to the root; not all of the files exist.

    They are called `unified` in version 2, and `separate` in the hierarchy of the controller in version 1. In a
    container the path may be that of the host, and only the groups above are to be seen: those count.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found = [(mount, unified), (mount / "unified", unified)]
        elif controller in controllers.split(","):
            found = [(mount / controller, separate)]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top, name in found:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth], name)
