"""RocketKV (Behnam et al., 2025, arXiv 2502.14051): half of the compression for good, half anew for every token."""

from __future__ import annotations

import math
from fractions import Fraction

from warmkv.knobs import KERNEL, POOLING, WINDOW
from warmkv.policies.compression.method import register
from warmkv.policies.compression.methods.snapkv import SnapKV


@register
class RocketKV(SnapKV):
    """SnapKV with a wide max pooling keeps T / cr^alpha tokens (stage 1).

    While decoding, only the pages whose keys can match the query best are read, as many tokens as the budget allows
    (stage 2; `replicas/slots/attention.py:attend_pages`). The budget bounds what is read, not what is resident.
    """

    name = "rocketkv"
    knobs = (WINDOW, KERNEL.by_default(63), POOLING.by_default("max"))
    keeps = "as snapkv, more than the budget"
    decoding = "append, reads some pages"
    source = "2502.14051, the paper alone"
    deviates = "all channels of a query count in stage 2; no multi-turn variant"
    decode_rules = ("append",)
    storages = ("model",)  # pages are gathered as they lie
    reads_pages = True
    by_default_in_eval = False

    def kept(self, budget: int, prompt_tokens: int) -> int:
        """Return T / cr^alpha with cr = T / budget (section 3.4)."""
        ratio = prompt_tokens / budget
        alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
        return min(prompt_tokens, math.ceil(round(prompt_tokens / math.pow(ratio, alpha), 6)))

    def page(self, budget: int, prompt_tokens: int) -> int:
        """Return ceil(sqrt(cr2)), cr2 what the first stage left of the ratio."""
        return math.ceil(math.sqrt(Fraction(self.kept(budget, prompt_tokens), min(budget, prompt_tokens))))
