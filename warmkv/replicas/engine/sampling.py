"""Drawing the next tokens of a whole batch on the device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from warmkv.policies.memory_plan import SCORING_BYTES
from warmkv.replicas.engine.faults import NotFiniteError
from warmkv.replicas.engine.logits_processors import process
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.protocol import LEAST_LOGPROB, TokenLogprobs

PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "uniform")
NOT_DRAWN = (0.0, 1.0, 0, 0.0, 0.0)
Floats = npt.NDArray[np.float64]

NO_TOKEN = -1
"""Stands for a token where logits are not finite."""

PROMPT_LOGITS_BYTES = SCORING_BYTES
"""Logits of prompts in a pass: what policies that score a prompt take afterwards has room for them."""

FLOATS_AT_ONCE = 1 << 21
"""Logits of prompts that are made log-probabilities at a time."""

ENDLESS = 2.0
"""Probability that rounding cannot reach: all tokens are within a top_p of 1."""

CANDIDATES = 1024
"""Most probable tokens among which top_p is looked for; all are sorted only where these do not reach it."""


class Branches(NamedTuple):
    """Tell what sampling a batch does beyond drawing from all tokens."""

    bounded: bool  # top_p or top_k leave tokens out
    candidates: int  # the most probable tokens that are sorted for it
    falls_short: bool  # these may not reach a top_p, which the host looks at


@dataclass(frozen=True, slots=True)
class Draws:
    """Hold what tokens are drawn with, float64 [n] each as named by PARAMETERS: on the host, and on the device."""

    host: Floats
    device: Tensor

    def first(self, count: int) -> Draws:
        """Return those of the first tokens."""
        return Draws(self.host[:, :count], self.device[:, :count])

    def row(self, at: int) -> Draws:
        """Return those of one token."""
        return Draws(self.host[:, at : at + 1], self.device[:, at : at + 1])

    def branches(self, vocabulary: int) -> Branches:
        """Return what the host has to know to sample."""
        temperature, top_p, top_k, _, _ = self.host
        warm, counted = temperature > 0, (top_k > 0) & (top_k < vocabulary)
        candidates = min(vocabulary, max(CANDIDATES, int(top_k[warm & counted].max(initial=1))))
        falls_short = candidates < vocabulary and bool((warm & (top_p < 1) & ~counted).any())
        bounded = bool((warm & ((top_p < 1) | counted)).any())
        return Branches(bounded, candidates if bounded else 0, falls_short)


def parameters_of(sequences: Items[Sequence], padded: int) -> Floats | None:
    """Return what tokens are drawn with [parameters, padded], None if all take the most probable.

    A random number stays that of the next token until this is delivered.
    """
    sampling = [sequence.request.sampling for sequence in sequences]
    if not any(s.temperature > 0 for s in sampling):
        return None
    rows = [(s.temperature, s.top_p, s.top_k, s.min_p, q.uniform) for s, q in zip(sampling, sequences, strict=True)]
    rows += [NOT_DRAWN] * (padded - len(rows))
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


def draw(
    sequences: Items[Sequence],
    logits: Tensor,
    masks: Future[Tensor] | None = None,
    draws: Draws | None = None,
    tokens: Tensor | None = None,
    *,
    row_by_row: bool = False,
) -> list[int]:
    """Sample the next token of each sequence from its row of logits [n, vocabulary]; NO_TOKEN if not finite.

    `masks` are those of the sequences with a constraint; `draws` is None if all take the most probable token.
    Log-probabilities are left in the sequences that want them. `tokens` are given if they are `pick`ed already.
    `row_by_row` as for `pick`.
    """
    if any(sequence.processor for sequence in sequences):
        processed = process([sequence.processor for sequence in sequences], logits, masks)
        tokens = torch.where(logits.amax(dim=-1).isfinite(), pick(processed, draws, row_by_row=row_by_row), NO_TOKEN)
    elif tokens is None:
        tokens = pick(logits, draws, row_by_row=row_by_row)
    ids: list[int] = tokens.tolist()
    if any(sequence.request.sampling.logprobs is not None for sequence in sequences):
        _note_logprobs(sequences, logits, ids, row_by_row=row_by_row)
    return ids


def pick(logits: Tensor, draws: Draws | None, *, row_by_row: bool = False) -> Tensor:
    """Sample from each row of logits [n, vocabulary], or take the most probable tokens; NO_TOKEN if not finite.

    `row_by_row`: so that no sum depends on how many rows there are.
    """
    if row_by_row and draws is not None and len(logits) > 1:
        return torch.cat([pick(logits[at : at + 1], draws.row(at)) for at in range(len(logits))])
    highest, tokens = logits.max(dim=-1)  # not finite if a logit is NaN or infinite
    return torch.where(highest.isfinite(), tokens if draws is None else sample(logits, draws), NO_TOKEN)


def _note_logprobs(sequences: Items[Sequence], logits: Tensor, ids: Items[int], *, row_by_row: bool) -> None:
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
    told = _token_logprobs(logits[rows], tokens, [top for _, _, top in wanting], row_by_row=row_by_row)
    for (_, sequence, _), logprobs in zip(wanting, told, strict=True):
        sequence.logprobs = logprobs


def _token_logprobs(logits: Tensor, tokens: Items[int], tops: Items[int], *, row_by_row: bool) -> list[TokenLogprobs]:
    """Return the log-probability of a token in each row of logits [n, vocabulary], and the row's highest ones."""
    rows = torch.split(logits.float(), 1 if row_by_row else len(logits))
    logprobs = torch.cat([each.log_softmax(dim=-1) for each in rows])
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


