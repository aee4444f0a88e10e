"""What each method keeps of a prompt and how its cache decodes: slow, obvious definitions to check the fast ones by.

Every method that scores is the same three steps: positions always kept at both ends of the prompt, scores of the
candidates between them, and a choice of as many candidates as the budget leaves. Ties go to the lower position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

NONE: AbstractSet[int] = frozenset()


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
        """The query heads that read this KV head."""
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
    """[layer][kv head] -> ascending positions; special, punctuation and separators are positions of the prompt."""
    tokens = layers[0].tokens
    if spec.name in ("full", "window", "streaming_llm", "fastgen"):
        assert not spec.protect, f"{spec.name} does not score"
        assert not spec.shots, f"{spec.name} does not score"
    if spec.name == "fastgen":
        return [[fastgen(spec, layer, h, special, punctuation) for h in range(layer.kv_heads)] for layer in layers]
    budget = tokens if spec.name == "full" else resolve(spec, tokens)
    budget = min(budget, tokens)
    if budget == tokens and (spec.name != "adaptive" or tokens <= spec.window):
        return [everything(layer) for layer in layers]
    if spec.name in ("window", "streaming_llm"):
        sinks = min(spec.sinks, budget) if spec.name == "streaming_llm" else 0
        positions = [*range(sinks), *range(tokens - (budget - sinks), tokens)]
        return [[list(positions) for _ in range(layer.kv_heads)] for layer in layers]
    return [
        kept_in_layer(spec, layer, layer_budget, inv_freq, separators)
        for layer, layer_budget in zip(layers, layer_budgets(spec, layers, budget), strict=True)
    ]


def everything(layer: LayerView) -> list[list[int]]:
    return [list(range(layer.tokens)) for _ in range(layer.kv_heads)]


def resolve(spec: Any, tokens: int) -> int:
    """The budget in tokens."""
    if isinstance(spec.budget, int):
        return spec.budget
    needs_sinks = spec.decode == "ring" or spec.name == "expected_attention"
    least = (spec.sinks or 0) + 1 if needs_sinks else 1
    return max(least, math.ceil(round(spec.budget * tokens, 6)))


# Attention of the prompt on itself


def attention_row(layer: LayerView, member: int, query: int) -> list[float]:
    """Causal attention of one query of one query head on all positions; zero behind the query."""
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


def last_query_average(layer: LayerView) -> list[float]:
    """What each position gets from the last query, averaged over all query heads of the layer."""
    rows = [attention_row(layer, member, layer.tokens - 1) for member in range(len(layer.queries))]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def mean_and_variance(layer: LayerView, member: int, window: int) -> tuple[list[float], list[float]]:
    """Of the attention that each position gets from the last `window` queries, a sample, of one query head."""
    rows = [attention_row(layer, member, query) for query in range(layer.tokens - window, layer.tokens)]
    means = [sum(column) / window for column in zip(*rows, strict=True)]
    variances = [
        sum((weight - mean) ** 2 for weight in column) / max(1, window - 1)
        for mean, column in zip(means, zip(*rows, strict=True), strict=True)
    ]
    return means, variances


# Budget of each layer, windows and protected ends included


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    if spec.name in ("pyramidkv", "cake"):
        if spec.name == "pyramidkv":
            parts = pyramid_budgets(spec, len(layers), layers[0].tokens, budget)
        else:
            parts = cake_budgets(spec, layers, budget)
        if spec.decode == "ring" and min(parts) <= spec.sinks:  # a ring needs room behind its sinks
            return [budget] * len(layers)
        return parts
    if spec.name == "adaptive":
        return [adaptive_budget(spec, layers, budget)] * len(layers)
    if spec.name == "rocketkv":
        tokens = layers[0].tokens
        ratio = tokens / budget
        alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
        return [math.floor(round(tokens / ratio**alpha, 6))] * len(layers)
    return [budget] * len(layers)


def pyramid_budgets(spec: Any, layers: int, tokens: int, budget: int) -> list[int]:
    window = spec.window
    if budget <= window or layers == 1 or tokens < 2 * (budget - window):  # short prompts: flat
        return [budget] * layers
    lowest = (budget - window) // spec.beta
    highest = 2 * (budget - window) - lowest
    if highest >= tokens - window:
        highest = tokens - window
        lowest = 2 * (budget - window) - highest
    step = (highest - lowest) // (layers - 1)
    rest = (highest - lowest) - step * (layers - 1)  # the paper leaves it on every layer, which breaks the total
    return [highest - math.ceil(rest / 2) - layer * step + window for layer in range(layers)]


def cake_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    window = min(spec.window, budget)
    prefix = layers[0].tokens - window
    preferences = []
    for layer in layers:
        entropy = spread = 0.0
        for member in range(len(layer.queries)):
            for query in range(layer.tokens - window, layer.tokens):
                entropy -= sum(
                    part * math.log(part) for part in attention_row(layer, member, query)[:prefix] if part > 0
                )
            spread += sum(mean_and_variance(layer, member, window)[1][:prefix])
        preferences.append(entropy ** (1 / spec.tau1) * spread ** (1 / spec.tau2))
    shares = share_out(len(layers) * (budget - window), preferences, prefix)
    return [share + window for share in shares]


def share_out(total: int, preferences: list[float], most: int) -> list[int]:
    """`total` in proportion to the preferences, none above `most`, rounded by largest remainders."""
    shares: dict[int, float] = {}
    open_ = list(range(len(preferences)))
    while True:
        left = total - sum(shares.values())
        weight = sum(preferences[i] for i in open_)
        wanted = {i: left * preferences[i] / weight if weight > 0 else left / len(open_) for i in open_}
        capped = [i for i in open_ if wanted[i] > most]
        if not capped:
            shares.update(wanted)
            break
        shares.update(dict.fromkeys(capped, most))
        open_ = [i for i in open_ if i not in capped]
        if not open_:
            break
    rounded = [math.floor(shares[i]) for i in range(len(preferences))]
    by_remainder = sorted(range(len(preferences)), key=lambda i: -(shares[i] - rounded[i]))
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded


def adaptive_budget(spec: Any, layers: list[LayerView], budget: int) -> int:
    """The smallest budget whose kept window attention reaches the target, within its bounds."""
    tokens = layers[0].tokens
    window = min(spec.window, budget)
    sinks = spec.sinks if spec.decode == "ring" else 0
    least = min(max(window + 1, sinks + 1, math.ceil(round(spec.least * tokens, 6))), budget)
    votes, inside = [], []  # for each layer and KV head
    for layer in layers:
        for head in range(layer.kv_heads):
            mass = received(layer, head, window)
            votes.append(sorted(mass[: tokens - window], reverse=True))
            inside.append(sum(mass[tokens - window :]))
    for count in range(tokens - window + 1):
        covered = sum((sum(v[:count]) + i) / (layers[0].group * window) for v, i in zip(votes, inside, strict=True))
        if covered / len(votes) >= spec.target:
            break
    return min(max(count + window, least), budget)


# One layer: always kept, scores of the candidates, choice


def kept_in_layer(
    spec: Any, layer: LayerView, budget: int, inv_freq: Tensor, separators: AbstractSet[int]
) -> list[list[int]]:
    tokens = layer.tokens
    if budget >= tokens:
        return everything(layer)
    ends = reserved(spec, budget)

    own_front, own_end = 0, 0  # what the method itself always keeps
    if spec.name == "h2o":
        own_end = budget - math.floor(budget * spec.heavy)
    elif spec.name == "expected_attention":
        own_front = spec.sinks
    elif spec.name not in ("tova", "knorm", "keydiff"):
        own_end = spec.window
    if spec.decode == "ring":
        own_front = spec.sinks
    window = min(own_end, budget - ends)  # queries that vote
    front = min(max(ends, own_front), budget - ends)
    end = max(min(window, budget - front), ends)
    if spec.decode == "ring":  # sinks come before protection
        front = max(front, min(spec.sinks, budget - 1))
        end = min(end, budget - front)

    candidates = range(front, tokens - end)
    left = budget - front - end
    if not left:
        return [[*range(front), *range(tokens - end, tokens)] for _ in range(layer.kv_heads)]
    scores = [candidate_scores(spec, layer, head, candidates, window, inv_freq) for head in range(layer.kv_heads)]
    if spec.name == "adakv":
        assert not spec.shots, "whole shots and budgets shared over heads exclude each other"
        chosen = best_over_heads(scores, left, spec.floor)
    elif spec.shots:
        chosen = whole_spans(scores, left, separators)
    else:
        chosen = [best(head_scores, left) for head_scores in scores]
    return [sorted([*range(front), *positions, *range(tokens - end, tokens)]) for positions in chosen]


def reserved(spec: Any, capacity: int) -> int:
    """Positions protected at each end: a share of the cache rounded down, four at least, half of it at most."""
    if not spec.protect:
        return 0
    return min(max(4, math.floor(round(spec.protect * capacity, 6))), capacity // 2)


def best(scores: dict[int, float], count: int) -> list[int]:
    """The positions of the highest scores."""
    return sorted(scores, key=lambda position: (-scores[position], position))[:count]


def best_over_heads(scores: list[dict[int, float]], left: int, floor: float) -> list[list[int]]:
    """AdaKV: heads keep what they win of the layer's best, drawn towards an even share by the safeguard."""
    everything = [(-score, head, position) for head, own in enumerate(scores) for position, score in own.items()]
    winners = [head for _, head, _ in sorted(everything)[: len(scores) * left]]
    alpha = Fraction(str(floor))
    wanted = {head: (1 - alpha) * winners.count(head) + alpha * left for head in range(len(scores))}
    counts = {head: math.floor(share) for head, share in wanted.items()}
    while sum(counts.values()) < len(scores) * left:  # whoever was cut most gets one
        counts[max(wanted, key=lambda head: (wanted[head] - counts[head], -head))] += 1
    return [best(scores[head], counts[head]) for head in counts]


