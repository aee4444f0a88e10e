"""What generated traffic looks like: the settings of the generator in `workloads.py`."""

from __future__ import annotations

from dataclasses import dataclass


class WorkloadError(ValueError):
    """Settings that describe no workload; the message says which."""


@dataclass(frozen=True, slots=True)
class ShareGPTLike:
    """Sessions of a chat service. Lengths are in tokens, times in seconds; scales apply on top.

    The figures of lengths are those published for ShareGPT, of turns and think times those for BurstGPT; sigmas and
    everything about system prompts are plausible choices. Raises WorkloadError for values that describe no workload.
    """

    sessions: int = 200
    hours: float = 1.0  # in which the sessions begin, on average evenly
    cv: float = 1.0  # of the gaps between session starts (Gamma): 1 is Poisson, above it is bursty, 0 is a clock

    turns_mean: float = 3.5  # 1 + negative binomial; with this shape p50 3, p90 7, p99 13
    turns_shape: float = 1.2

    first_user: float = 161.0
    first_answer: float = 338.0
    user: float = 95.0  # of later turns
    answer: float = 349.0
    user_sigma: float = 1.1  # of the logarithm; lengths are lognormal
    answer_sigma: float = 0.8
    length_scale: float = 1.0

    system_prompts: int = 20  # shared by all sessions; 0 for none
    system_tokens: float = 400.0
    system_sigma: float = 0.5
    zipf: float = 1.1  # the n-th most popular system prompt is drawn n**-zipf as often as the first

    think_p10: float = 17.0
    think_p50: float = 124.0
    think_p90: float = 2331.0
    think_scale: float = 1.0
    tokens_per_second: float = 50.0  # at which answers are taken to arrive, to place the next turn

    system_ttl: str = "1h"
    history_ttl: str = "5m"
    vocabulary: int = 32_000

    def __post_init__(self) -> None:
        for name in ("hours", "user_sigma", "answer_sigma", "system_sigma", "cv", "zipf", "sessions", "system_prompts"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        for name in ("first_user", "first_answer", "user", "answer", "system_tokens", "length_scale", "turns_shape"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.turns_mean >= 1, "turns_mean must be at least 1")
        _require(0 < self.think_p10 <= self.think_p50 <= self.think_p90, "think times must be positive and ascending")
        _require(self.think_scale >= 0, "think_scale must not be negative")
        _require(self.tokens_per_second > 0, "tokens_per_second must be positive")
        _require(self.vocabulary >= 2, "vocabulary must be at least 2")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WorkloadError(message)
