"""A run's folder: parts as they are finished, so that a run can be continued, and the tables they are merged into."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from warmkv.evaluation.plan import EvalError

FORMAT = 1
Row = dict[str, Any]

SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("variant", pa.string()),  # plain or chat
        ("length", pa.int32()),  # tokens asked for
        ("depth", pa.float64()),  # of the fact, 0 to 1; null where there is no such one
        ("sample", pa.int32()),
        ("policy", pa.string()),
        ("share", pa.float64()),  # of the full cache's bytes that was allowed; null: whatever the policy takes
        ("budget", pa.int32()),  # tokens that gave; null where the policy has no budget
        ("score", pa.float64()),  # what the task counts: right, or accuracy
        ("right", pa.bool_()),  # every token of the answer was the most likely one
        ("accuracy", pa.float64()),  # share of the answer's tokens that were
        ("nll", pa.float64()),  # nats per token of the answer
        ("bytes", pa.int64()),  # in use at most until the answer ended, size classes not counted
        ("handoff_bytes", pa.int64()),  # in use after the hand-off
        ("slot_bytes", pa.int64()),  # what the slot really took, size classes counted
        ("full_bytes", pa.int64()),  # of the uncompressed cache of this prompt and answer
        ("prompt_tokens", pa.int32()),
        ("kept_tokens", pa.float64()),  # per KV head and layer, after the hand-off
        ("seed", pa.int64()),
    ]
)
"""One row for every sample and policy at a share; no row where a policy cannot be that small."""

STREAM_SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("start", pa.int32()),  # tokens of the stream before the segment
        ("tokens", pa.int32()),  # scored in the segment
        ("nll", pa.float64()),  # nats per token
        ("perplexity", pa.float64()),
        ("cache_tokens", pa.int32()),  # whose full cache's bytes every policy is allowed
        ("bytes", pa.int64()),
        ("seed", pa.int64()),
    ]
)
STREAM = "stream"
RECOMPUTED = "recomputed window"
"""The gold standard of the stream, beside the policies."""


class RunFolder:
    """Where a run is written: `meta.json`, `parts/`, and in the end `results.parquet`, `stream.parquet` and more."""

    def __init__(self, path: Path, meta: Row) -> None:
        """Make the folder, or continue in it. Raises EvalError if it holds another run, OSError as the disk does."""
        self.path, self._parts = path, path / "parts"
        known = path / "meta.json"
        meta = json.loads(json.dumps({"format": FORMAT, **meta}))
        if known.exists():
            if changed := differences(json.loads(known.read_text(encoding="utf-8")), meta):
                raise EvalError(
                    f"{path} holds a run with other settings ({'; '.join(changed)}); "
                    "give the same again to continue it, or choose another --out"
                )
        elif path.exists() and any(path.iterdir()):
            raise EvalError(f"{path} is not empty and holds no evaluation; choose another --out")
        self._parts.mkdir(parents=True, exist_ok=True)
        self.meta = meta
        if not known.exists():
            self.write("meta.json", json.dumps(meta, indent=2) + "\n")

    def has(self, part: str) -> bool:
        return self._part(part).exists()

    def store(self, part: str, rows: Sequence[Row]) -> None:
        """Keep a finished part; it is there whole or not at all."""
        schema = STREAM_SCHEMA if part == STREAM else SCHEMA
        _write(self._part(part), pa.Table.from_pylist(list(rows), schema=schema))

    def merge(self, parts: Iterable[str]) -> None:
        """Write `results.parquet` from the parts in this order, and `stream.parquet` if there is one."""
        tables = [pq.read_table(self._part(part)) for part in parts]
        _write(self.path / "results.parquet", pa.concat_tables(tables) if tables else SCHEMA.empty_table())
        if self.has(STREAM):
            _write(self.path / "stream.parquet", pq.read_table(self._part(STREAM)))

    def rows(self) -> list[Row]:
        """Return all rows of the merged results."""
        rows: list[Row] = pq.read_table(self.path / "results.parquet").to_pylist()
        return rows

    def stream(self) -> list[Row]:
        """Return all rows of the stream; none if the run has no stream."""
        file = self.path / "stream.parquet"
        rows: list[Row] = pq.read_table(file).to_pylist() if file.exists() else []
        return rows

    def write(self, name: str, text: str) -> None:
        """Write a file; it is there whole or not at all."""
        scratch = self.path / f".{name}.new"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.path / name)

    def _part(self, name: str) -> Path:
        return self._parts / f"{name}.parquet"


def differences(old: Row, new: Row, lead: str = "") -> list[str]:
    """List the differences of two trees as `key: old there, new here`."""
    out: list[str] = []
    for key in [*old, *(key for key in new if key not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{lead}{key}.")
        elif a != b:
            out.append(f"{lead}{key}: {_short(a)} there, {_short(b)} here")
    return out


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _write(path: Path, table: pa.Table) -> None:
    scratch = path.with_name(f".{path.name}.new")
    pq.write_table(table, scratch)
    os.replace(scratch, path)