def note_prompt_logprobs(prompts: Items[Sequence], logits: Tensor, *, row_by_row: bool = False) -> None:
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
            told += _token_logprobs(logits[at : at + len(piece)], tokens, [top] * len(piece), row_by_row=row_by_row)
            at += len(piece)
        sequence.prompt_logprobs = tuple(told)


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """Draw the next token of each row of logits [n, vocabulary]; returns int64 [n].

    Rows with temperature 0 take the argmax. The others draw, as in vLLM, from the smallest set that has top_p of the
    probability of the top_k most probable tokens (0 is all), of which none has less than min_p of the highest one's, by
    inverting the cumulative distribution, in the order of the vocabulary, at `uniform` in [0, 1): the draw depends on
    nothing but the row's own logits and number. Sums are in float64, so that no order of adding changes a draw.
    """
    greedy, size = logits.argmax(dim=-1), logits.shape[-1]
    warmth, top_p, top_k, least, number = draws.device[..., None].unbind()
    heat, least = warmth.float(), least.float()
    logits = logits.float()
    # Shifted before the division, which may overflow for tiny temperatures: inf - inf would be no number.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.where(heat == 0, 1.0, heat)
    probabilities = scaled.softmax(dim=-1)
    kept = (probabilities > 0) & (probabilities >= least * probabilities.amax(dim=-1, keepdim=True))
    if (branches := draws.branches(size)).bounded:
        mass = torch.where((heat > 0) & (top_p < 1), top_p, ENDLESS)
        most = torch.where((heat > 0) & (top_k > 0), top_k, size).clamp_max(size).long()
        kept &= _most_probable(torch.where(kept, probabilities, 0), mass, most, branches)
    cumulative = torch.where(kept, probabilities, 0).cumsum(dim=-1, dtype=torch.float64)
    reached = torch.where(kept, cumulative, 0)
    beyond = reached > number * reached.amax(dim=-1, keepdim=True)
    return torch.where(heat[:, 0] == 0, greedy, beyond.to(torch.int8).argmax(dim=-1))  # the first beyond the number


def _most_probable(probabilities: Tensor, mass: Tensor, most: Tensor, branches: Branches) -> Tensor:
    """Return which tokens are within the bounds of each row, bool [n, vocabulary]; of equals the first are.

    `mass` [n, 1] is that of top_p or ENDLESS, `most` [n, 1] that of top_k or the vocabulary;
    probabilities are 0 where min_p leaves a token out.
    """
    kept, is_short = _within(probabilities, mass, most, branches.candidates)
    if branches.falls_short:
        rows = is_short.nonzero()[:, 0]
        if len(rows):
            kept[rows], _ = _within(probabilities[rows], mass[rows], most[rows], probabilities.shape[-1])
    return kept


def _within(probabilities: Tensor, mass: Tensor, most: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Select by the sorted probabilities of so many candidates; also bool [n], where these do not reach top_p."""
    device, size = probabilities.device, probabilities.shape[-1]
    values = probabilities.topk(candidates, dim=-1).values
    reached = values.cumsum(dim=-1, dtype=torch.float64)
    # top_p is a share of what min_p and top_k leave.
    of_top_k = reached.gather(-1, most.clamp_max(candidates) - 1)
    total = torch.where(most < size, of_top_k, probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64))
    within = (reached - values < mass * total) & (torch.arange(candidates, device=device) < most)
    count = within.sum(dim=-1, keepdim=True).clamp_min(1)
    last = values.gather(-1, count - 1)
    is_whole = (mass == ENDLESS) & (most == size)
    above, equal = probabilities > last, probabilities == last
    kept = above | (equal & (equal.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))
    is_short = (count == candidates) & (most > candidates) & ~is_whole
    return kept | is_whole, is_short[:, 0]
