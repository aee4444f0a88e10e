"""Change logits before a token is drawn: bias, penalties, masks and forced tokens (cf. vLLM's logits processors)."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from warmkv.replicas.constraints.compiler import reason
from warmkv.replicas.protocol import GenerateRequest, SamplingParams


@dataclass(slots=True, eq=False)
class LogitsProcessor:
    """State of one request. It moves on when a token is taken, not when one is drawn: a step may be repeated."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    ending: tuple[int, ...]  # token ids that end the answer
    matcher: LLMatcher | None = None
    drawn: array[int] = field(default_factory=lambda: array("q"))
    thinks: bool = False  # whether the last token is a thought
    thoughts: int = 0  # tokens so far
    _prompt_ids: Tensor | None = None

    @classmethod
    def of(
        cls, request: GenerateRequest, eos_ids: Collection[int], matcher: LLMatcher | None
    ) -> LogitsProcessor | None:
        """Return the processor of a request, None if it leaves the logits as they are."""
        sampling = request.sampling
        budget = sampling.thinking
        if not (matcher or budget or sampling.min_tokens or sampling.logit_bias or is_penalized(sampling)):
            return None
        ending = tuple({*eos_ids, *sampling.stop_token_ids})
        return cls(sampling, request.token_ids, ending, matcher, thinks=budget is not None and budget.is_open)

    @property
    def banned(self) -> tuple[int, ...]:
        """Return the tokens that may not be drawn now, constraints aside."""
        if len(self.drawn) < self.sampling.min_tokens or (self.matcher and self.sampling.ignore_eos):
            return self.ending
        return ()

    @property
    def forced(self) -> int | None:
        """Return the token that is to be drawn now: what closes thinking whose budget is used up."""
        budget = self.sampling.thinking
        return budget.closing if budget is not None and self.thinks and self.thoughts >= budget.tokens else None

    def take(self, token: int) -> str:
        """Take the next token of the answer; returns why the constraint forbids it, "" if it does not."""
        self.drawn.append(token)
        if (budget := self.sampling.thinking) is not None:
            if token in (budget.opening, budget.closing):
                self.thinks = token == budget.opening
            elif self.thinks:
                self.thoughts += 1
        return "" if self.matcher is None or self.matcher.consume_token(token) else reason(self.matcher)

    def prompt_ids(self, device: torch.device) -> Tensor:
        """Return the token ids whose repetition counts from the prompt on, each once."""
        if self._prompt_ids is None:
            unique = sorted(set(self.prompt)) if self.sampling.repetition_penalty != 1 else []
            self._prompt_ids = torch.tensor(unique, device=device, dtype=torch.int64)
        return self._prompt_ids

    @property
    def is_complete(self) -> bool:
        """Tell whether the constraint allows nothing more."""
        return self.matcher is not None and self.matcher.is_stopped()


def is_penalized(sampling: SamplingParams) -> bool:
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1)


def process(processors: Items[LogitsProcessor | None], logits: Tensor, masks: Future[Tensor] | None) -> Tensor:
    """Return float32 logits [n, vocabulary] of which each row is changed by its processor, if it has one.

    `masks` are the rows of those with a matcher. In vLLM's order: bias, what may not end yet, penalties; then masks,
    and what ends thinking where they allow it: within a character of several tokens they do not.
    """
    rows = [(row, one) for row, one in enumerate(processors) if one is not None]
    logits = logits.to(torch.float32, copy=True)  # the model's own are needed for log-probabilities
    device = logits.device
    if bias := [(row, token, value) for row, one in rows for token, value in one.sampling.logit_bias]:
        places, tokens, values = zip(*bias, strict=True)
        added = torch.tensor(values, device=device, dtype=torch.float32)
        logits.index_put_((torch.tensor(places, device=device), torch.tensor(tokens, device=device)), added, True)
    if banned := [(row, token) for row, one in rows for token in one.banned]:
        at, ending = torch.tensor(banned, device=device).T
        logits[at, ending] = -torch.inf
    if penalized := [(row, one) for row, one in rows if is_penalized(one.sampling)]:
        at = torch.tensor([row for row, _ in penalized], device=device)
        logits[at] = penalize([one for _, one in penalized], logits[at])
    forced = [(row, token) for row, one in rows if (token := one.forced) is not None]
    if forced:
        thinking, closing = torch.tensor(forced, device=device).T
        logits[thinking, closing] = 0
    if masks is not None:
        masked = [row for row, one in rows if one.matcher is not None]
        forbidden = masks.result()
        if len(masked) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            at = torch.tensor(masked, device=device)
            logits[at] = logits[at].masked_fill_(forbidden, -torch.inf)
    if forced:
        others = torch.arange(logits.shape[-1], device=device) != closing[:, None]
        allowed = logits[thinking, closing].isfinite()[:, None]
        logits[thinking] = logits[thinking].masked_fill_(others & allowed, -torch.inf)
    return logits


def penalize(processors: Items[LogitsProcessor], logits: Tensor) -> Tensor:
    """Return logits [n, vocabulary] with the penalties of each row.

    Repetition divides positive logits of tokens that occurred and multiplies negative ones (Keskar et al., 2019);
    frequency is subtracted for each time that the answer has a token, presence once. Finite logits stay finite.
    """
    device = logits.device
    counts = torch.zeros_like(logits)
    drawn = torch.from_numpy(np.concatenate([np.array(one.drawn, np.int64) for one in processors])).to(device)
    counts.index_put_((_rows([len(one.drawn) for one in processors], device), drawn), counts.new_ones(()), True)
    prompts = [one.prompt_ids(device) for one in processors]
    occurred = counts > 0
    occurred[_rows([len(ids) for ids in prompts], device), torch.cat(prompts)] = True
    sampling = [one.sampling for one in processors]
    parameters = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in sampling]
    repetition, frequency, presence = torch.tensor(parameters, device=device, dtype=torch.float32).T[:, :, None]
    # A tiny penalty is zero in float32, by which -inf of a banned token would become NaN; quotients may overflow.
    finite = torch.finfo(torch.float32)
    repetition = repetition.clamp_min(finite.tiny)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition).clamp_max(finite.max)
    penalized: Tensor = torch.where(occurred, repeated, logits) - frequency * counts - presence * (counts > 0)
    return penalized


def _rows(lengths: list[int], device: torch.device) -> Tensor:
    """Return the number of each row as often as it has entries."""
    return torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
