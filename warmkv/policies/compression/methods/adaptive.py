"""A budget for each prompt: as many tokens as its own attention needs.

How much a prompt needs is an open problem of the literature; this takes the observation window as witness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import VOTES, Knob
from warmkv.policies import budgets
from warmkv.policies.compression.method import register
from warmkv.policies.compression.methods.snapkv import SnapKV

if TYPE_CHECKING:
    from warmkv.policies.compression.prefill_state import PrefillState


@register
class Adaptive(SnapKV):
    """SnapKV under the smallest budget at which the window's queries keep `target` of their attention.

    The mean over layers and KV heads decides. `budget` is the most that is kept, `least` the smallest share.
    """

    name = "adaptive"
    knobs = (
        *VOTES,
        Knob("target", float, 0.9, "attention mass to keep", gt=0, le=1),
        Knob("least", float, 0.05, "smallest share of the prompt kept", ge=0, le=1),
    )
    keeps = "as snapkv"
    differs = "budget by prompt"
    source = "warmkv's own"
    deviates = "nothing"
    follows_content = True
    by_default_in_eval = False

    def selects_all_lengths(self, prompt_tokens: int) -> bool:
        return prompt_tokens > int(self.spec.window)

    def content_budgets(self, prompt: PrefillState) -> list[int]:
        import torch

        from warmkv.policies.compression.scoring import window_votes

        most = budgets.kept_tokens(self.spec, prompt.tokens)
        window = min(self.spec.window, most)
        if window == most:
            return [most] * prompt.layers
        covered = torch.zeros(prompt.tokens - window, dtype=torch.float64, device=prompt.keys.device)
        own = 0.0
        for layer in range(prompt.layers):
            votes = window_votes(prompt, layer, window).double()
            total = self._queries(prompt) * window
            covered += votes.sort(dim=-1, descending=True).values.cumsum(dim=-1).sum(dim=0) / total
            own += float((total - votes.sum(dim=-1)).sum()) / total
        rows = prompt.layers * prompt.kv_heads
        enough = int(((covered + own) / rows < self.spec.target).sum()) + 1 if own / rows < self.spec.target else 0
        sinks = (self.spec.sinks or 0) if self.spec.decode == "ring" else 0
        least = min(most, max(window + 1, sinks + 1, budgets.share(self.spec.least, prompt.tokens)))
        return [min(most, max(least, enough + window))] * prompt.layers

    @staticmethod
    def _queries(prompt: PrefillState) -> int:
        """Return the query heads of a KV head."""
        assert prompt.queries is not None
        return prompt.queries.shape[1] // prompt.kv_heads
