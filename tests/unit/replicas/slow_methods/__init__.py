"""What each method keeps of a prompt and how its cache decodes: slow, obvious definitions to check the fast ones by.

Every method that scores is the same three steps: positions always kept at both ends of the prompt, scores of the
candidates between them, and a choice of as many candidates as the budget leaves. Ties go to the lower position.

A method is a module here, of its name. KEPT are policies whose kept positions are compared with the fast ones', SERVED
those whose answers are. What differs from the three steps above is a function of one of these names:

    ends(spec, budget) -> (first, last): tokens at the beginning and at the end that are always kept, none by default
    scores(spec, layer, head, window, inv_freq) -> a score of every token; `window` is what is kept at the end
    choose(spec, scores, left) -> positions by head, `left` of each on average; by default the best of each
    layer_budgets(spec, layers, budget) -> tokens that each layer keeps; by default the same
    selects(spec, tokens, budget) -> whether anything is selected; by default where the prompt exceeds the budget
    kept_by_head(spec, layer, head, special, punctuation) -> positions, instead of all this
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NONE: AbstractSet[int] = frozenset()
NAMES = [module.name for module in pkgutil.iter_modules(__path__)]
"""Methods that are defined here."""


def definition(name: str) -> ModuleType:
    """Return the module that defines a method."""
    return import_module(f"{__name__}.{name}")


def cases(kind: str) -> list[str]:
    """Return the policies that all definitions name as KEPT or SERVED."""
    return [policy for name in NAMES for policy in getattr(definition(name), kind)]


@dataclass
class LayerView:
    """One layer of one prompt, everything after rotation."""

    queries: Tensor  # [q_heads, T, d]
    keys: Tensor  # [kv_heads, T, d]
    values: Tensor  # [kv_heads, T, d]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        return self.queries.shape[0] // self.kv_heads

    def members(self, head: int) -> range:
        """Return the query heads that read this KV head."""
        return range(head * self.group, (head + 1) * self.group)


def kept(
    spec: Any,
    layers: list[LayerView],
    *,
    inv_freq: Tensor,
    special: AbstractSet[int] = NONE,
    punctuation: AbstractSet[int] = NONE,
    separators: AbstractSet[int] = NONE,
) -> list[list[list[int]]]:
    """Return [layer][kv head] -> ascending positions; special, punctuation and separators are the prompt's."""
    tokens, method = layers[0].tokens, definition(spec.name)
    if not hasattr(method, "scores"):
        assert not spec.protect, f"{spec.name} does not score"
        assert not spec.shots, f"{spec.name} does not score"
    if hasattr(method, "kept_by_head"):
        return [
            [method.kept_by_head(spec, layer, head, special, punctuation) for head in range(layer.kv_heads)]
            for layer in layers
        ]
    budget = min(resolve(spec, tokens), tokens)
    if not (method.selects(spec, tokens, budget) if hasattr(method, "selects") else budget < tokens):
        return [everything(layer) for layer in layers]
    return [
        kept_in_layer(spec, layer, layer_budget, inv_freq, separators)
        for layer, layer_budget in zip(layers, layer_budgets(spec, layers, budget), strict=True)
    ]


def everything(layer: LayerView) -> list[list[int]]:
    return [list(range(layer.tokens)) for _ in range(layer.kv_heads)]


def resolve(spec: Any, tokens: int) -> int:
    """Return the budget in tokens."""
    if isinstance(spec.budget, int):
        return spec.budget
    return max((spec.sinks or 0) + 1, math.ceil(round(spec.budget * tokens, 6)))


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    """Return budget of each layer, windows and protected ends included."""
    method = definition(spec.name)
    if not hasattr(method, "layer_budgets"):
        return [budget] * len(layers)
    parts: list[int] = method.layer_budgets(spec, layers, budget)
    if spec.decode == "ring" and min(parts) <= spec.sinks:  # a ring needs room behind its sinks
        return [budget] * len(layers)
    return parts


# Attention of the prompt on itself


