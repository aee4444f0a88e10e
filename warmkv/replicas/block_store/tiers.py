"""Hold the blocks of one tier, in memory or on disk. For the engine's thread; slow work goes to `io_threads`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from warmkv.config import BlockStorage
from warmkv.policies.tiers import Tier
from warmkv.replicas.block_store.disk import Folder
from warmkv.replicas.block_store.formats import Packed, repack


@dataclass(slots=True, eq=False)
class Move:
    """A block on its way into a tier. It is read from where it was until it has arrived."""

    packed: Packed | None  # None once the tier does not want it any more
    alone: bool = False  # whether nothing else keeps its bytes: the tier that it comes from has given it up


@dataclass(slots=True)
class TierStorage:
    """The blocks of a tier: in memory, or on disk where there is a `folder`."""

    tier: Tier
    device: torch.device
    dtype: torch.dtype
    folder: Folder | None = None
    pinned: bool = False  # page-locked memory, which a GPU copies from while it computes
    blocks: dict[bytes, Packed] = field(default_factory=dict)  # in memory
    arriving: dict[bytes, Move] = field(default_factory=dict)

    def find(self, key: bytes) -> Packed | None:
        """Return a block that can be read without a file."""
        packed = self.blocks.get(key)
        if packed is None and (move := self.arriving.get(key)) is not None:
            return move.packed
        return packed

    def storage_of(self, packed: Packed) -> BlockStorage:
        """Return the format that a block has here; what is no KV stays as it is."""
        return self.tier.storage if packed.tokens else "model"

    def takes_as_it_is(self, packed: Packed) -> bool:
        """Return True if a block can be put here without a copy."""
        alike = packed.storage == self.storage_of(packed)
        return self.folder is None and alike and packed.parts[0].device == self.device

    @torch.inference_mode()
    def converted(self, packed: Packed, computed: torch.cuda.Event | None = None) -> Packed:
        """Convert a block to this tier's format. From a GPU it is copied on a side stream and waited for.

        The copy begins after `computed`, or else when all that has been launched by now is done.
        """
        source = packed.parts[0].device
        if source.type != "cuda" or self.device.type == "cuda":
            return repack(packed, self.tier.storage, self.dtype).map(lambda part: part.to(self.device))
        beside = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
        if computed is not None:
            beside.wait_event(computed)
        else:
            beside.wait_stream(torch.cuda.default_stream(source))
        with torch.cuda.stream(beside):
            kept = repack(packed, self.tier.storage, self.dtype).map(self._to_host)
        beside.synchronize()
        return kept

    def _to_host(self, part: Tensor) -> Tensor:
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=self.pinned)
        return host.copy_(part, non_blocking=True)


def computed_event(packed: Packed) -> torch.cuda.Event | None:
    """Record an event after what has been launched so far, with which a block on a GPU is there; of others None."""
    source = packed.parts[0].device
    if source.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.default_stream(source))
    return event
