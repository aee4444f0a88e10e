"""The hand-off: positions that each layer keeps of a computed prompt, by a method's scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warmkv.policies import budgets
from warmkv.policies.compression import shotkv
from warmkv.policies.compression.method import Method
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.scoring import NONE, best
from warmkv.policies.compression.softmax import LOGITS_AT_ONCE


@dataclass(frozen=True, slots=True)
class Selection:
    """What one layer keeps of a prompt.

    `positions` int64 [kv_heads, n], ascending, ends filled up with NONE where heads differ. `attention` float32 of the
    same shape is what each kept token received from the queries that were looked at, where the decode rule needs it.
    `exact` says that there is no NONE, so that nobody has to ask the device.
    """

    positions: Tensor
    attention: Tensor | None = None
    exact: bool = False


def select(method: Method, prompt: PrefillState) -> list[Selection]:
    """Return what each layer keeps of a prompt."""
    if method.delegates:
        return select(method.resolve(prompt.tokens).method, prompt)
    if not budgets.is_compressed(method.spec, prompt.tokens):
        views = [prompt.in_window(layer) for layer in range(prompt.layers)]
        return [_selection(method, view, layer, _all(view), exact=True) for layer, view in enumerate(views)]
    selections: list[Selection] = []
    kept, exact = method.content_budgets(prompt), not method.follows_content
    for layers in _together(method, prompt, kept):
        view = prompt.in_window(layers.start)
        budget = min(kept[layers.start], view.tokens)
        chosen = method.select_layers(view, layers, budget)
        selections += [
            _selection(method, view, layer, each, exact=exact) for layer, each in zip(layers, chosen, strict=True)
        ]
    return selections


def _together(method: Method, prompt: PrefillState, kept: Sequence[int]) -> Iterator[range]:
    """Yield neighbouring layers whose tokens are chosen by the launches of one: as many, and each head for itself."""
    alike = method.has_scores and not method.shares_heads and not method.spec.shots
    most = max(1, LOGITS_AT_ONCE // (prompt.kv_heads * prompt.tokens)) if alike else 1
    begin = 0
    for layer in range(1, prompt.layers + 1):
        if (
            layer == prompt.layers
            or kept[layer] != kept[begin]
            or layer - begin == most
            or prompt.window(layer) != 0
            or prompt.window(begin) != 0
        ):
            yield range(begin, layer)
            begin = layer


def _all(prompt: PrefillState) -> Tensor:
    return torch.arange(prompt.tokens, device=prompt.keys.device).expand(prompt.kv_heads, -1)


def _selection(method: Method, prompt: PrefillState, layer: int, positions: Tensor, *, exact: bool) -> Selection:
    """Return a layer's selection, by positions among the tokens that its window shows."""
    attention = None
    if method.spec.decode == "argmin":
        attention = received_attention(method, prompt, layer).gather(1, positions.clamp(min=0))
    selection = Selection(positions, attention, exact)
    if not prompt.first:
        return selection
    return replace(selection, positions=torch.where(positions < 0, NONE, positions + prompt.first))


def select_layers(method: Method, prompt: PrefillState, layers: range, budget: int) -> list[Tensor]:
    """Return the ends and the best tokens between them, of each layer: positions [kv_heads, n], ascending."""
    budget = min(budget, prompt.tokens)
    first, last = method.protected_ends(budget)
    whole = first + last >= budget or budget == prompt.tokens
    if prompt.first:  # the prompt's beginning has left the window
        first = 0
    if whole:  # nothing is left to choose
        head, tail = _ends(prompt.tokens, (first, budget - first), prompt.keys.device)
        return [torch.cat([head, tail], dim=-1).expand(prompt.kv_heads, -1)] * len(layers)
    scores = [method.score(prompt, layer, budget) for layer in layers]
    chosen = method.choose(scores[0] if len(scores) == 1 else torch.cat(scores), (first, last), budget, prompt)
    return list(torch.split(chosen, prompt.kv_heads))


def choose_per_head(scores: Tensor, ends: tuple[int, int], budget: int, prompt: PrefillState, shots: bool) -> Tensor:
    """Return positions [heads, budget], ascending: the ends and each head's best tokens, or units, between them."""
    first, last = ends
    tokens = scores.shape[1]
    between = scores[:, first : tokens - last]
    if shots:
        chosen = shotkv.best_units(between, budget - first - last, prompt.members("separators")[first:])
    else:
        chosen = best(between, budget - first - last).sort(dim=-1).values
    head, tail = _ends(tokens, ends, scores.device)
    rows = len(scores)
    return torch.cat([head.expand(rows, -1), chosen + first, tail.expand(rows, -1)], dim=-1)


def _ends(tokens: int, ends: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions of the first and of the last tokens."""
    first, last = ends
    return torch.arange(first, device=device), torch.arange(tokens - last, tokens, device=device)


def received_attention(method: Method, prompt: PrefillState, layer: int) -> Tensor:
    """Return what each token received so far, float32 [kv_heads, T]: from all queries or from those observed.

    Summed over the query heads of each KV head, or over all heads where these keep the same tokens.
    """
    if budgets.needs_column_sums(method.spec, prompt.tokens):
        assert prompt.column_sums is not None
        return prompt.column_sums[layer]
    if observed := budgets.observed_queries(method.spec, prompt.tokens):
        sums = prompt.window_sums(layer, min(observed, prompt.tokens))
        return sums.sum(dim=0, keepdim=True).expand_as(sums) if method.keeps_alike() else sums
    return torch.zeros(prompt.keys.shape[1:3], dtype=torch.float32, device=prompt.keys.device)