def attention_row(layer: LayerView, member: int, query: int) -> list[float]:
    """Return causal attention of one query of one query head on all positions; zero behind the query."""
    keys = layer.keys[member // layer.group, : query + 1].double()
    logits = keys @ layer.queries[member, query].double() / math.sqrt(keys.shape[1])
    return logits.softmax(0).tolist() + [0.0] * (layer.tokens - query - 1)


def received(layer: LayerView, head: int, queries: int) -> list[float]:
    """What each position gets from the last `queries` queries of all query heads of the group together."""
    total = [0.0] * layer.tokens
    for member in layer.members(head):
        for query in range(layer.tokens - queries, layer.tokens):
            for position, weight in enumerate(attention_row(layer, member, query)):
                total[position] += weight
    return total


def mean_and_variance(layer: LayerView, member: int, window: int) -> tuple[list[float], list[float]]:
    """Return the moments of attention that each position gets from the last `window` queries of one query head."""
    rows = [attention_row(layer, member, query) for query in range(layer.tokens - window, layer.tokens)]
    means = [sum(column) / window for column in zip(*rows, strict=True)]
    variances = [
        sum((weight - mean) ** 2 for weight in column) / max(1, window - 1)
        for mean, column in zip(means, zip(*rows, strict=True), strict=True)
    ]
    return means, variances


def pooled(scores: list[float], kernel: int, pooling: str) -> list[float]:
    assert kernel % 2, "an even kernel has no middle"
    half = kernel // 2
    result = []
    for middle in range(len(scores)):
        near = scores[max(middle - half, 0) : middle + half + 1]
        result.append(sum(near) / kernel if pooling == "avg" else max(near))
    return result


# One layer: always kept, scores of the candidates, choice


def kept_in_layer(
    spec: Any, layer: LayerView, budget: int, inv_freq: Tensor, separators: AbstractSet[int]
) -> list[list[int]]:
    tokens = layer.tokens
    if budget >= tokens:
        return everything(layer)
    ends = reserved(spec, budget)

    method = definition(spec.name)
    own_front, own_end = method.ends(spec, budget) if hasattr(method, "ends") else (0, 0)
    if spec.decode == "ring":
        own_front = spec.sinks or 0
    window = min(own_end, budget - ends)  # queries that vote
    front = min(max(ends, own_front), budget - ends)
    end = max(min(window, budget - front), ends)
    if spec.decode == "ring":  # sinks come before protection
        front = max(front, min(own_front, budget - 1))
        end = min(end, budget - front)

    candidates = range(front, tokens - end)
    left = budget - front - end
    if not left:
        return [[*range(front), *range(tokens - end, tokens)] for _ in range(layer.kv_heads)]
    scores = []
    for head in range(layer.kv_heads):
        values = method.scores(spec, layer, head, window, inv_freq)
        scores.append({position: values[position] for position in candidates})
    if hasattr(method, "choose"):
        assert not spec.shots, "whole shots and budgets shared over heads exclude each other"
        chosen = method.choose(spec, scores, left)
    elif spec.shots:
        chosen = whole_spans(scores, left, separators)
    else:
        chosen = [best(head_scores, left) for head_scores in scores]
    return [sorted([*range(front), *positions, *range(tokens - end, tokens)]) for positions in chosen]


def reserved(spec: Any, capacity: int) -> int:
    """Return positions protected at each end: a share of the cache rounded down, four at least, half of it at most."""
    if not spec.protect:
        return 0
    return min(max(4, math.floor(round(spec.protect * capacity, 6))), capacity // 2)


def best(scores: dict[int, float], count: int) -> list[int]:
    """Return the positions of the highest scores."""
    return sorted(scores, key=lambda position: (-scores[position], position))[:count]


def whole_spans(scores: list[dict[int, float]], left: int, separators: AbstractSet[int]) -> list[list[int]]:
    """Return shotKV: in every head the same whole spans, by mean score over all heads, then single positions of its
    own.
    """
    spans: list[list[int]] = []
    for position in sorted(scores[0]):
        if spans and spans[-1][-1] == position - 1 and position - 1 not in separators:
            spans[-1].append(position)
        else:
            spans.append([position])

    def score(span: list[int]) -> float:
        return sum(own[position] for own in scores for position in span) / len(span)

    chosen: list[int] = []
    for span in sorted(spans, key=score, reverse=True):
        if len(chosen) + len(span) <= left:
            chosen += span
    others = [{position: score for position, score in own.items() if position not in chosen} for own in scores]
    return [chosen + best(own, left - len(chosen)) for own in others]


# Decode


@dataclass(eq=False)
class Entry:
    unrotated: Tensor  # key [d] before rotation
    key: Tensor  # after rotation
    value: Tensor
    position: int
    score: float = 0.0


@dataclass
class SlowCache:
    """What one KV head of one layer keeps, and which entry a new token replaces once `limit` entries are there.

    append: none.
    ring: the oldest that is not one of the first `sinks` entries of the prompt.
    argmin: the one with the smallest score that is not among the last `recent` tokens, the new one included. Scores
    are the attention an entry got: of all steps (accumulate) or of the last step alone.
    Neither gives up the first `protected` tokens of the sequence (structural protection).
    """

    rule: str = "append"  # append, ring, argmin
    limit: int = 0
    sinks: int = 0
    recent: int = 1
    protected: int = 0
    accumulate: bool = True
    averaged: bool = False  # scores are averaged over all heads of the layer, which hold the same positions (TOVA)
    entries: list[Entry] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # positions the prompt left here, ascending

    def fill(self, unrotated: Tensor, keys: Tensor, values: Tensor, positions: list[int], scores: list[float]) -> None:
        """What is kept of the prompt; tensors [n, d], and all lists in step with them."""
        assert not self.entries
        assert self.rule == "append" or len(positions) <= self.limit
        for parts in zip(unrotated, keys, values, positions, scores, strict=True):
            self.entries.append(Entry(*parts))
        self.prompt = sorted(positions)

    def add(self, unrotated: Tensor, key: Tensor, value: Tensor, position: int) -> None:
        """A new token, before it attends."""
        entry = Entry(unrotated, key, value, position)
        if len(self.prompt) < max(self.sinks, self.protected):  # a prompt shorter than that
            self.prompt.append(position)
        if self.rule == "append" or len(self.entries) < self.limit:
            self.entries.append(entry)
        else:
            self.entries[self.victim(position)] = entry

    def victim(self, newest: int) -> int:
        """Return the slot of the entry that leaves for a token at position `newest`."""
        by_age = sorted(range(len(self.entries)), key=lambda slot: self.entries[slot].position)  # oldest first
        if self.rule == "ring":
            sinks = self.prompt[: max(self.sinks, self.protected)]
            return next(slot for slot in by_age if self.entries[slot].position not in sinks)
        assert self.rule == "argmin", self.rule
        assert self.recent <= self.limit
        return min(by_age, key=lambda slot: (self.is_spared(slot, newest), self.entries[slot].score))

    def is_spared(self, slot: int, newest: int) -> bool:
        return not self.protected <= self.entries[slot].position <= newest - self.recent

    def rotate_at_index(self, rotate: Callable[[Tensor, int], Tensor]) -> None:
        """StreamingLLM: every key rotated anew at its index within the cache."""
        for index, entry in enumerate(sorted(self.entries, key=lambda entry: entry.position)):
            entry.key = rotate(entry.unrotated, index)

    def positions(self) -> list[int]:
        return sorted(entry.position for entry in self.entries)


def attend(caches: list[SlowCache], queries: Tensor) -> Tensor:
    """Return queries [q_heads, d] of one token after rotation on the caches of all KV heads of a layer; returns
    [q_heads, d].

    The token's own entry is in the caches already. Scores of the entries are brought up to date.
    """
    group = len(queries) // len(caches)
    outputs = []
    for head, cache in enumerate(caches):
        keys = torch.stack([entry.key for entry in cache.entries])
        values = torch.stack([entry.value for entry in cache.entries])
        summed = torch.zeros(len(keys), dtype=torch.float64)  # over the group
        for query in queries[head * group : (head + 1) * group]:
            weights = (keys @ query / math.sqrt(len(query))).double().softmax(dim=0)
            outputs.append(weights.to(values.dtype) @ values)
            summed += weights
        probabilities = summed.tolist()
        if cache.rule == "argmin":
            for entry, probability in zip(cache.entries, probabilities, strict=True):
                entry.score = probability + (entry.score if cache.accumulate else 0.0)
    if caches[0].averaged:
        assert all(cache.positions() == caches[0].positions() for cache in caches)
        for entry in caches[0].entries:
            everywhere = [other for cache in caches for other in cache.entries if other.position == entry.position]
            average = sum(other.score for other in everywhere) / len(queries)
            for other in everywhere:
                other.score = average
    return torch.stack(outputs)