def whole_spans(scores: list[dict[int, float]], left: int, separators: AbstractSet[int]) -> list[list[int]]:
    """ShotKV: in every head the same whole spans, by mean score over all heads, then single positions of its own."""
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


# Scores


def candidate_scores(
    spec: Any, layer: LayerView, head: int, candidates: range, window: int, inv_freq: Tensor
) -> dict[int, float]:
    if spec.name == "h2o":
        scores = received(layer, head, layer.tokens)
    elif spec.name == "tova":
        scores = received(layer, head, 1) if spec.per_head else last_query_average(layer)
    elif spec.name == "knorm":
        scores = [-float(key.double().norm()) for key in layer.keys[head]]
    elif spec.name == "keydiff":
        scores = keydiff(layer, head)
    elif spec.name == "expected_attention":
        scores = expected_attention(spec, layer, head, inv_freq)
    elif spec.name == "cake":
        scores = cake(spec, layer, head, window)
    elif spec.name in ("snapkv", "pyramidkv", "adakv", "rocketkv", "adaptive"):
        scores = received(layer, head, window)
    else:
        raise ValueError(spec.name)
    if spec.name in ("snapkv", "pyramidkv", "adakv", "rocketkv", "adaptive", "cake"):
        scores = pooled(scores[: layer.tokens - window], spec.kernel, spec.pooling)
    return {position: scores[position] for position in candidates}


