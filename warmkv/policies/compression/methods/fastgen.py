"""FastGen (Ge et al., 2023, arXiv 2310.01801): each head keeps what its own attention needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import Knob
from warmkv.policies.budgets import share
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState

HEAVY = RECENT = 0.3


@register
class FastGen(Method):
    """Per KV head, the first of [special, +punctuation, +heavy, +window, everything] that recovers enough attention.

    Recovery is measured on the prompt itself, as the mean share of their attention that all queries find in the set
    (section 3.3). The last token is always kept.
    """

    name = "fastgen"
    knobs = (Knob("recovery", float, 0.95, "attention mass a head must keep", gt=0, le=1),)
    keeps = "smallest set that recovers a share of attention"
    differs = "sizes by head"
    source = "2310.01801, sections 3 and 5; no code was published"
    deviates = "recovery is by column sums, so the window stands at the prompt's end; new tokens are appended"
    decode_rules = ("append",)
    has_budget = has_scores = False
    follows_content = reads_classes = True

    def selects_all_lengths(self, prompt_tokens: int) -> bool:
        return True

    def needs_column_sums(self, compressed: bool) -> bool:
        return True

    def select_layers(self, prompt: PrefillState, layers: range, budget: int) -> list[Tensor]:
        return [self._select(prompt, layer) for layer in layers]

    def _select(self, prompt: PrefillState, layer: int) -> Tensor:
        import torch

        from warmkv.policies.compression.scoring import best, padded_positions

        assert prompt.column_sums is not None
        sums = prompt.column_sums[layer]
        heads, tokens = sums.shape
        kept = prompt.members("special").expand(heads, -1).clone()
        done = self._recovers(sums, kept)
        part = share(HEAVY, tokens)
        heavy = torch.zeros_like(kept).scatter(1, best(sums, part), True)
        recent = torch.arange(tokens, device=sums.device) >= tokens - share(RECENT, tokens)
        for more in (prompt.members("punctuation"), heavy, recent, torch.ones_like(kept)):
            kept = torch.where(done[:, None], kept, kept | more)
            done |= self._recovers(sums, kept)
        kept[:, -1] = True
        return padded_positions(kept)

    def _recovers(self, sums: Tensor, kept: Tensor) -> Tensor:
        recovery: float = self.spec.recovery
        return (sums * kept).sum(dim=1) >= recovery * sums.sum(dim=1)
