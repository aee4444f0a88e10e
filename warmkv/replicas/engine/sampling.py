"""Drawing the next tokens of a whole batch on the device."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Stands for a token where logits are not finite."""


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor) -> Tensor:
    """Next token of each row of logits [n, vocabulary]; parameters are [n], the result int64 [n].

    Rows with temperature 0 take the argmax. The others draw from the top_k most probable tokens (0 is all) within the
    smallest set whose probability reaches top_p, by inverting the cumulative distribution at `uniform` in [0, 1): the
    draw depends on nothing but the row's own logits and number.
    """
    greedy = logits.argmax(dim=-1)
    safe = torch.where(temperature == 0, 1.0, temperature)
    logits = logits.float()
    # Shifted before the division, which may overflow for tiny temperatures: inf - inf would be no number.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / safe[:, None]
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = (before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    kept[:, 0] = True
    cumulative = (probabilities * kept).cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the number; clamped, as rounding may leave none.
    drawn = (cumulative <= target).sum(dim=-1).clamp_max(logits.shape[-1] - 1)
    last = kept.sum(dim=-1) - 1  # kept tokens are the first ranks
    drawn = torch.minimum(drawn, last)
    return torch.where(temperature == 0, greedy, order.gather(-1, drawn[:, None])[:, 0])
