"""What generated traffic looks like: the settings of the generator in `workloads.py`."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.faults import UserError


class WorkloadError(UserError):
    """Settings that describe no workload; the message says which."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of a service; by default a chat. Lengths are in tokens, times in seconds; scales apply on top.

    A prompt is: tools, system prompt, document, and then turn by turn passages, question and answer. Whatever is
    shared among sessions is drawn from a pool by a Zipf law: the n-th most popular n**-zipf as often as the first.

    The figures of lengths are those published for ShareGPT, of turns and think times those for BurstGPT; sigmas and
    everything about what is shared are plausible choices. Raises WorkloadError for values that describe no workload.
    """

    sessions: int = 200
    hours: float = 1.0  # in which the sessions begin, on average evenly
    cv: float = 1.0  # of the gaps between session starts (Gamma): 1 is Poisson, above it is bursty, 0 is a clock

    swing: float = 0.0  # of the rate over a day: 0.5 is half as much more at the peak and less at the trough
    peak_hour: float = 14.0  # of the day that begins with the first session

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
    tool_sets: int = 0  # sets of tool definitions before the system prompt
    tool_tokens: float = 3000.0
    documents: int = 0  # about one of which each session is
    document_tokens: float = 20_000.0
    passages: int = 0  # retrieved before each question
    passage_pool: int = 1000
    passage_tokens: float = 300.0
    pool_sigma: float = 0.3  # of tools, documents and passages
    zipf: float = 1.1

    think_p10: float = 17.0
    think_p50: float = 124.0
    think_p90: float = 2331.0
    think_scale: float = 1.0
    tokens_per_second: float = 50.0  # at which answers are taken to arrive, to place the next turn

    system_ttl: str = "1h"
    history_ttl: str = "5m"
    vocabulary: int = 32_000

    def __post_init__(self) -> None:
        for name in COUNTS + SPREADS:
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        for name in ASKED + SHARED + FACTORS:
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(0 <= self.swing <= 1, "swing must be from 0 to 1")
        _require(self.turns_mean >= 1, "turns_mean must be at least 1")
        _require(0 < self.think_p10 <= self.think_p50 <= self.think_p90, "think times must be positive and ascending")
        _require(self.think_scale >= 0, "think_scale must not be negative")
        _require(self.tokens_per_second > 0, "tokens_per_second must be positive")
        _require(self.vocabulary >= 2, "vocabulary must be at least 2")


COUNTS = ("sessions", "hours", "peak_hour", "system_prompts", "tool_sets", "documents", "passages")
SPREADS = ("cv", "zipf", "user_sigma", "answer_sigma", "system_sigma", "pool_sigma")
ASKED = ("first_user", "first_answer", "user", "answer")
SHARED = ("system_tokens", "tool_tokens", "document_tokens", "passage_tokens", "passage_pool")
FACTORS = ("length_scale", "turns_shape")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WorkloadError(message)


PRESETS = {
    "chat": Workload(),
    # Questions about one long document each, which several sessions may share.
    "document-qa": Workload(
        turns_mean=4.0,
        first_user=40.0,
        first_answer=200.0,
        user=40.0,
        answer=200.0,
        documents=50,
        think_p10=10.0,
        think_p50=45.0,
        think_p90=300.0,
    ),
    # Every question comes with passages that a search found.
    "rag": Workload(turns_mean=2.0, first_user=40.0, first_answer=250.0, user=40.0, answer=250.0, passages=5),
    # Turns, answers, think times and prefixes as in the 60 published agentic coding sessions; a "question" is what the
    # tools gave back. The first prompts there are often summaries of earlier work, of very unlike lengths.
    "agentic": Workload(
        sessions=50,
        turns_mean=67.0,
        turns_shape=0.91,
        first_user=10_000.0,
        first_answer=424.0,
        user=1230.0,
        answer=424.0,
        user_sigma=1.2,
        answer_sigma=0.88,
        system_prompts=10,
        system_tokens=2600.0,
        system_sigma=0.2,
        tool_sets=10,
        tool_tokens=11_500.0,
        pool_sigma=0.2,
        think_p10=4.0,
        think_p50=10.0,
        think_p90=129.0,
        tokens_per_second=38.0,
    ),
}
