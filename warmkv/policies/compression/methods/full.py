"""The full cache: the baseline that every method is compared with."""

from __future__ import annotations

from warmkv.policies.compression.method import Method, register


@register
class Full(Method):
    """Keep everything; the answers are those of plain transformers."""

    name = "full"
    keeps = "everything"
    differs = "nothing"
    source = "transformers"
    decode_rules = ("append",)
    has_budget = has_scores = False
    by_default_in_eval = True
