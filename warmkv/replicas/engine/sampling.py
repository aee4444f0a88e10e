"""Drawing the next tokens of a whole batch on the device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future

import torch
from torch import Tensor

from warmkv.policies.memory_plan import SCORING_BYTES
from warmkv.replicas.engine.faults import NotFiniteError
from warmkv.replicas.engine.logits_processors import process
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.protocol import LEAST_LOGPROB, TokenLogprobs

NO_TOKEN = -1
"""Stands for a token where logits are not finite."""

PROMPT_LOGITS_BYTES = SCORING_BYTES
"""Logits of prompts in a pass: what policies that score a prompt take afterwards has room for them."""

FLOATS_AT_ONCE = 1 << 21
"""Logits of prompts that are made log-probabilities at a time."""

BELOW_ONE = 1 - 2**-23
"""The largest number of which a share is less than the whole in float32."""


def draw(sequences: Items[Sequence], logits: Tensor, masks: Future[Tensor] | None = None) -> list[int]:
    """Sample the next token of each sequence from its row of logits [n, vocabulary]; NO_TOKEN if not finite.

    `masks` are those of the sequences with a constraint. Log-probabilities are left in the sequences that want them.
    """
    sampling = [sequence.request.sampling for sequence in sequences]
    highest, tokens = logits.max(dim=-1)  # not finite if a logit is NaN or infinite
    is_finite, own = highest.isfinite(), logits
    if any(sequence.processor for sequence in sequences):
        logits = process([sequence.processor for sequence in sequences], logits, masks)
        highest, tokens = logits.max(dim=-1)
        is_finite = is_finite & highest.isfinite()
    if any(s.temperature > 0 for s in sampling):
        parameters = [(s.temperature, s.top_p, q.uniform) for s, q in zip(sampling, sequences, strict=True)]
        temperature, top_p, uniform = torch.tensor(parameters, device=logits.device, dtype=torch.float32).T
        top_k = torch.tensor([min(s.top_k, logits.shape[-1]) for s in sampling], device=logits.device)
        least = [s.min_p for s in sampling]
        min_p = torch.tensor(least, device=logits.device, dtype=torch.float32) if any(least) else None
        tokens = sample(logits, temperature, top_p, top_k, uniform, min_p)
    ids: list[int] = torch.where(is_finite, tokens, NO_TOKEN).tolist()
    if any(s.logprobs is not None for s in sampling):
        _note_logprobs(sequences, own, ids)
    return ids


def _note_logprobs(sequences: Items[Sequence], logits: Tensor, ids: Items[int]) -> None:
    """Leave the log-probabilities of tokens drawn, or given by another replica, in the sequences that want them."""
    wanting = [
        (row, sequence, sequence.request.sampling.logprobs)
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.logprobs is not None and ids[row] != NO_TOKEN
    ]
    if not wanting:
        return
    rows = torch.tensor([row for row, _, _ in wanting], device=logits.device)
    tokens = [ids[row] if (given := sequence.given) is None else given for row, sequence, _ in wanting]
    told = _token_logprobs(logits[rows], tokens, [top for _, _, top in wanting])
    for (_, sequence, _), logprobs in zip(wanting, told, strict=True):
        sequence.logprobs = logprobs


def _token_logprobs(logits: Tensor, tokens: Items[int], tops: Items[int]) -> list[TokenLogprobs]:
    """Return the log-probability of a token in each row of logits [n, vocabulary], and the row's highest ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    taken = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    values, others = logprobs.topk(min(max(tops), logits.shape[-1]), dim=-1)
    least = LEAST_LOGPROB
    lists = (taken.clamp_min(least).tolist(), values.clamp_min(least).tolist(), others.tolist())
    return [
        TokenLogprobs(token, logprob, tuple(zip(best[:top], its[:top], strict=True)))
        for token, top, logprob, its, best in zip(tokens, tops, *lists, strict=True)
    ]


def positions_at_once(vocabulary: int, dtype_bytes: int) -> int:
    """Return the positions of prompts whose logits a pass may hold."""
    return max(1, PROMPT_LOGITS_BYTES // (vocabulary * dtype_bytes))


def note_prompt_logprobs(prompts: Items[Sequence], logits: Tensor) -> None:
    """Leave the log-probabilities of their chunks' tokens in the prompts that want them.

    Logits [n, vocabulary] are those of the `scored` positions, prompt by prompt. Raises NotFiniteError.
    """
    if not len(logits):
        return
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise NotFiniteError
    rows = max(1, FLOATS_AT_ONCE // logits.shape[-1])
    at = 0
    for sequence in prompts:
        scored, top = sequence.scored, sequence.request.sampling.prompt_logprobs or 0
        told: list[TokenLogprobs] = []
        for first in range(0, len(scored), rows):
            piece = scored[first : first + rows]
            tokens = sequence.request.token_ids[piece.start + 1 : piece.stop + 1]
            told += _token_logprobs(logits[at : at + len(piece)], tokens, [top] * len(piece))
            at += len(piece)
        sequence.prompt_logprobs = tuple(told)


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Next token of each row of logits [n, vocabulary]; parameters are [n], the result int64 [n].

    Rows with temperature 0 take the argmax. The others draw from the top_k most probable tokens (0 is all) within the
    smallest set whose probability reaches top_p, of which none has less than min_p of the highest probability, by
    inverting the cumulative distribution at `uniform` in [0, 1): the draw depends on nothing but the row's own logits
    and number.
    """
    greedy = logits.argmax(dim=-1)
    safe = torch.where(temperature == 0, 1.0, temperature)
    logits = logits.float()
    # Shifted before the division, which may overflow for tiny temperatures: inf - inf would be no number.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / safe[:, None]
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = (before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    if min_p is not None:
        kept &= probabilities >= min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True
    cumulative = (probabilities * kept).cumsum(dim=-1)
    # Below 1 in float32 as well: beyond the last token that can be drawn lie those that a mask rules out.
    target = uniform[:, None].clamp_max(BELOW_ONE) * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the number; clamped, as rounding may leave none.
    drawn = (cumulative <= target).sum(dim=-1).clamp_max(logits.shape[-1] - 1)
    last = kept.sum(dim=-1) - 1  # kept tokens are the first ranks
    drawn = torch.minimum(drawn, last)
    return torch.where(temperature == 0, greedy, order.gather(-1, drawn[:, None])[:, 0])
