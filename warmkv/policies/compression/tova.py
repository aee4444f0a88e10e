"""TOVA (Oren et al., 2024, arXiv 2401.06104): what the newest query attends to least goes."""

from __future__ import annotations

from torch import Tensor

from warmkv.policies.compression.base import Policy, received_attention
from warmkv.policies.compression.prompt import Prompt


class TOVA(Policy):
    """Keep the last token and those that the last query attends to most, per KV head.

    While decoding, a new token takes the place of the one that the last query attended to least (section 3).
    """

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, 1

    def score(self, prompt: Prompt, layer: int, budget: int) -> Tensor:
        return received_attention(self.spec, prompt, layer)
