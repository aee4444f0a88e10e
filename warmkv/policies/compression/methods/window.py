"""Window attention: the last tokens only. The known-bad baseline, whose perplexity explodes as the first token leaves
(StreamingLLM, arXiv 2309.17453, section 3.1)."""

from __future__ import annotations

from warmkv.policies.compression.method import Method, register


@register
class Window(Method):
    """Keep the last tokens; while decoding, a ring over all of them."""

    name = "window"
    keeps = "the last tokens"
    decoding = "ring without sinks"
    differs = "nothing"
    source = "2309.17453, section 3.1"
    decode = "ring"
    decode_rules = ("ring",)
    rule_knobs_refused = ("sinks",)
    has_scores = False
    recent_only = True
    by_default_in_eval = True

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, budget
