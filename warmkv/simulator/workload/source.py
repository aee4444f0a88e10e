"""A trace as replays, and every worker of a sweep, read it: any format, by the same rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmkv.config import Config
from warmkv.gc_pause import gc_paused
from warmkv.simulator import traces
from warmkv.simulator.traces.files import files_of
from warmkv.simulator.traces.reader import Rows, columns
from warmkv.simulator.workload import access_log
from warmkv.simulator.workload.requests import Requests, of_trace


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder of files, and how it is read; the options are those of `warmkv replay`."""

    path: Path
    format: str | None = None
    block_size: int | None = None
    characters_per_token: float | None = None
    scope: str = "global"
    open_loop: bool = False
    strict: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the options that decide how the file is read."""
        return {key: value for key, value in asdict(self).items() if key != "path"}


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """The requests of a file, and an account of what was left out."""

    source: Source
    format: str
    sha256: str
    requests: Requests
    broken: int = 0
    skipped: int = 0
    faults: tuple[str, ...] = ()
    unrecognised: tuple[str, ...] = ()  # files of a folder that are of no known format
    notes: tuple[str, ...] = ()


def read(source: Source, base: Config, progress: Callable[[int], None] = lambda rows: None) -> LoadedTrace:
    """Read the requests of a trace; those that name no policy or model take the base configuration's.

    Raises TraceError.
    """
    reading = traces.Reading(source.block_size, source.characters_per_token, source.scope)
    with gc_paused():
        rows = Rows(source.path, source.format, reading=reading, strict=source.strict)
        more: tuple[str, ...] = ()
        if rows.format.records:
            requests = Requests(access_log.records(rows))
        else:
            trace = columns(rows, progress)
            requests = of_trace(trace, base, scope=source.scope, open_loop=source.open_loop)
            if not trace.block_size:
                more = ("the trace has no blocks, so no prefix will be found",)
    return LoadedTrace(
        source=source,
        format=rows.format_name,
        sha256=rows.sha256,
        requests=requests,
        broken=rows.broken,
        skipped=rows.skipped,
        faults=tuple(rows.faults),
        unrecognised=tuple(rows.unrecognised),
        notes=(*rows.notes, *more),
    )


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file, or of the files of a folder one behind the other."""
    digest = hashlib.sha256()
    for part in files_of(path):
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
