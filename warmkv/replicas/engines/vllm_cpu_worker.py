"""What vLLM's worker process loads on a CPU (vLLM's `worker_extension_cls`): random generators with an offset.

Where a chunk of a prompt is not its last, vLLM discards the token that it drew and sets the offset of the request's
generator back. Torch has offsets on GPUs alone: on a CPU a long prompt with a seed would end the engine.
"""

from __future__ import annotations

import torch


class OffsetGenerator(torch.Generator):
    """A generator that stays where it is when its offset is set: what was drawn for a chunk remains drawn."""

    def get_offset(self) -> int:
        """Return 0."""
        return 0

    def set_offset(self, offset: int) -> OffsetGenerator:
        """Return the generator as it is."""
        return self


class CpuWorker:
    """Adds nothing to vLLM's worker itself."""


torch.Generator = OffsetGenerator  # type: ignore[misc]
