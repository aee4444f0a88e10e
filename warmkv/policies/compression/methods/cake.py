"""CAKE (Qin et al., 2025, arXiv 2503.12491): layers whose attention is spread and shifting keep more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import VOTES, Knob
from warmkv.policies import budgets
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class Cake(Method):
    """Layers share the budget in proportion to entropy^(1/tau1) * variance^(1/tau2) of their attention (section 4.1).

    A token's score is its mean attention plus `gamma` times its variance over the window (section 4.3).
    """

    name = "cake"
    knobs = (
        *VOTES,
        Knob("gamma", float, 200.0, "weight of a token's variance of attention", ge=0),
        Knob("tau1", float, 1.0, "a layer's entropy counts to the power of 1/tau1", gt=0),
        Knob("tau2", float, 1.0, "a layer's variance counts to the power of 1/tau2", gt=0),
    )
    keeps = "mean and variance of the last `w`"
    differs = "budgets by layer"
    source = "2503.12491; antgroup/cakekv, as forks have it"
    deviates = "layers share what others cannot use in proportion; budgets are divided once; decoding appends"
    follows_content = shares_layers = True

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, self.votes_window(budget)

    def content_budgets(self, prompt: PrefillState) -> list[int]:
        budget = budgets.kept_tokens(self.spec, prompt.tokens)
        window = min(self.spec.window, budget)
        if window == budget:
            return [budget] * prompt.layers
        preferences = [self._preference(prompt, layer, window) for layer in range(prompt.layers)]
        room = prompt.tokens - window
        layers = [window + n for n in divide(prompt.layers * (budget - window), preferences, room)]
        return budgets.with_room(self.spec, layers, budget)

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch.nn.functional as F

        from warmkv.policies.compression.scoring import pool_positions, window_moments

        window = self.votes_window(budget)
        mean, variance, _ = window_moments(prompt, layer, window)
        scores = (mean + self.spec.gamma * variance).sum(dim=1)
        return F.pad(pool_positions(scores, self.spec.kernel, self.spec.pooling), (0, window))

    def _preference(self, prompt: PrefillState, layer: int, window: int) -> float:
        """Return the weight of a layer: both factors are summed over heads and over the tokens before the window."""
        from warmkv.policies.compression.scoring import window_moments

        _, variance, entropy = window_moments(prompt, layer, window)
        return float(entropy ** (1 / self.spec.tau1) * variance.sum() ** (1 / self.spec.tau2))


def divide(total: int, weights: list[float], most: int) -> list[int]:
    """Share `total` in proportion to weights, none above `most`; largest remainders are rounded up first."""
    open_, shares = set(range(len(weights))), [0.0] * len(weights)
    left = float(total)
    while open_:
        of = {i: weights[i] for i in open_}
        if not sum(of.values()):
            of = dict.fromkeys(open_, 1.0)
        each = left / sum(of.values())
        full = {i for i in open_ if each * of[i] >= most}
        if not full:
            for i in open_:
                shares[i] = each * of[i]
            break
        for i in full:
            shares[i] = float(most)
        left -= most * len(full)
        open_ -= full
    whole = [int(s + 1e-9) for s in shares]
    order = sorted(range(len(weights)), key=lambda i: (whole[i] - shares[i], i))
    for i in order[: max(0, total - sum(whole))]:
        whole[i] += whole[i] < most
    return whole
