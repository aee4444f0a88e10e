"""Forming the batch of a step: a token of every sequence that decodes, and prompts with the rest of a token budget.

Sarathi-Serve's mixed batches (arXiv 2403.02310), with prompts in the order of shortest remaining processing time first
(SRPT) rather than first come, first served. Two rules bound what the long ones wait: the prompt that was admitted first
has a share of every step, and a waiting request is passed by so many others at most. Pure: the replica's engine
and the simulator run this same code.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

OLDEST_SHARE = 4
"""One in so many tokens that a step has for prompts goes to the prompt that was admitted first."""

PASSES = 16
"""How often others may be admitted before a request that is next; and how many waiting requests are considered."""


LONGEST_STEP = 2
"""How many times as long as behind short contexts a step may take while sequences decode. Fewer tokens behind a long
context would not pay: each chunk reads all keys before it, and attends at less than full speed where it is short."""


class WaitingRequest(Protocol):
    passed: int  # how often another was admitted before it


Request = TypeVar("Request", bound=WaitingRequest)


def delay(lacking: int, step_tokens: int) -> int:
    """Return the work, in tokens, that may pass a request of whose prompt so many tokens are not warm on arrival.

    Shortest remaining processing time first for engines that take priorities (vLLM), for `FairQueue.push`: of PASSES
    requests of its size, and at most of as many steps' prompts, for vLLM preempts by priority as well. Where more wait
    than memory holds, those that are warm begin before they are evicted.
    """
    return PASSES * min(lacking, step_tokens)


def work_per_token(context: int, keys_per_token: float, decoding: int) -> float:
    """Return the tokens of a budget that a prompt's next token counts for, behind `context` tokens.

    A token takes as long as attention to `keys_per_token` keys, and its own attention besides. While sequences decode,
    it counts for more than once behind a context with which a whole budget of such tokens would take more than
    LONGEST_STEP times as long. Otherwise nobody waits for the step, and every token counts once.
    """
    return max(1.0, (1 + context / keys_per_token) / LONGEST_STEP) if decoding else 1.0


def keys_per_token(weights: float, layers: int, q_heads: int, head_dim: int) -> float:
    """Return the keys to which a token's attention takes as many operations as its products with the weights."""
    return weights / (2 * layers * q_heads * head_dim)


def split(budget: int, remaining: Sequence[int], work: Sequence[float] = ()) -> list[int]:
    """Divide the tokens that a step has for prompts; returns those of each.

    `remaining` are the tokens that each prompt lacks, in the order of admission, `work` is what each of them counts
    for (`work_per_token`), 1 if not given. The first has its share, at least a token, the rest goes to the shortest.
    Where every token counts once, the sum is the budget, or everything that is lacking.
    """
    if not remaining or (not work and sum(remaining) <= budget):
        return list(remaining)
    work = work or [1.0] * len(remaining)
    shares = [0] * len(remaining)
    shares[0] = _first_share(budget, remaining[0], work[0])
    left = budget - shares[0] * work[0]
    for at in sorted(range(len(remaining)), key=remaining.__getitem__):
        if left < 1:
            break
        more = min(int(left / work[at]), remaining[at] - shares[at])
        shares[at] += more
        left -= more * work[at]
    return shares


def admits_below(budget: int, remaining: Sequence[int], work: Sequence[float] = ()) -> float:
    """Return the length below which one more prompt would get tokens of the step that is divided by `split`.

    That is, if its tokens count once.
    """
    if not remaining or (not work and sum(remaining) < budget):
        return math.inf
    work = work or [1.0] * len(remaining)
    first = _first_share(budget, remaining[0], work[0])
    left, most = budget - first * work[0], 0
    for at in sorted(range(len(remaining)), key=remaining.__getitem__):
        if left < 1:
            return most
        most = remaining[at]
        left -= (most - (0 if at else first)) * work[at]
    return math.inf if left >= 1 else most


def _first_share(budget: int, lacking: int, work: float) -> int:
    """Return the tokens of the prompt that was admitted first."""
    return min(lacking, budget, max(1, int(max(1, budget // OLDEST_SHARE) / work)))


class WaitingPrompt(NamedTuple):
    """Describe a queued prompt, as far as that decides for which others it waits."""

    tokens: int
    resident: int  # leading blocks that are stored
    reusable: int  # tokens that need not be computed where they are stored


def common_blocks(hashes: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Count the leading blocks that two prompts share. Hashes are chained: where one is equal, so are those before."""
    return bisect_left(range(min(len(hashes), len(other))), True, key=lambda at: hashes[at] != other[at])


def waits_for(prompt: WaitingPrompt, lacking: int, common: int, size: int, sums: Sequence[int] | None = None) -> bool:
    """Return True if a prompt waits for one that is being computed and lacks `lacking` tokens, to find its blocks warm.

    The other will leave `common` leading blocks of both, of `size` tokens. `sums` are the positions up to which it
    leaves column sums, if the prompt's policy goes on only from these.

    Of the tokens that the prompt lacks, `own`, `shared` are then saved. If it waits, the other ends after `lacking`
    tokens and it after `lacking + own - shared`; else, as the shorter, it ends after `own` and the other after both. It
    waits where that is no later in sum. So it waits for any that lacks no more than itself, which goes first anyway.
    """
    warm, found = min(prompt.resident * size, prompt.reusable), min(common * size, prompt.reusable)
    if sums is not None:
        found = max((at for at in sums if at <= found and at % size == 0), default=0)
    own, shared = prompt.tokens - warm, found - warm
    return shared > 0 and lacking <= own + shared


def next_prompt(
    waiting: Iterable[Request], fits: Callable[[Request], bool], waits: Callable[[Request], bool]
) -> Request | None:
    """Return the first waiting request that may be admitted now, if there is one, and count whom it passes.

    `waiting` is in the order in which requests would be taken. One that does not fit, or gets no tokens of the step,
    lets others pass, until it has been passed `PASSES` times. Those that `waits` accepts wait for a prompt in progress:
    they are passed by anybody.
    """
    passed: list[Request] = []
    for request in islice(waiting, PASSES):
        if waits(request):
            continue
        if fits(request):
            for other in passed:
                other.passed += 1
            return request
        if request.passed >= PASSES:
            return None
        passed.append(request)
    return None
