"""KeyDiff (Park et al., 2025, arXiv 2504.15364): keys unlike the others attract attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.prefill_state import PrefillState


class KeyDiff(Policy):
    """Keep the keys that point farthest from the mean direction of all keys, per KV head. Looks at no query."""

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        directions = F.normalize(prompt.keys[layer].float(), dim=-1)
        anchor = directions.mean(dim=1, keepdim=True)
        return -F.cosine_similarity(directions, anchor, dim=-1)
