"""Slow, obvious definitions of the policies, written from the papers, on plain transformers.

The prompt is computed whole with transformers' own eager attention; keys are taken before rotation by hooking the
projections; every decode step rotates all kept keys anew and attends by explicit loops over heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warmkv.config import PolicySpec


def kept_positions(spec: PolicySpec, budget: int, queries: Tensor, keys: Tensor) -> list[list[int]]:
    """Positions each KV head keeps; queries [q_heads, T, d] and keys [kv_heads, T, d] of a layer after rotation."""
    kv_heads, tokens, head_dim = keys.shape
    group = queries.shape[0] // kv_heads
    if budget >= tokens or spec.name == "full":
        return [list(range(tokens)) for _ in range(kv_heads)]
    if spec.name == "streaming_llm":
        return [list(range(spec.sinks)) + list(range(tokens - (budget - spec.sinks), tokens))] * kv_heads
    window = min(spec.window, budget)
    kept = []
    for head in range(kv_heads):
        votes = [0.0] * (tokens - window)
        for member in range(head * group, (head + 1) * group):
            for query in range(tokens - window, tokens):
                logits = [float(queries[member, query] @ keys[head, k]) / math.sqrt(head_dim) for k in range(query + 1)]
                top = max(logits)
                weights = [math.exp(logit - top) for logit in logits]
                for position in range(tokens - window):
                    votes[position] += weights[position] / sum(weights)
        half = spec.kernel // 2
        pooled = []
        for position in range(len(votes)):
            near = [votes[p] if 0 <= p < len(votes) else 0.0 for p in range(position - half, position + half + 1)]
            pooled.append(sum(near) / spec.kernel if spec.pooling == "avg" else max(near))
        best = sorted(range(len(votes)), key=lambda p: -pooled[p])[: budget - window]
        kept.append(sorted(best) + list(range(tokens - window, tokens)))
    return kept


class Reference:
    """Greedy decoding of one sequence under a policy, one token at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.model.layers
        config = model.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [heads, n, d] rotated at positions [n]."""
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        first, second = x.chunk(2, dim=-1)
        return x * cos[0] + torch.cat([-second, first], dim=-1) * sin[0]

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [heads, n, d] before rotation and values of hidden [n, width]."""
        attention = layer.self_attn
        q, k, v = (
            p(hidden).view(len(hidden), -1, self.head_dim)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """q [q_heads, n, d] on k, v [kv_heads, m, d]; returns [n, q_heads * d]."""
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
    def generate(self, prompt: list[int], new: int, spec: PolicySpec, budget: int) -> tuple[list[int], list[Tensor]]:
        """Greedy tokens and the logits [vocabulary] each was drawn from."""
        hidden = self.model.model.embed_tokens(torch.tensor(prompt))
        cache = []  # per layer and KV head: keys before rotation, values, original positions
        positions = torch.arange(len(prompt))
        for layer in self.layers:
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            rotated_q, rotated_k = self.rotate(q, positions), self.rotate(k, positions)
            kept = kept_positions(spec, budget, rotated_q, rotated_k)
            cache.append([(k[h, kept[h]], v[h, kept[h]], list(kept[h])) for h in range(len(kept))])
            hidden = self.block(layer, hidden, self.attend(rotated_q, rotated_k, v, causal=True))
        logits = [self.model.lm_head(self.model.model.norm(hidden[-1]))]
        tokens = [int(logits[-1].argmax())]
        for step in range(new - 1):
            logits.append(self.decode(tokens[-1], len(prompt) + step, cache, spec, budget))
            tokens.append(int(logits[-1].argmax()))
        return tokens, logits

    def decode(self, token: int, position: int, cache: list[Any], spec: PolicySpec, budget: int) -> Tensor:
        hidden = self.model.model.embed_tokens(torch.tensor([token]))
        for layer, heads in zip(self.layers, cache, strict=True):
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            keys, values, query_position = [], [], position
            for head, (old_k, old_v, old_positions) in enumerate(heads):
                new_k, new_v = torch.cat([old_k, k[head]]), torch.cat([old_v, v[head]])
                where = [*old_positions, position]
                if spec.name == "streaming_llm":
                    if len(where) > budget:  # the oldest token behind the sinks leaves
                        drop = spec.sinks
                        new_k = torch.cat([new_k[:drop], new_k[drop + 1 :]])
                        new_v = torch.cat([new_v[:drop], new_v[drop + 1 :]])
                        where = where[:drop] + where[drop + 1 :]
                    at = torch.arange(len(where))  # positions within the cache
                    query_position = len(where) - 1
                else:
                    at = torch.tensor(where)
                heads[head] = (new_k, new_v, where)
                keys.append(self.rotate(new_k[None], at)[0])
                values.append(new_v)
            rotated_q = self.rotate(q, torch.tensor([query_position]))
            hidden = self.block(layer, hidden, self.attend(rotated_q, torch.stack(keys), torch.stack(values), False))
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden[-1]))
        return logits
