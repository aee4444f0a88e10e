"""Drawing the next tokens of a whole batch on the device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from warmkv.replicas.engine.scheduler import Sequence

NO_TOKEN = -1
"""Stands for a token where logits are not finite."""


def draw(sequences: Items[Sequence], logits: Tensor) -> list[int]:
    """Sample the next token of each sequence from its row of logits [n, vocabulary]; NO_TOKEN if not finite."""
    sampling = [sequence.request.sampling for sequence in sequences]
    highest, tokens = logits.max(dim=-1)  # not finite if a logit is NaN or infinite
    if any(s.temperature > 0 for s in sampling):
        parameters = [(s.temperature, s.top_p, q.uniform) for s, q in zip(sampling, sequences, strict=True)]
        temperature, top_p, uniform = torch.tensor(parameters, device=logits.device, dtype=torch.float32).T
        top_k = torch.tensor([min(s.top_k, logits.shape[-1]) for s in sampling], device=logits.device)
        tokens = sample(logits, temperature, top_p, top_k, uniform)
    ids: list[int] = torch.where(highest.isfinite(), tokens, NO_TOKEN).tolist()
    return ids


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
