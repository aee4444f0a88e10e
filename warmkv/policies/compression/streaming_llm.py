"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): attention sinks and a rolling window."""

from __future__ import annotations

from warmkv.policies.compression.base import Policy


class StreamingLLM(Policy):
    """Keep the first `sinks` tokens and the most recent ones; while decoding, a ring over the recent ones.

    Positions are those within the cache (section 3.2). Only distances matter to rotary attention, so recents keep the
    rotation they were cached with and the sinks are rotated on by what has been dropped between the two.
    """

    def ends(self, budget: int) -> tuple[int, int]:
        sinks = self.spec.sinks or 0
        return sinks, budget - sinks
