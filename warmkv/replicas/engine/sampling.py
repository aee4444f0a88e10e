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

CANDIDATES = 1024
"""Most probable tokens among which top_p is looked for; all are sorted only where these do not reach it."""


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
        parameters = [
            (s.temperature, s.top_p, s.top_k, s.min_p, q.uniform) for s, q in zip(sampling, sequences, strict=True)
        ]
        tokens = sample(logits, *zip(*parameters, strict=True))
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
    logits: Tensor,
    temperature: Items[float],
    top_p: Items[float],
    top_k: Items[int],
    min_p: Items[float],
    uniform: Items[float],
) -> Tensor:
    """Draw the next token of each row of logits [n, vocabulary]; parameters are of length n, the result int64 [n].

    Rows with temperature 0 take the argmax. The others draw from the top_k most probable tokens (0 is all) within the
    smallest set whose probability reaches top_p, of which none has less than min_p of the highest probability, by
    inverting the cumulative distribution, in the order of the vocabulary, at `uniform` in [0, 1): the draw depends on
    nothing but the row's own logits and number. Sums are in float64, so that no order of adding changes a draw.
    """
    greedy, size = logits.argmax(dim=-1), logits.shape[-1]
    uploaded = torch.tensor([temperature, min_p, uniform], dtype=torch.float64).to(logits.device)[..., None]
    heat, least, number = uploaded[0].float(), uploaded[1].float(), uploaded[2]
    logits = logits.float()
    # Shifted before the division, which may overflow for tiny temperatures: inf - inf would be no number.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.where(heat == 0, 1.0, heat)
    probabilities = scaled.softmax(dim=-1)
    kept = (probabilities > 0) & (probabilities >= least * probabilities.amax(dim=-1, keepdim=True))
    drawing = zip(temperature, top_p, top_k, strict=True)
    bounds = [(p, min(k, size) or size) if t else (1.0, size) for t, p, k in drawing]
    if any(p < 1 or k < size for p, k in bounds):
        kept &= _most_probable(probabilities, bounds)
    cumulative = torch.where(kept, probabilities, 0).cumsum(dim=-1, dtype=torch.float64)
    reached = torch.where(kept, cumulative, 0)
    beyond = reached > number * reached.amax(dim=-1, keepdim=True)
    return torch.where(heat[:, 0] == 0, greedy, beyond.to(torch.int8).argmax(dim=-1))  # the first beyond the number


def _most_probable(probabilities: Tensor, bounds: Items[tuple[float, int]]) -> Tensor:
    """Return which tokens are within the (top_p, top_k) of each row, bool [n, vocabulary]; of equals the first are."""
    size = probabilities.shape[-1]
    candidates = min(size, max(CANDIDATES, *(k for _, k in bounds if k < size), 1))
    kept, is_short = _within(probabilities, bounds, candidates)
    if candidates < size and any(p < 1 and k == size for p, k in bounds):
        rows: list[int] = is_short.nonzero()[:, 0].tolist()
        if rows:
            kept[rows], _ = _within(probabilities[rows], [bounds[row] for row in rows], size)
    return kept


def _within(probabilities: Tensor, bounds: Items[tuple[float, int]], candidates: int) -> tuple[Tensor, Tensor]:
    """Select by the sorted probabilities of so many candidates; also bool [n], where these do not reach top_p."""
    device, size = probabilities.device, probabilities.shape[-1]
    endless = 2.0  # what rounding cannot reach: all tokens are within a top_p of 1
    mass = torch.tensor([p if p < 1 else endless for p, _ in bounds], dtype=torch.float64).to(device)[:, None]
    most = torch.tensor([k for _, k in bounds]).to(device)[:, None]
    values = probabilities.topk(candidates, dim=-1).values
    before = values.cumsum(dim=-1, dtype=torch.float64) - values
    within = (before < mass) & (torch.arange(candidates, device=device) < most)
    count = within.sum(dim=-1, keepdim=True).clamp_min(1)
    last = values.gather(-1, count - 1)
    is_whole = (mass == endless) & (most == size)
    above, equal = probabilities > last, probabilities == last
    kept = above | (equal & (equal.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))
    is_short = (count == candidates) & (most > candidates) & ~is_whole
    return kept | is_whole, is_short[:, 0]
