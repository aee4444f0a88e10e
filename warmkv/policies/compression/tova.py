"""TOVA (Oren et al., 2024, arXiv 2401.06104): the token that the newest query attends to least leaves."""

from __future__ import annotations

from torch import Tensor

from warmkv.policies.compression.base import Policy, received_attention
from warmkv.policies.compression.prefill_state import PrefillState


class TOVA(Policy):
    """Keep the tokens that the last query attends to most, on average over all heads: the same ones in every KV head.

    While decoding, a new token takes the place of the one that the last query attended to least (section 3). No
    token is safe, the newest included, as in the authors' code. With `per_head` each KV head goes by its own attention.
    """

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        return received_attention(self.spec, prompt, layer)
