"""Tell weights from others under the same name, by a sample of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLES = 1024
"""Numbers of every tensor that a fingerprint looks at."""


@torch.inference_mode()
def fingerprint(module: Any) -> str:
    """Return a hash of a sample of every parameter and buffer, the rotation among them, spread over all of it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda named: named[0]):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES)].double().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()
