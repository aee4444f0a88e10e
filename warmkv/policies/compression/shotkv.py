"""ShotKV (Liu et al., 2025, arXiv 2502.01941): few-shot examples are kept as whole units.

A unit is a passage that ends at a blank line. Each layer ranks units by their mean score over all heads (equation 3 of
section 5.1) and all its heads keep the same ones. Tokens of the answer never compete with the prompt's: prefill and
decode are scored apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.scoring import best


def best_units(scores: Tensor, budget: int, separators: Tensor) -> Tensor:
    """Return positions [kv_heads, budget], ascending, of the units with the highest mean scores [kv_heads, n] that fit.

    `separators` bool [at least n] marks the last token of each unit. Room that no unit fits into goes to the best
    single tokens of each KV head.
    """
    count = scores.shape[1]
    units = separators[:count].roll(1).cumsum(0) - separators[count - 1].long()  # unit of every position
    sizes = units.bincount()
    means = scores.new_zeros(len(sizes)).index_add(0, units, scores.sum(dim=0)) / sizes
    left, size, whole = budget, sizes.tolist(), [False] * len(sizes)
    for unit in means.argsort(descending=True, stable=True).tolist():
        if size[unit] <= left:
            left -= size[unit]
            whole[unit] = True
    kept = torch.tensor(whole, device=scores.device)[units]
    return best(scores.masked_fill(kept, float("inf")), budget).sort(dim=-1).values
