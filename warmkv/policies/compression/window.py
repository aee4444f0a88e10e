"""Window attention: the last tokens only. The known-bad baseline, whose perplexity explodes as the first token leaves
(StreamingLLM, arXiv 2309.17453, section 3.1)."""

from __future__ import annotations

from warmkv.policies.compression.base import Policy


class Window(Policy):
    """Keep the last tokens; while decoding, a ring over all of them."""

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, budget