def pooled(scores: list[float], kernel: int, pooling: str) -> list[float]:
    assert kernel % 2, "an even kernel has no middle"
    half = kernel // 2
    result = []
    for middle in range(len(scores)):
        near = scores[max(middle - half, 0) : middle + half + 1]
        result.append(sum(near) / kernel if pooling == "avg" else max(near))
    return result


def keydiff(layer: LayerView, head: int) -> list[float]:
    directions = [key.double() / key.double().norm() for key in layer.keys[head]]
    anchor = sum(directions, torch.zeros(len(directions[0])).double()) / len(directions)
    return [-float(direction @ anchor / anchor.norm()) for direction in directions]


def cake(spec: Any, layer: LayerView, head: int, window: int) -> list[float]:
    scores = [0.0] * layer.tokens
    for member in layer.members(head):
        means, variances = mean_and_variance(layer, member, window)
        for position in range(layer.tokens):
            scores[position] += means[position] + spec.gamma * variances[position]
    return scores


def rotation(position: int, inv_freq: Tensor) -> Tensor:
    """The matrix [d, d] that rotates a vector to a position: coordinate i turns with coordinate i + d/2."""
    half = len(inv_freq)
    matrix = torch.zeros(2 * half, 2 * half).double()
    for i in range(half):
        angle = position * float(inv_freq[i])
        matrix[i, i] = matrix[half + i, half + i] = math.cos(angle)
        matrix[i, half + i] = -math.sin(angle)
        matrix[half + i, i] = math.sin(angle)
    return matrix


