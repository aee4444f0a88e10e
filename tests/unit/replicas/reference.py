"""Slow, obvious decoding under a policy, written from the papers, on plain transformers.

The prompt is computed whole with explicit attention; keys are taken before rotation by calling the projections; each
KV head keeps a Python list of entries, and every decode step attends by explicit loops over heads and entries.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from tests.unit.replicas.slow_methods import (
    Entry,
    LayerView,
    SlowCache,
    attend,
    kept,
    received,
    reserved,
    resolve,
    rocketkv,
)
from tests.unit.replicas.slow_methods.tova import last_query_average
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policy_spec import PolicySpec


def roundtrip(storage: StorageFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, d] as they come back from storage; n is a multiple of the storage's group."""
    back = storage.from_basis(storage.decode_keys(storage.encode_keys(keys), keys.dtype))
    return back, storage.from_basis(storage.decode_values(storage.encode_values(values), values.dtype))


class StoredCache(SlowCache):
    """A cache whose entries each go through storage as they are put in."""

    storage: StorageFormat

    def fill(self, unrotated: Tensor, keys: Tensor, values: Tensor, positions: list[int], scores: list[float]) -> None:
        keys, values = roundtrip(self.storage, keys, values)
        super().fill(unrotated, keys, values, positions, scores)

    def add(self, unrotated: Tensor, key: Tensor, value: Tensor, position: int) -> None:
        keys, values = roundtrip(self.storage, key[None], value[None])
        super().add(unrotated, keys[0], values[0], position)


class GroupedCache(SlowCache):
    """Entries are packed in groups; the most recent ones wait until they are a group."""

    storage: StorageFormat
    residual: int

    def fill(self, unrotated: Tensor, keys: Tensor, values: Tensor, positions: list[int], scores: list[float]) -> None:
        super().fill(unrotated, keys, values, positions, scores)
        self.front, self.waiting = [], self.entries  # entries: front, then packed, then waiting
        if self.rule == "ring":
            self.front, self.waiting = self.waiting[: self.sinks], self.waiting[self.sinks :]
        room = self.limit - self.sinks - self.residual
        self.most_packed = room // self.storage.group * self.storage.group if self.rule != "append" else 10**9
        self.most_waiting = self.residual + (room % self.storage.group if self.rule != "append" else 0)
        self.packed: list[Entry] = []
        while len(self.waiting) > self.most_waiting:
            self.pack(0)
        self.entries = [*self.front, *self.packed, *self.waiting]

    def pack(self, newest: int) -> None:
        fresh, self.waiting = self.waiting[: self.storage.group], self.waiting[self.storage.group :]
        if len(self.packed) < self.most_packed:
            self.packed += fresh
        elif self.rule == "ring":  # the oldest group leaves that holds nothing protected
            groups = math.ceil(max(0, self.protected - self.sinks) / self.storage.group)
            first = min(groups * self.storage.group, self.most_packed - self.storage.group)
            self.packed = self.packed[:first] + self.packed[first + self.storage.group :] + fresh
        else:
            by_score = sorted(
                self.packed,
                key=lambda entry: (not self.protected <= entry.position <= newest - self.recent, entry.score),
            )
            places = [self.packed.index(entry) for entry in by_score[: self.storage.group]]
            for place, entry in zip(places, fresh, strict=True):
                self.packed[place] = entry
        for first in range(0, len(self.packed), self.storage.group):
            group = self.packed[first : first + self.storage.group]
            keys, values = roundtrip(
                self.storage, torch.stack([e.key for e in group]), torch.stack([e.value for e in group])
            )
            for entry, key, value in zip(group, keys, values, strict=True):
                entry.key, entry.value = key, value

    def add(self, unrotated: Tensor, key: Tensor, value: Tensor, position: int) -> None:
        if len(self.waiting) == self.most_waiting:
            self.pack(position)
        self.waiting = [*self.waiting, Entry(unrotated, key, value, position)]
        self.entries = [*self.front, *self.packed, *self.waiting]


