"""Where Triton kernels run. Importing this does not import Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

_HAS_TRITON = find_spec("triton") is not None


def is_available(device: torch.device) -> bool:
    """Return True if kernels run on tensors of a device: on CUDA, and with TRITON_INTERPRET=1, slowly, on the CPU.

    Triton decides when it is first imported whether it interprets, so the variable must be set by then.
    """
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and _HAS_TRITON
