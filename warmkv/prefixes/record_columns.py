"""Records of the access log as columns: half a kilobyte a request, where the objects take five times as much.

Names that many requests share are numbers, and so are keys of prefixes, equal ones the same. What a request has several
of (blocks, breakpoints) lies behind that of the others, in the order in which the requests came; an order of requests
moves only where each begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.packed_keys import Packed, unpacked
from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.prefixes.usage import Usage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Smalls = NDArray[np.int32]

PIECE = 1 << 16  # requests whose parts are gathered at a time


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Hold what requests have several of: those of request i are `values[starts[i]:starts[i] + counts[i]]`."""

    starts: Ints  # [n]
    counts: Smalls  # [n]
    values: tuple[Smalls, ...]  # [m] each

    def of(self, request: int) -> tuple[Smalls, ...]:
        """Return the parts of a request."""
        start = int(self.starts[request])
        part = slice(start, start + int(self.counts[request]))
        return tuple(values[part] for values in self.values)

    def take(self, requests: NDArray[Any] | slice) -> Parts:
        return Parts(self.starts[requests], self.counts[requests], self.values)

    def flat(self) -> tuple[Smalls, ...]:
        """Return the parts of all requests, one after the other in their order."""
        ends = self.counts.cumsum(dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if all(total == len(values) for values in self.values) and (self.starts == ends - self.counts).all():
            return self.values
        found = tuple(np.empty(total, dtype=np.int32) for _ in self.values)
        for first in range(0, len(ends), PIECE):
            counts = self.counts[first : first + PIECE]
            stop = int(ends[min(first + PIECE, len(ends)) - 1])
            begin = stop - int(counts.sum())
            places = np.repeat(self.starts[first : first + PIECE] - (ends[first : first + PIECE] - counts), counts)
            places += np.arange(begin, stop)
            for out, values in zip(found, self.values, strict=True):
                out[begin:stop] = values[places]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Hold strings, of which hardly two are equal, in one."""

    text: str
    starts: Ints  # [n]
    counts: Smalls  # [n] characters

    def __getitem__(self, request: int) -> str:
        start = int(self.starts[request])
        return self.text[start : start + int(self.counts[request])]

    def take(self, requests: NDArray[Any] | slice) -> Texts:
        return Texts(self.text, self.starts[requests], self.counts[requests])


@dataclass(frozen=True, eq=False)
class RecordColumns(Sequence[RequestRecord]):
    """Hold n records, each made where it is asked for; fields are those of `RequestRecord`.

    Columns of names hold their places in `names`, parts have these: `hashes` and `generated` numbers of keys, `marks`
    positions, places of TTLs and numbers of keys, `reads` positions and numbers of keys, `written` places of TTLs and
    tokens. Key i is `keys[i]`.
    """

    names: Sequence[str]
    keys: Packed  # [keys, 2]
    odd_keys: Mapping[bytes, bytes]  # keys of another length, by those that stand for them

    arrival: Floats
    queue: Floats
    prefill: Floats
    ttft: Floats
    e2e: Floats
    bytes_per_token: Floats

    block_size: Smalls
    input_tokens: Smalls
    output_tokens: Smalls
    cached_tokens: Smalls
    max_tokens: Smalls
    resident_bytes: Ints

    tenant: Smalls
    model: Smalls
    api: Smalls
    policy: Smalls
    replica: Smalls
    group: Smalls
    status: Smalls
    stop_reason: Smalls
    error: Smalls
    session: Smalls

    id: Texts
    client_id: Texts
    trace_id: Texts

    hashes: Parts
    generated: Parts
    marks: Parts
    reads: Parts
    written: Parts
    usage_input: Smalls
    usage_read: Smalls
    usage_output: Smalls

    def __len__(self) -> int:
        return len(self.arrival)

    @overload
    def __getitem__(self, at: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, at: slice) -> RecordColumns: ...
    def __getitem__(self, at: int | slice) -> RequestRecord | RecordColumns:
        if isinstance(at, slice):
            return self.take(at)
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        return RequestRecord(
            **{name: getattr(self, name)[at].item() for name in NUMBERS},
            **{name: self.names[getattr(self, name)[at]] for name in NAMES},
            **{name: getattr(self, name)[at] for name in TEXTS},
            hashes=tuple(self.keys_of(*self.hashes.of(at))),
            generated=tuple(self.keys_of(*self.generated.of(at))),
            marks=self.marks_of(at),
            reads=self.reads_of(at),
            usage=self.usage_of(at),
        )

    def take(self, requests: NDArray[Any] | slice) -> RecordColumns:
        """Return these records, by their numbers or by a mask, in the order given."""
        shared = ("names", "keys", "odd_keys")
        columns: dict[str, Any] = {
            name: column if name in shared else column.take(requests) if isinstance(column, Parts | Texts) else
            column[requests]
            for name, column in ((one.name, getattr(self, one.name)) for one in fields(self))
        }  # fmt: skip
        return RecordColumns(**columns)

    def by_arrival(self) -> RecordColumns:
        """Return them in the order of arrival; requests that arrive together stay in their order."""
        if (self.arrival[1:] >= self.arrival[:-1]).all():
            return self
        return self.take(np.argsort(self.arrival, kind="stable"))

    def keys_of(self, numbers: NDArray[np.integer[Any]]) -> list[bytes]:
        """Return keys by their numbers."""
        found = unpacked(self.keys[numbers])
        return [self.odd_keys.get(key, key) for key in found] if self.odd_keys else found

    def usage_of(self, request: int) -> Usage:
        """Return the usage of a request."""
        ttls, tokens = self.written.of(request)
        written = {self.names[ttl]: count for ttl, count in zip(ttls.tolist(), tokens.tolist(), strict=True)}
        counts = (self.usage_input, self.usage_read, self.usage_output)
        of_input, read, output = (int(column[request]) for column in counts)
        return Usage(of_input, read, written, output)

    def marks_of(self, request: int) -> tuple[Mark, ...]:
        """Return the breakpoints of a request."""
        positions, ttls, numbers = self.marks.of(request)
        names = [self.names[ttl] for ttl in ttls.tolist()]
        return tuple(map(Mark, positions.tolist(), names, self.keys_of(numbers)))

    def reads_of(self, request: int) -> tuple[Candidate, ...]:
        """Return what a request may read, the highest position first."""
        positions, numbers = self.reads.of(request)
        return tuple(map(Candidate, positions.tolist(), self.keys_of(numbers)))

    def name(self, column: str, request: int) -> str:
        """Return a name of a request."""
        names: Smalls = getattr(self, column)
        return self.names[int(names[request])]

    def is_named(self, column: str, name: str, part: slice = slice(None)) -> NDArray[np.bool_]:
        """Return which records, or which of a part of them, have a name."""
        at = self.names.index(name) if name in self.names else -1
        found: NDArray[np.bool_] = getattr(self, column)[part] == at
        return found

    def are_named(self, column: str, names: Collection[str]) -> NDArray[np.bool_]:
        """Return which records have one of some names."""
        return np.isin(getattr(self, column), [at for at, name in enumerate(self.names) if name in names])

    def are_siblings(self, part: Ints | slice = slice(None)) -> NDArray[np.bool_]:
        """Return which records, or which of a part of them, are further answers to a prompt (`n`).

        The prompt is billed with the first one: the usage of the others has what they drew alone.
        """
        billed = [self.usage_input[part], self.usage_read[part], self.written.counts[part]]
        found: NDArray[np.bool_] = ~np.any(billed, axis=0) & (self.usage_output[part] > 0)
        return found

    def values(self, column: str) -> list[str]:
        """Return the names of a column."""
        names = self.names
        return [names[at] for at in getattr(self, column).tolist()]


NUMBERS = (
    "arrival", "queue", "prefill", "ttft", "e2e", "bytes_per_token",
    "block_size", "input_tokens", "output_tokens", "cached_tokens", "max_tokens", "resident_bytes",
)  # fmt: skip
NAMES = ("tenant", "model", "api", "policy", "replica", "group", "status", "stop_reason", "error", "session")
TEXTS = ("id", "client_id", "trace_id")
PARTS = ("hashes", "generated", "marks", "reads", "written")
USAGE = ("usage_input", "usage_read", "usage_output")
