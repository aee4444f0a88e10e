"""L2-norm compression (Devoto et al., 2024, arXiv 2406.11430): keys of small norm attract attention."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.prefill_state import PrefillState


class KNorm(Policy):
    """Keep the keys with the smallest norm, per KV head. Looks at no query."""

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(prompt.keys[layer].float(), dim=-1)
        return -norm