class Reference:
    """Greedy decoding of one sequence under a policy, one token at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.model.layers
        self.segments: tuple[int, int, int] | None = None  # of rocketkv
        config = model.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [heads, n, d] rotated at positions [n]."""
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        first, second = x.chunk(2, dim=-1)
        return x * cos[0] + torch.cat([-second, first], dim=-1) * sin[0]

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys [heads, n, d] before rotation and values of hidden [n, width]."""
        attention = layer.self_attn
        q, k, v = (
            p(hidden).view(len(hidden), -1, self.head_dim)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Return q [q_heads, n, d] on k, v [kv_heads, m, d]; returns [n, q_heads * d]."""
        group = q.shape[0] // k.shape[0]
        heads = []
        for head in range(q.shape[0]):
            logits = q[head] @ k[head // group].T / math.sqrt(self.head_dim)
            if causal:
                logits = logits + torch.full_like(logits, float("-inf")).triu(1)
            heads.append(logits.softmax(-1) @ v[head // group])
        return torch.stack(heads, dim=1).flatten(1)

    def block(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    @torch.no_grad()
    def generate(
        self, prompt: list[int], new: int, spec: PolicySpec, **classes: AbstractSet[int]
    ) -> tuple[list[int], list[Tensor]]:
        """Return greedy tokens and the logits [vocabulary] each was drawn from."""
        hidden = self.model.model.embed_tokens(torch.tensor(prompt))
        positions = torch.arange(len(prompt))
        views, unrotated = [], []
        for layer in self.layers:
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            views.append(LayerView(self.rotate(q, positions), self.rotate(k, positions), v))
            unrotated.append(k)
            hidden = self.block(layer, hidden, self.attend(views[-1].queries, views[-1].keys, v, causal=True))
        inv_freq = self.model.model.rotary_emb.inv_freq.double()
        chosen = kept(spec, views, inv_freq=inv_freq, **classes)
        caches = [
            [self.cache(spec, view, keys, head, chosen[at][head]) for head in range(view.kv_heads)]
            for at, (view, keys) in enumerate(zip(views, unrotated, strict=True))
        ]
        self.segments = None
        if spec.name == "rocketkv" and resolve(spec, len(prompt)) < len(prompt):
            self.segments = rocketkv.segments(len(prompt), resolve(spec, len(prompt)), self.head_dim)
        logits = [self.model.lm_head(self.model.model.norm(hidden[-1]))]
        tokens = [int(logits[-1].argmax())]
        for step in range(new - 1):
            logits.append(self.decode(tokens[-1], len(prompt) + step, caches, spec))
            tokens.append(int(logits[-1].argmax()))
        return tokens, logits

    @staticmethod
    def attend_segments(caches: list[SlowCache], queries: Tensor, segment: int, reads: int, channels: int) -> Tensor:
        group, found = len(queries) // len(caches), []
        for head, cache in enumerate(caches):
            entries = [entry.key for entry in cache.entries], [entry.value for entry in cache.entries]
            mine = queries[head * group : (head + 1) * group]
            found.append(rocketkv.attend(mine, *entries, segment, reads, channels))
        return torch.cat(found)

    def cache(self, spec: PolicySpec, view: LayerView, unrotated: Tensor, head: int, positions: list[int]) -> SlowCache:
        """Return one KV head's cache at the hand-off."""
        cache = SlowCache()
        if spec.storage_format.group > 1 and self.limit(spec, view, positions) - (
            spec.sinks or 0 if spec.decode == "ring" else 0
        ) >= spec.residual + (spec.storage_format.group if spec.decode != "append" else 1):
            cache = GroupedCache()
            cache.storage, cache.residual = spec.storage_format, spec.residual
        elif spec.storage != "model" and spec.storage_format.group == 1:
            cache = StoredCache()
            cache.storage = spec.storage_format
        cache.rule, cache.limit = spec.decode, self.limit(spec, view, positions)
        cache.sinks = (spec.sinks or 0) if spec.decode == "ring" else 0
        cache.protected = 0 if spec.decode == "append" else reserved(spec, cache.limit)
        cache.recent = cache.limit - math.floor(cache.limit * spec.heavy) if spec.heavy is not None else 1
        cache.recent = max(cache.recent, cache.protected)
        cache.recent = min(cache.recent, cache.limit - cache.protected)  # the beginning comes first
        cache.accumulate = spec.name != "tova"
        cache.averaged = spec.name == "tova" and spec.decode == "argmin" and not spec.per_head
        looked_at = 0
        if spec.name == "h2o":
            looked_at = view.tokens
        elif spec.name == "tova":
            looked_at = 1
        elif spec.window is not None and len(positions) < view.tokens and spec.window < resolve(spec, view.tokens):
            looked_at = spec.window
        scores = received(view, head, looked_at) if looked_at else [0.0] * view.tokens
        if cache.averaged:
            scores = last_query_average(view)
        cache.fill(
            unrotated[head, positions],
            view.keys[head, positions],
            view.values[head, positions],
            positions,
            [scores[position] for position in positions],
        )
        return cache

    @staticmethod
    def limit(spec: PolicySpec, view: LayerView, positions: list[int]) -> int:
        if spec.decode == "append":
            return 10**9
        return len(positions) if len(positions) < view.tokens else max(resolve(spec, view.tokens), view.tokens)

    def rotate_one(self, key: Tensor, position: int) -> Tensor:
        return self.rotate(key[None, None], torch.tensor([position]))[0, 0]

    def rotate_sinks_on(self, cache: SlowCache, dropped: int) -> None:
        by_age = sorted(cache.entries, key=lambda entry: entry.position)
        for index, entry in enumerate(by_age[: cache.sinks]):
            entry.key = self.rotate_one(entry.unrotated, index + dropped)
            if isinstance(cache, StoredCache):
                entry.key = roundtrip(cache.storage, entry.key[None], entry.value[None])[0][0]

    def decode(self, token: int, position: int, caches: list[list[SlowCache]], spec: PolicySpec) -> Tensor:
        hidden = self.model.model.embed_tokens(torch.tensor([token]))
        for layer, heads in zip(self.layers, caches, strict=True):
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            rotated = self.rotate(k, torch.tensor([position]))
            for head, cache in enumerate(heads):
                cache.add(k[head, 0], rotated[head, 0], v[head, 0], position)
            at = position
            if spec.name == "streaming_llm" and spec.storage == "model":  # positions within the cache
                for cache in heads:
                    cache.rotate_at_index(self.rotate_one)
                at = len(heads[0].entries) - 1
            elif spec.name == "streaming_llm":  # the same distances, but what is stored keeps its rotation
                for cache in heads:
                    self.rotate_sinks_on(cache, position - len(cache.entries) + 1)
            query = self.rotate(q, torch.tensor([at]))[:, 0]
            attended = (
                attend(heads, query) if self.segments is None else self.attend_segments(heads, query, *self.segments)
            )
            hidden = self.block(layer, hidden, attended.flatten()[None])
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden[-1]))
        return logits
