"""Make a device the current one of a thread: Triton, events and CUDA graphs go by that, not by where tensors lie."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Make a CUDA device with an index the calling thread's current one, which is the first GPU otherwise."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
