"""Memory of rows of one kind: allocated at once, filled at the hand-off, copied, cleared, and rotated back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.slot_sizes import RowKind
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots.attention import Parts, rotate


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Hold tensors [layers, rows, ...]; those that the kind of row does not need have no entries."""

    kind: RowKind
    keys: Parts  # of the storage format, each [layers, rows, packed / group, ...]
    values: Parts
    uncompressed_keys: Tensor  # [layers, rows, front + tail, head_dim] in the model's dtype
    uncompressed_values: Tensor
    sink_keys: Tensor  # [layers, rows, sinks, head_dim] as cached, of sinks that are rotated on
    scores: Tensor  # float32 [layers, rows, capacity], of argmin
    ages: Tensor  # int32 [layers, rows, capacity]
    lowest: Tensor  # [layers, rows, segments, head_dim], element-wise bounds of each segment's keys
    highest: Tensor

    @classmethod
    def allocate(
        cls, kind: RowKind, layers: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> RowMemory:
        """Allocate rows of zeros."""

        def room(entries: int) -> Tensor:
            return torch.zeros(layers, rows, entries, head_dim, dtype=dtype, device=device)

        def number(entries: int, of: torch.dtype) -> Tensor:
            return torch.zeros(layers, rows, entries, dtype=of, device=device)

        def parts(example: Parts) -> Parts:
            lead = layers, rows, kind.packed // kind.group
            return tuple(torch.zeros(*lead, *part.shape[1:], dtype=part.dtype, device=device) for part in example)

        storage, group = STORAGES[kind.storage], torch.zeros(kind.group, head_dim, dtype=dtype, device=device)
        uncompressed, segments = kind.front + kind.tail, kind.packed // kind.segment if kind.segment else 0
        return cls(
            kind,
            parts(storage.encode_keys(group)),
            parts(storage.encode_values(group)),
            room(uncompressed),
            room(uncompressed),
            room(kind.sinks if kind.rebased and not kind.front else 0),
            number(kind.capacity if kind.decode == "argmin" else 0, torch.float32),
            number(kind.capacity if kind.aged else 0, torch.int32),
            room(segments),
            room(segments),
        )

    def tensors(self) -> list[Tensor]:
        """Return everything that is allocated."""
        uncompressed = self.uncompressed_keys, self.uncompressed_values
        return [
            *(*self.keys, *self.values, *uncompressed),
            *(self.sink_keys, self.scores, self.ages, self.lowest, self.highest),
        ]

    def map(self, change: Callable[[Tensor], Tensor]) -> RowMemory:
        """Return the memory with `change` applied to all tensors; this one stays whole if memory runs out."""
        changed = iter([change(tensor) for tensor in self.tensors()])
        keys, values = tuple(next(changed) for _ in self.keys), tuple(next(changed) for _ in self.values)
        return RowMemory(self.kind, keys, values, *changed)

    @contextmanager
    def unchanged(self, at: int, rows: Tensor) -> Iterator[None]:
        """Restore `rows` of a layer on exit: a step writes to rows outside of its batch, too."""
        held = [tensor[at, rows] for tensor in self.tensors()]
        try:
            yield
        finally:
            for tensor, before in zip(self.tensors(), held, strict=True):
                tensor[at, rows] = before

    def fill(
        self, at: slice, rows: slice, packed: int, keys: Tensor, values: Tensor, ages: Tensor, scores: Tensor | None
    ) -> None:
        """Fill rows [n] of some layers, all alike: keys and values [layers, n, kept, head_dim].

        Of these `packed` behind the front are packed. ages and scores [layers, n, kept] are positions in the prompt and
        the attention received.
        """
        kind, storage, kept = self.kind, STORAGES[self.kind.storage], keys.shape[2]
        front = min(kept, kind.front)
        body, tail = slice(front, front + packed), slice(kind.front, kind.front + kept - front - packed)
        for parts, uncompressed, given, encode in (
            (self.keys, self.uncompressed_keys, keys, storage.encode_keys),
            (self.values, self.uncompressed_values, values, storage.encode_values),
        ):
            if packed:
                for part, fresh in zip(parts, encode(given[:, :, body].flatten(0, 1)), strict=True):
                    part[at, rows, : fresh.shape[1]] = fresh.view(*given.shape[:2], *fresh.shape[1:])
            uncompressed[at, rows, :front] = given[:, :, :front]
            uncompressed[at, rows, tail] = given[:, :, front + packed :]
            uncompressed[at, rows, tail.stop :] = 0  # an idle row takes whatever a step writes
        if self.sink_keys.shape[2]:
            self.sink_keys[at, rows, : min(kind.sinks, kept)] = keys[:, :, : kind.sinks]
        about = [(self.ages, ages)] if kind.aged else []
        if kind.decode == "argmin":
            assert scores is not None
            about.append((self.scores, scores))
        for mine, given in about:
            mine[at, rows, kind.packed : kind.packed + front] = given[:, :, :front].to(mine.dtype)
            mine[at, rows, :packed] = given[:, :, body].to(mine.dtype)
            behind = slice(kind.packed + tail.start, kind.packed + tail.stop)
            mine[at, rows, behind] = given[:, :, front + packed :].to(mine.dtype)
        if kind.segment:
            segments = -(-kept // kind.segment)
            for bounds, beyond in ((self.lowest, float("inf")), (self.highest, float("-inf"))):
                whole = F.pad(keys, (0, 0, 0, segments * kind.segment - kept), value=beyond)
                whole = whole.view(*whole.shape[:2], segments, kind.segment, -1)
                bounds[at, rows, :segments] = whole.amin(dim=3) if beyond > 0 else whole.amax(dim=3)

    def rebase(self, rows: Tensor, angles: Tensor) -> None:
        """Rotate the keys of rows back by `angles` [head_dim / 2]; sinks that are rotated on stay as they were cached.

        Packed keys are packed anew, which costs them a rounding each time.
        """
        storage, dtype = STORAGES[self.kind.storage], self.uncompressed_keys.dtype
        first = self.kind.front if self.kind.rebased else 0
        for at in range(len(self.uncompressed_keys)):
            keys = storage.from_basis(storage.decode_keys(tuple(part[at, rows] for part in self.keys), torch.float32))
            for mine, part in zip(self.keys, storage.encode_keys(rotate(keys, -angles).to(dtype)), strict=True):
                mine[at, rows] = part
            uncompressed = self.uncompressed_keys[at, rows, first:].float()
            self.uncompressed_keys[at, rows, first:] = rotate(uncompressed, -angles).to(dtype)
