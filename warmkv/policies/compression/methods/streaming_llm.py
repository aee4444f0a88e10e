"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): attention sinks and a rolling window."""

from __future__ import annotations

from warmkv.knobs import SINKS
from warmkv.policies.compression.method import Method, register


@register
class StreamingLLM(Method):
    """Keep the first `sinks` tokens and the most recent ones; while decoding, a ring over the recent ones.

    Positions are those within the cache (section 3.2). Only distances matter to rotary attention, so recents keep the
    rotation they were cached with and the sinks are rotated on by what has been dropped between the two.
    """

    name = "streaming_llm"
    knobs = (SINKS,)
    keeps = "first and last tokens"
    decoding = "ring, positions within the cache"
    differs = "nothing"
    source = "2309.17453; mit-han-lab/streaming-llm"
    deviates = "nothing but the work: sinks are turned on instead of all keys"
    decode = "ring"
    decode_rules = ("ring",)
    has_scores = False
    recent_only = rebased = rotates = True
    by_default_in_eval = True

    def ends(self, budget: int) -> tuple[int, int]:
        return self.spec.sinks, budget - self.spec.sinks
