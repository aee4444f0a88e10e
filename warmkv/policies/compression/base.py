"""What a compression policy is: which tokens are always kept, and a score for the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warmkv.policies import budgets
from warmkv.policies.compression import shotkv, structural
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.scoring import best, window_sums
from warmkv.policy_spec import PolicySpec

NONE = -1
"""Fills up the positions of a head that keeps fewer than the others."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What one layer keeps of a prompt.

    `positions` int64 [kv_heads, n], ascending, ends filled up with NONE where heads differ. `attention` float32 of the
    same shape is what each kept token received from the queries that were looked at, where the decode rule needs it.
    """

    positions: Tensor
    attention: Tensor | None = None


class Policy:
    """A compression policy for one spec. Stateless: everything about a request is an argument.

    A method overrides `ends` and `score`; one that shares its budget unevenly `layer_budgets` or `choose` too.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    def ends(self, budget: int) -> tuple[int, int]:
        """Tokens at the beginning and at the end of the prompt that are always kept, of a budget of so many."""
        return 0, 0

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        """How much each token of a layer is worth keeping: float32 [kv_heads, T]."""
        raise NotImplementedError

    def layer_budgets(self, prompt: PrefillState) -> list[int]:
        """Tokens per KV head (the average where heads differ) that each layer keeps."""
        return budgets.layer_budgets(self.spec, prompt.tokens, prompt.layers)

    def choose(self, scores: Tensor, ends: tuple[int, int], budget: int, prompt: PrefillState) -> Tensor:
        """Positions [kv_heads, n], ascending, of the best tokens between the ends and of the ends themselves."""
        first, last = ends
        tokens = scores.shape[1]
        between = scores[:, first : tokens - last]
        if self.spec.shots:
            chosen = shotkv.best_units(between, budget - first - last, prompt.members("separators")[first:])
        else:
            chosen = best(between, budget - first - last).sort(dim=-1).values
        head, tail = _ends(tokens, ends, scores.device)
        rows = len(scores)
        return torch.cat([head.expand(rows, -1), chosen + first, tail.expand(rows, -1)], dim=-1)

    def select(self, prompt: PrefillState) -> list[Selection]:
        """What each layer keeps of a prompt."""
        compressed = budgets.is_compressed(self.spec, prompt.tokens)
        kept = self.layer_budgets(prompt) if compressed else [prompt.tokens] * prompt.layers
        return [
            self._select_in(prompt.in_window(layer), layer, budget, compressed) for layer, budget in enumerate(kept)
        ]

    def _select_in(self, prompt: PrefillState, layer: int, budget: int, compressed: bool) -> Selection:
        """Select among the tokens that a layer's window shows."""
        if compressed:
            positions = self.select_layer(prompt, layer, min(budget, prompt.tokens))
        else:
            positions = torch.arange(prompt.tokens, device=prompt.keys.device).expand(prompt.kv_heads, -1)
        selection = self._with_attention(prompt, layer, positions)
        if not prompt.first:
            return selection
        return replace(selection, positions=torch.where(positions < 0, NONE, positions + prompt.first))

    def select_layer(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        """Positions [kv_heads, n] that a layer keeps of a prompt that exceeds its budget."""
        budget = min(budget, prompt.tokens)
        first, last = self.protected_ends(budget)
        whole = first + last >= budget or budget == prompt.tokens
        if prompt.first:  # the prompt's beginning has left the window
            first = 0
        if whole:  # nothing is left to choose
            head, tail = _ends(prompt.tokens, (first, budget - first), prompt.keys.device)
            return torch.cat([head, tail], dim=-1).expand(prompt.kv_heads, -1)
        return self.choose(self.score(prompt, layer, budget), (first, last), budget, prompt)

    def protected_ends(self, budget: int) -> tuple[int, int]:
        """The method's ends, those of a ring's sinks and of structural protection, within the budget."""
        first, last = structural.protect(self.ends(budget), budgets.protected_entries(self.spec, budget), budget)
        if self.spec.decode == "ring":
            first = max(first, min(self.spec.sinks or 0, budget - 1))
        return first, min(last, budget - first)

    def votes_window(self, budget: int) -> int:
        """Last queries that vote: the window, unless a small budget or a protected beginning leaves less room."""
        assert self.spec.window is not None
        return min(self.spec.window, budget - budgets.protected_entries(self.spec, budget))

    def _with_attention(self, prompt: PrefillState, layer: int, positions: Tensor) -> Selection:
        if self.spec.decode != "argmin":
            return Selection(positions)
        received = received_attention(self.spec, prompt, layer)
        return Selection(positions, received.gather(1, positions.clamp(min=0)))


def _ends(tokens: int, ends: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the first and of the last tokens."""
    first, last = ends
    return torch.arange(first, device=device), torch.arange(tokens - last, tokens, device=device)


def received_attention(spec: PolicySpec, prompt: PrefillState, layer: int) -> Tensor:
    """What each token received so far, float32 [kv_heads, T]: from all queries or from those the policy observes.

    Summed over the query heads of each KV head, or over all heads where these keep the same tokens.
    """
    if budgets.needs_column_sums(spec, prompt.tokens):
        assert prompt.column_sums is not None
        return prompt.column_sums[layer]
    if observed := budgets.observed_queries(spec, prompt.tokens):
        sums = window_sums(prompt, layer, min(observed, prompt.tokens))
        return sums.sum(dim=0, keepdim=True).expand_as(sums) if budgets.keeps_alike(spec) else sums
    return torch.zeros(prompt.keys.shape[1:3], dtype=torch.float32, device=prompt.keys.device)