def expected_attention(spec: Any, layer: LayerView, head: int, inv_freq: Tensor) -> list[float]:
    """Attention that normally distributed queries of the next `horizon` positions would give, times |value|."""
    tokens, head_dim = layer.keys.shape[1:]
    scale = 1 / math.sqrt(head_dim)
    window = min(spec.window, tokens - spec.sinks)
    future = torch.zeros(head_dim, head_dim).double()
    for position in range(tokens, tokens + spec.horizon):
        future += rotation(position, inv_freq) / spec.horizon
    scores = [0.0] * tokens
    for member in layer.members(head):
        queries = [  # rotated back to position 0
            rotation(-position, inv_freq) @ layer.queries[member, position].double()
            for position in range(tokens - window, tokens)
        ]
        mean = torch.stack(queries).mean(0)
        covariance = torch.zeros(head_dim, head_dim).double()
        for query in queries:
            covariance += torch.outer(query - mean, query - mean) / window
        mean, covariance = future @ mean, future @ covariance @ future.T
        logits = [scale * mean @ key + scale**2 / 2 * key @ covariance @ key for key in layer.keys[head].double()]
        for position, weight in enumerate(torch.stack(logits[spec.sinks :]).softmax(0).tolist()):
            scores[spec.sinks + position] += weight
    return [score * float(value.double().norm()) for score, value in zip(scores, layer.values[head], strict=True)]


def fastgen(
    spec: Any, layer: LayerView, head: int, special: AbstractSet[int], punctuation: AbstractSet[int]
) -> list[int]:
    """The first set of positions that recovers enough of the attention of the whole prompt."""
    tokens = layer.tokens
    scores = received(layer, head, tokens)
    part = math.ceil(round(0.3 * tokens, 6))
    heavy = best(dict(enumerate(scores)), part)
    recent = range(tokens - part, tokens)
    chosen: set[int] = set()
    additions: list[Iterable[int]] = [special, punctuation, heavy, recent, range(tokens)]
    for addition in additions:
        chosen |= set(addition)
        if sum(scores[position] for position in chosen) / (layer.group * tokens) >= spec.recovery:
            break
    return sorted(chosen | {tokens - 1})


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
        """The slot of the entry that leaves for a token at position `newest`."""
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
    """Queries [q_heads, d] of one token after rotation on the caches of all KV heads of a layer; returns [q_heads, d].

    The token's own entry is in the caches already. Scores of the entries are brought up to date.
    """
    group = len(queries) // len(caches)
    outputs = []
    for head, cache in enumerate(caches):
        probabilities = [0.0] * len(cache.entries)  # summed over the group
        for query in queries[head * group : (head + 1) * group]:
            logits = [float(query @ entry.key) / math.sqrt(len(query)) for entry in cache.entries]
            top = max(logits)
            weights = [math.exp(logit - top) for logit in logits]
            output = torch.zeros_like(cache.entries[0].value)
            for slot, entry in enumerate(cache.entries):
                output = output + weights[slot] / sum(weights) * entry.value
                probabilities[slot] += weights[slot] / sum(weights)
            outputs.append(output)
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
