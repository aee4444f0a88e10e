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

    While decoding, only the entries whose segments promise the most attention are read, as many as half of the budget
    (stage 2; `replicas/slots/attention.py:choose_entries`). The budget bounds what is read, not what is resident. A
    segment is what the paper calls a page; pages are those of paged memory here.
    """

    name = "rocketkv"
    knobs = (WINDOW, KERNEL.by_default(63), POOLING.by_default("max"))
    keeps = "as snapkv, more than the budget"
    decoding = "append, reads some entries"
    source = "2502.14051; NVlabs/RocketKV, as a fork has it"
    deviates = "the longest answer does not count towards T; no multi-turn variant"
    decode_rules = ("append",)
    storages = ("model",)  # segments are gathered as they lie
    reads_segments = True
    by_default_in_eval = False

    def kept(self, budget: int, prompt_tokens: int) -> int:
        """Return T / cr^alpha with cr = T / budget (section 3.4)."""
        ratio = prompt_tokens / budget
        alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
        return min(prompt_tokens, math.floor(prompt_tokens / math.pow(ratio, alpha) + 5e-7))

    def segment(self, budget: int, prompt_tokens: int) -> int:
        """Return ceil(sqrt(cr2)), or 1 where that exceeds cr2 = kept / budget, which the first stage left."""
        ratio = Fraction(self.kept(budget, prompt_tokens), min(budget, prompt_tokens))
        segment = math.ceil(math.sqrt(ratio))
        return segment if segment <= ratio else 1

    def read_limit(self, budget: int, prompt_tokens: int, head_dim: int) -> tuple[int, int]:
        """Return half of the budget, and as many channels as let choosing read the other half: d * segment / cr2."""
        channels = head_dim * self.segment(budget, prompt_tokens) * budget // self.kept(budget, prompt_tokens)
        return max(1, budget // 2), min(head_dim, max(1, channels))
