"""TOVA (Oren et al., 2024, arXiv 2401.06104): the token that the newest query attends to least leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import Knob
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class TOVA(Method):
    """Keep the tokens that the last query attends to most, on average over all heads: the same ones in every KV head.

    While decoding, a new token takes the place of the one that the last query attended to least (section 3). No
    token is safe, the newest included, as in the authors' code. With `per_head` each KV head goes by its own attention.
    """

    name = "tova"
    knobs = (Knob("per_head", bool, False, "each KV head keeps tokens of its own, by its own scores"),)
    keeps = "most attended by the last query, on average over all heads"
    decoding = "argmin, last step's scores"
    differs = "nothing, or tokens by head"
    source = "2401.06104; schwartz-lab-NLP/TOVA"
    deviates = "the token that is being decoded counts towards the budget"
    decode = "argmin"
    rule_knobs_refused = ("heavy",)
    by_last_step = True

    def observed_queries(self, prompt_tokens: int, compressed: bool) -> int:
        return 1

    def keeps_alike(self) -> bool:
        return not self.spec.per_head

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        sums = prompt.window_sums(layer, 1)
        return sums.sum(dim=0, keepdim=True).expand_as(sums) if self.keeps_alike() else sums
