"""Bookkeeping of rows, on the host: how full each is and where its next token goes.

A row is one KV head's cache of one sequence. The numbers of all rows of a replica stand side by side, so a decode step
advances them all at once, however many slabs they are spread over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

import numpy as np
import numpy.typing as npt

from warmkv.policies.slot_sizes import RowKind
from warmkv.policy_spec import DecodeRule

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FREE = -1
"""Owner of a free row."""
EVICTED_LAST = 1e30
"""Added to the scores of recent and protected entries."""
ADVANCED = ("count", "packed", "cursor", "tail_start", "waiting")
"""Columns of `RowTable` that a decode step changes."""
APPEND, RING, ARGMIN = (get_args(DecodeRule).index(rule) for rule in ("append", "ring", "argmin"))


@dataclass(slots=True)
class RowTable:
    """Keep the books of rows, each column int64 [rows]."""

    owner: Ints  # id of the slot that the row belongs to, or FREE
    head: Ints  # its KV head
    count: Ints  # entries ever put in
    limit: Ints  # entries that may be in use
    recent: Ints  # newest entries that argmin never gives up
    protected: Ints  # first entries of the sequence that are never given up, beside the sinks of a ring
    read_limit: Ints  # entries that may be read, where segments are chosen
    channels: Ints  # channels by which they are chosen
    packed_limit: Ints  # grouped: packed entries that may be in use
    packed: Ints  # packed entries in use
    cursor: Ints  # packed entry of a ring that is overwritten next
    tail_limit: Ints  # entries that may wait
    tail_start: Ints  # the oldest of them
    waiting: Ints  # how many do
    # Of the kind of row:
    decode: Ints  # APPEND, RING, ARGMIN
    grouped: Ints  # whether new entries wait in a tail
    front: Ints  # entries before the tail
    sinks: Ints  # entries that a ring never overwrites

    @classmethod
    def of_kind(cls, kind: RowKind, rows: int) -> RowTable:
        """Return rows of a kind that are all free."""
        state = cls.over(np.zeros((len(fields(cls)), rows), dtype=np.int64))
        state.owner[:] = FREE
        state.become(slice(None), kind)
        return state

    def become(self, rows: slice | Sequence[int], kind: RowKind) -> None:
        """Set the kind of rows."""
        self.decode[rows] = get_args(DecodeRule).index(kind.decode)
        self.grouped[rows], self.front[rows], self.sinks[rows] = kind.grouped, kind.front, kind.sinks

    @classmethod
    def over(cls, matrix: Ints) -> RowTable:
        """Make a table of views of a matrix [fields, rows]."""
        return cls(*matrix)

    @classmethod
    def join(cls, states: Sequence[RowTable]) -> tuple[RowTable, list[RowTable]]:
        """Concatenate tables; return the whole, and each of them as views of it."""
        if not states:
            return cls.over(np.zeros((len(fields(cls)), 0), dtype=np.int64)), []
        matrix = np.concatenate([state._matrix() for state in states], axis=1)
        ends = np.cumsum([len(state) for state in states])
        parts = [cls.over(matrix[:, end - len(state) : end]) for state, end in zip(states, ends, strict=True)]
        return cls.over(matrix), parts

    def _matrix(self) -> Ints:
        return np.stack([getattr(self, field.name) for field in fields(self)])

    def __len__(self) -> int:
        return len(self.owner)

    def advanced(self) -> list[Ints]:
        """Copy the columns that a step changes, for `restore`."""
        return [getattr(self, name).copy() for name in ADVANCED]

    def restore(self, before: Sequence[Ints]) -> None:
        """Restore the columns that `advanced` copied."""
        for name, column in zip(ADVANCED, before, strict=True):
            getattr(self, name)[:] = column

    def first(self, rows: int) -> RowTable:
        """Return the first rows, as views."""
        return RowTable(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def chosen(self, rows: Sequence[int]) -> RowTable:
        """Return a copy of some rows."""
        return RowTable.over(self._matrix()[:, list(rows)])

    def free(self, rows: Sequence[int]) -> None:
        """Reset rows and mark them free."""
        for field in fields(self)[:-4]:
            getattr(self, field.name)[rows] = 0
        self.owner[rows] = FREE

    def take(self, rows: Sequence[int], other: RowTable, which: Sequence[int]) -> None:
        """Copy `which` rows of another table into these rows, which keep their owner."""
        for field in fields(self)[1:]:
            getattr(self, field.name)[list(rows)] = getattr(other, field.name)[list(which)]

    def start(
        self,
        row: int,
        kind: RowKind,
        *,
        kept: int,
        limit: int,
        packed_limit: int,
        recent: int,
        protected: int,
        read_limit: tuple[int, int] = (0, 0),
    ) -> None:
        """Initialise a row with `kept` entries that will use at most `limit`.

        Of a grouped row, `packed_limit` entries may be packed. argmin never evicts the `recent` newest entries, and no
        rule evicts the `protected` first ones. `read_limit` is for the columns of that name and `channels`.
        """
        if kind.decode == "ring" and limit <= kind.sinks:
            raise ValueError(f"a ring of {limit} entries leaves no room behind {kind.sinks} sinks")
        self.count[row], self.limit[row], self.recent[row], self.protected[row] = kept, limit, recent, protected
        self.read_limit[row], self.channels[row] = read_limit
        if kind.grouped:
            front = min(kept, kind.front)
            self.packed_limit[row] = packed_limit
            # What whole groups cannot use of an evicting row's limit, the tail does.
            self.tail_limit[row] = kind.tail if kind.decode == "append" else limit - kind.front - packed_limit
            more = max(0, kept - front - int(self.tail_limit[row]))
            self.packed[row] = -(-more // kind.group) * kind.group
            self.waiting[row] = kept - front - self.packed[row]
            self.cursor[row] = self.first_group(row, kind.group)

    def first_group(self, rows: int | Ints, group: int) -> Ints:
        """Return the first packed entry that a grouped ring overwrites: groups before it hold the protected ones."""
        protected = -(-np.maximum(self.protected[rows] - self.front[rows], 0) // group) * group
        first: Ints = np.minimum(protected, np.maximum(self.packed_limit[rows] - group, 0))
        return first


@dataclass(frozen=True, slots=True)
class Advance:
    """Columns of rows in a step, each [rows]; an idle row, never read, has one entry in use and writes to it."""

    entries: Ints  # where the new token goes (of front and tail, where there are any)
    before: Ints  # entries in use before it
    lengths: Ints  # entries in use with it
    full: Bools  # rows that are at their limit


def advance(state: RowTable, active: Bools) -> Advance:
    """Append a token to every active row. Full tails must have been packed before."""
    grouped, front = state.grouped > 0, state.count < state.front
    full = active & (state.count >= state.limit)
    if (full & (state.decode == APPEND)).any():
        raise RuntimeError("a slot is full and its policy does not overwrite")
    first = np.maximum(state.sinks, state.protected)
    around = first + (state.count - state.limit) % np.maximum(state.limit - first, 1)
    in_tail = state.front + (state.tail_start + state.waiting) % np.maximum(state.tail_limit, 1)
    entries = np.where(full, np.where(state.decode == RING, around, 0), state.count)
    entries = np.where(grouped & ~front, in_tail, np.where(grouped, state.count, entries))
    before = np.minimum(state.count, state.limit)
    state.waiting += active & grouped & ~front
    state.count += active
    in_front = np.minimum(state.count, state.front)
    lengths = np.where(grouped, state.packed + in_front + state.waiting, np.minimum(state.count, state.limit))
    return Advance(np.where(active, entries, 0), before, np.where(active, lengths, 1), full)


@dataclass(frozen=True, slots=True)
class PendingPack:
    """List rows whose tail is full, and the group of it to be packed."""

    rows: Ints  # [m]
    waiting: Ints  # [m, group] their places in the tail
    groups: Ints | None  # [m] where they go; None: over the entries with the lowest scores
    packed: Ints  # [m] packed entries in use, with this group where it adds to them

    def of(self, active: Bools) -> PendingPack:
        """Keep active rows only."""
        kept = active[self.rows]
        groups = None if self.groups is None else self.groups[kept]
        return PendingPack(self.rows[kept], self.waiting[kept], groups, self.packed[kept])


def take_pending_packs(state: RowTable, active: Bools, group: int) -> list[PendingPack]:
    """Make room for `group` entries in the tails that are full."""
    due = np.flatnonzero(active & (state.grouped > 0) & (state.waiting >= state.tail_limit))
    if not len(due):
        return []
    waiting = (state.tail_start[due, None] + np.arange(group)) % state.tail_limit[due, None]
    state.tail_start[due] = (state.tail_start[due] + group) % state.tail_limit[due]
    state.waiting[due] -= group
    room = state.packed[due] < state.packed_limit[due]
    groups = np.where(room, state.packed[due], state.cursor[due]) // group
    state.packed[due[room]] += group
    turned = due[~room]
    cursor = state.cursor[turned] + group
    state.cursor[turned] = np.where(cursor < state.packed_limit[turned], cursor, state.first_group(turned, group))
    placed = room | (state.decode[due] != ARGMIN)
    return [
        PendingPack(due[these], waiting[these], groups[these] if these is placed else None, state.packed[due[these]])
        for these in (placed, ~placed)
        if these.any()
    ]


def seen_uncompressed(state: RowTable, active: Bools, kind: RowKind) -> Bools:
    """Return the entries of front and tail in use, bool [rows, front + tail]; an idle row has one."""
    tail = np.arange(kind.tail)
    in_front = np.where(active, np.minimum(state.count, kind.front), 0)
    since = (tail - state.tail_start[:, None]) % np.maximum(state.tail_limit[:, None], 1)
    waits = (tail < state.tail_limit[:, None]) & (since < state.waiting[:, None])
    return np.concatenate([np.arange(kind.front) < in_front[:, None], waits | ~active[:, None]], axis=1)
