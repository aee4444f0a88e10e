"""Attention metadata of a decode step in one slab, shared by its layers, and the step's progress in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from warmkv.replicas.slots.rows import Ints

T = TypeVar("T", Ints, Tensor)


class RowMetadata(NamedTuple, Generic[T]):
    """Hold attention metadata of rows in one decode step (cf. vLLM), each int64 [n], on the host or the device."""

    entries: T  # where each row's new token goes (of front and tail, where there are any)
    lengths: T  # entries in use, the new token included
    before: T  # entries in use before it
    packed: T  # packed entries in use, from the first on; of rows without a tail all are
    ages: T  # position of the new token in its sequence
    oldest: T  # age above which entries are recent
    early: T  # age below which entries are protected
    rerotated: T  # positions by which sinks are rotated on
    read_limit: T  # entries that may be read, where segments are chosen
    channels: T  # channels by which they are chosen
    source: T  # (sequence, KV head) of the row, counted through; 0 if idle
    target: T  # the same, with idle rows sent to a place of their own


@dataclass(slots=True)
class Progress:
    """Record what a step has done in one layer of a slab, which a retry skips."""

    entries: Tensor | None = None  # [n] where the new tokens go
    attended: bool = False  # bounds of segments and scores have the new tokens


@dataclass(frozen=True)
class AttentionMetadata:
    """Hold attention metadata of n rows of a slab in one decode step, shared by its layers."""

    numbers: RowMetadata[Tensor]
    rows: Tensor  # [n] 0..n-1
    full: Tensor | None  # [n] bool: argmin rows that give up an entry for the new one; None if no row does
    reach: int  # packed entries up to the last that any row uses
    masked: bool  # whether rows do not see all of these, and what waits
    dtype: torch.dtype
    uncompressed_tail: Tensor | None  # bool [n, front + tail] what is seen of them
    angles: Tensor | None  # [n, head_dim / 2] by how much sinks are rotated on
    most_read: int
    alone: Sequence[tuple[int, int, int]] | None = None
    """Rows in the batch that are attended one by one, each with its reach and read limit; None: all at once."""
    progress: dict[int, Progress] = field(default_factory=dict)  # by layer

    @property
    def used(self) -> int:
        return len(self.rows)

    @cached_property
    def bias(self) -> Tensor | None:
        """Return [n, reach + front + tail] 0 where an entry is seen, -inf elsewhere; None if all are.

        Computed on first use: where a kernel for CPUs attends the rows it is never needed.
        """
        if not self.masked:
            return None
        packed = self.numbers.packed[:, None]
        seen = torch.arange(self.reach, device=packed.device) < packed
        if self.uncompressed_tail is not None:
            seen = torch.cat([seen, self.uncompressed_tail], dim=1)
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def take(self, failed: AttentionMetadata) -> None:
        """Take over the progress of a failed step that had at least these rows."""
        for layer, done in failed.progress.items():
            entries = None if done.entries is None else done.entries[: self.used]
            self.progress[layer] = Progress(entries, done.attended)
