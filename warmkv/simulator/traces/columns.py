"""The one form of all traces: a column a quantity, and the block hashes of all prompts as one flat array."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warmkv.faults import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Smalls = NDArray[np.int32]

UNKNOWN = -1  # session or tenant that the trace does not tell
LARGEST = 2**31 - 1  # tokens of a request, as the columns hold them


class TraceError(UserError):
    """A trace that cannot be read; the message names file and line."""


class RowError(ValueError):
    """A row that is no request; the message says why, the caller adds file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request as a reader finds it."""

    arrival: float  # seconds
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()  # one number a block of the prompt, equal where all of the prompt up to there is equal
    block_size: int = 0  # tokens; 0 if the trace has no blocks
    session: str | None = None
    tenant: str | None = None
    think: float = 0.0  # seconds from the answer before it in its session


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests. 28 bytes each and 8 a block: a million requests of 24 blocks take about 240 MB."""

    format: str
    block_size: int  # tokens in a block; 0 if the trace has no blocks
    arrival: Floats  # [n] seconds on the trace's own clock, ascending
    input_tokens: Smalls  # [n]
    output_tokens: Smalls  # [n]
    session: Smalls  # [n] number of the session, UNKNOWN where the trace does not tell
    tenant: Smalls  # [n] likewise
    think: NDArray[np.float32]  # [n] seconds from the answer before it in its session; 0 if unknown
    blocks: Ints  # [m] of all prompts, one after the other
    offsets: Ints  # [n + 1] the blocks of request i are blocks[offsets[i]:offsets[i + 1]]
    broken: int = 0  # rows that are no requests
    skipped: int = 0  # requests that failed, were cancelled, or ran inside another
    faults: tuple[str, ...] = ()  # FILE:LINE: reason, of the first broken rows
    unrecognised: tuple[str, ...] = ()  # files of a folder that are of no known format
    notes: tuple[str, ...] = ()  # what a reader assumed

    def __len__(self) -> int:
        return len(self.arrival)

    def chain(self, request: int) -> Ints:
        """Return the blocks of a prompt."""
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def block_tokens(self) -> Ints:
        """Return the [m] tokens of each block: the block size, but for a prompt's last block where that is partial."""
        sizes = np.full(len(self.blocks), self.block_size, dtype=np.int64)
        counts = np.diff(self.offsets)
        some = counts > 0
        rest = self.input_tokens[some] - (counts[some] - 1) * self.block_size
        sizes[self.offsets[1:][some] - 1] = np.minimum(rest, self.block_size)
        return sizes

    def take(self, requests: NDArray[np.integer]) -> Trace:
        """Return the trace of these requests, in the order given."""
        counts = np.diff(self.offsets)[requests]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - self.offsets[:-1][requests], counts)
        columns: dict[str, Any] = {name: getattr(self, name)[requests] for name in COLUMNS}
        return replace(self, **columns, blocks=self.blocks[places], offsets=offsets)

    def by_arrival(self) -> Trace:
        """Return it in the order of arrival; requests that arrive together stay in the order of the file."""
        if (np.diff(self.arrival) >= 0).all():
            return self
        return self.take(np.argsort(self.arrival, kind="stable"))


COLUMNS = ("arrival", "input_tokens", "output_tokens", "session", "tenant", "think")


class Builder:
    """Rows in, a Trace out. Names of sessions and tenants become numbers that stay the same from trace to trace."""

    def __init__(self, format: str) -> None:
        self.format = format
        self._block_size = 0
        self._numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._clear()

    def _clear(self) -> None:
        self._arrival, self._think = array("d"), array("d")
        self._input, self._output, self._session, self._tenant = array("i"), array("i"), array("i"), array("i")
        self._blocks, self._offsets = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self._arrival)

    def add(self, row: Row) -> None:
        """Add a row. Raises RowError for an impossible one, and leaves the columns as they were."""
        tokens, size = row.input_tokens, row.block_size
        if not math.isfinite(row.arrival) or not 0 <= row.think < LARGEST:
            raise RowError(f"times must be finite: arrival {row.arrival}, think time {row.think}")
        for what, least, count in (("input", 1, tokens), ("output", 0, row.output_tokens)):
            if not least <= count <= LARGEST:
                raise RowError(f"{what} tokens must be from {least} to {LARGEST:,}, not {count}")
        if size:
            if len(row.blocks) not in (tokens // size, -(-tokens // size)):
                raise RowError(
                    f"{tokens} tokens have {tokens // size} full blocks of {size}, but {len(row.blocks)} hashes are "
                    "given (is it another block size?)"
                )
            if self._block_size not in (0, size):
                raise RowError(f"blocks of {size} tokens in a trace of blocks of {self._block_size}")
            self._block_size = size
        try:
            self._blocks.extend(row.blocks)
        except (OverflowError, TypeError):
            del self._blocks[self._offsets[-1] :]
            raise RowError("block hashes must be integers of at most 64 bits") from None
        self._offsets.append(len(self._blocks))
        self._arrival.append(row.arrival)
        self._think.append(row.think)
        self._input.append(tokens)
        self._output.append(row.output_tokens)
        sessions, tenants = self._numbers
        self._session.append(UNKNOWN if row.session is None else sessions.setdefault(row.session, len(sessions)))
        self._tenant.append(UNKNOWN if row.tenant is None else tenants.setdefault(row.tenant, len(tenants)))

    def build(self, **account: Any) -> Trace:
        """Build the trace of the rows added since the last call."""
        trace = Trace(
            self.format,
            self._block_size,
            np.array(self._arrival),
            np.array(self._input, dtype=np.int32),
            np.array(self._output, dtype=np.int32),
            np.array(self._session, dtype=np.int32),
            np.array(self._tenant, dtype=np.int32),
            np.array(self._think, dtype=np.float32),
            np.array(self._blocks, dtype=np.int64),
            np.array(self._offsets, dtype=np.int64),
            **account,
        )
        self._clear()
        return trace


def join(parts: Iterable[Trace]) -> Trace:
    """Join parts to one trace in order; at least one. Accounts add up."""
    parts = list(parts)
    last = parts[-1]
    if len(parts) == 1:
        return last
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in (*COLUMNS, "blocks")
    }
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return replace(
        last,
        **columns,
        offsets=offsets,
        broken=sum(part.broken for part in parts),
        skipped=sum(part.skipped for part in parts),
        faults=tuple(fault for part in parts for fault in part.faults),
    )
