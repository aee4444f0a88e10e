"""L2-norm compression (Devoto et al., 2024, arXiv 2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class KNorm(Method):
    """Keep the keys with the smallest norm, per KV head. Looks at no query."""

    name = "knorm"
    keeps = "keys of smallest norm"
    source = "2406.11430; alessiodevoto/l2compress"
    deviates = "no layers are skipped, short prompts are compressed, too"

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch

        norm: Tensor = torch.linalg.vector_norm(prompt.keys[layer].float(), dim=-1)
        return -norm
