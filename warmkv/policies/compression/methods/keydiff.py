"""KeyDiff (Park et al., 2025, arXiv 2504.15364): keys unlike the others attract attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class KeyDiff(Method):
    """Keep the keys that point farthest from the mean direction of all keys, per KV head. Looks at no query."""

    name = "keydiff"
    keeps = "keys least like the mean direction"
    source = "2504.15364; NVIDIA/kvpress (not by its authors)"
    deviates = "once on the whole prompt, not block by block"

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch.nn.functional as F

        directions = F.normalize(prompt.keys[layer].float(), dim=-1)
        anchor = directions.mean(dim=1, keepdim=True)
        return -F.cosine_similarity(directions, anchor, dim=-1)
