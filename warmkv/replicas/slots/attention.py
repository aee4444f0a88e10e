"""Attention of one query per row: a row is one KV head's cache of one sequence, with the query heads of its group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.softmax import cap, weigh
from warmkv.policies.compression.storage import Codec

BLOCK = 512
"""Entries that are brought back to floating point at a time."""

Parts = tuple[Tensor, ...]


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [n, group, d] against keys and values [n, C, d], bias [n, C] (0 is seen, -inf not); returns the shape of q.

    K and V are not repeated: the query heads of a group take the place of the query length. `softcap` bounds the
    logits, `sinks` [n, group] are logits without a value.
    """
    if softcap is not None or sinks is not None:
        logits = cap((query.float() * scale) @ keys.float().transpose(1, 2), softcap)
        weights = weigh(logits if bias is None else logits + bias[:, None], None if sinks is None else sinks.float())
        return weights.to(query.dtype) @ values
    if query.device.type == "cpu" and query.dtype == torch.float32:  # two plain products beat the fused kernel here
        added = query.new_zeros(()) if bias is None else bias[:, None]
        logits = torch.baddbmm(added, query, keys.transpose(1, 2), beta=int(bias is not None), alpha=scale)
        return logits.softmax(dim=-1) @ values
    out = F.scaled_dot_product_attention(
        query[:, None],
        keys[:, None],
        values[:, None],
        attn_mask=None if bias is None else bias[:, None, None],
        scale=scale,
    )
    return out[:, 0]


def attend_packed(
    query: Tensor,
    codec: Codec,
    keys: Parts,
    values: Parts,
    uncompressed_tail: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to entries as they are stored, decoding them block by block inside the attention.

    keys, values: parts [n, packed / group, ...] of the codec; `uncompressed_tail` keys and values [n, m, d] in the
    model's dtype that follow them; bias [n, packed + m]. Returns the output and the probabilities
    float32 [n, group, packed + m].
    """
    packed = keys[0].shape[1] * codec.group
    block = BLOCK // codec.group
    groups = range(0, keys[0].shape[1], block)
    scaled = query.float() * scale  # float16 would overflow before it is scaled, bfloat16 round
    turned = codec.to_basis(scaled)
    logits = [
        turned @ codec.decode_keys(tuple(part[:, at : at + block] for part in keys), torch.float32).transpose(1, 2)
        for at in groups
    ]
    if uncompressed_tail:
        logits.append(scaled @ uncompressed_tail[0].float().transpose(1, 2))
    shares = cap(torch.cat(logits, dim=-1), softcap)
    if bias is not None:
        shares += bias[:, None]
    shares = weigh(shares, None if sinks is None else sinks.float())
    weights = shares.to(query.dtype)
    out = torch.zeros_like(query)
    for at in groups:
        entries = codec.decode_values(tuple(part[:, at : at + block] for part in values), query.dtype)
        first = at * codec.group
        out += weights[..., first : first + entries.shape[1]] @ entries
    out = codec.from_basis(out)
    if uncompressed_tail:
        out = out + weights[..., packed:] @ uncompressed_tail[1]
    return out, shares


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lowest: Tensor,
    highest: Tensor,
    lengths: Tensor,
    pages: Tensor,
    most: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [n, group, d] against the most promising pages of keys and values [n, C, d] (RocketKV stage 2, section 3.3).

    lowest, highest [n, C / page, d] are the element-wise bounds of each page's keys, lengths [n] the entries in use,
    pages [n] how many pages each row may read, at most `most`. The page of the newest entry is always read; pages are
    ranked by the upper bound of q.k, summed over the query heads of the group.
    """
    n, _, head_dim = query.shape
    page = keys.shape[1] // lowest.shape[1]
    chosen = choose_pages(query, lowest, highest, lengths, page, most)
    entries = chosen[..., None] * page + torch.arange(page, device=query.device)
    read = torch.arange(chosen.shape[1], device=query.device) < pages[:, None]
    seen = (entries < lengths[:, None, None]) & read[..., None]
    index = entries.reshape(n, -1, 1).expand(-1, -1, head_dim)
    bias = query.new_zeros(seen.shape).masked_fill_(~seen, float("-inf")).reshape(n, -1)
    return attend_rows(query, keys.gather(1, index), values.gather(1, index), bias, scale, softcap, sinks)


def choose_pages(query: Tensor, lowest: Tensor, highest: Tensor, lengths: Tensor, page: int, most: int) -> Tensor:
    """Choose the pages of `page` entries that a row reads, best first: int64 [n, at most `most`]."""
    count = lowest.shape[1]
    bound = query.clamp(min=0) @ highest.transpose(1, 2) + query.clamp(max=0) @ lowest.transpose(1, 2)
    rank = bound.float().sum(dim=1)
    newest = (lengths - 1).clamp(min=0) // page
    at = torch.arange(count, device=query.device)
    rank = rank.masked_fill(at > newest[:, None], float("-inf")).scatter(1, newest[:, None], float("inf"))
    return rank.topk(min(most, count), dim=-1).indices


def sum_heads(received: Tensor, kv_heads: int) -> Tensor:
    """Sum [n, entries] over the KV heads of each sequence, which are neighbouring rows; returns the same shape."""
    sequences = received.view(-1, kv_heads, received.shape[1])
    return sequences.sum(dim=1, keepdim=True).expand_as(sequences).flatten(0, 1)


def rotate(keys: Tensor, angles: Tensor) -> Tensor:
    """Rotate keys [..., d] on by `angles` [..., d/2] radians (rotary embedding, halves convention)."""
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat([-second, first], -1) * sin
