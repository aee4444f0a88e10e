"""ShotKV (arXiv 2502.01941): few-shot examples are kept as whole units.

A unit is a passage that ends at a blank line. Tokens of the answer are appended and never compete with the prompt's:
prefill and decode are scored apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.scoring import best


def best_units(scores: Tensor, budget: int, separators: Tensor) -> Tensor:
    """Positions [kv_heads, budget], ascending, of scores [kv_heads, n]: whole units by mean score as long as they fit.

    `separators` bool [at least n] marks the last token of each unit. What room is left goes to the best single tokens.
    """
    count = scores.shape[1]
    last = separators[:count].roll(1).cumsum(0) - separators[count - 1].long()  # unit of every position
    units = int(last[-1]) + 1
    sizes = torch.bincount(last, minlength=units)
    means = torch.zeros(scores.shape[0], units, dtype=scores.dtype, device=scores.device)
    means = means.index_add(1, last, scores) / sizes
    rank, size = scores.clone(), sizes.tolist()
    for head, order in enumerate(means.argsort(descending=True, stable=True).tolist()):
        left, whole = budget, torch.zeros(units, dtype=torch.bool)
        for unit in order:
            if size[unit] <= left:
                left -= size[unit]
                whole[unit] = True
        rank[head, whole.to(scores.device)[last]] = float("inf")
    return best(rank, budget).sort(dim=-1).values
