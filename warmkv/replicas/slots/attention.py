"""Attention of one query per row: a row is one KV head's cache of one sequence, with the query heads of its group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax, cap, weigh
from warmkv.policies.compression.storage_format import StorageFormat

BLOCK = 512
"""Entries that are brought back to floating point at a time."""

Parts = tuple[Tensor, ...]


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    softmax: Softmax,
) -> Tensor:
    """Attend q [n, group, d] to keys and values [n, C, d], bias [n, C] (0 is seen, -inf not); returns the shape of q.

    K and V are not repeated: the query heads of a group take the place of the query length. Sinks are [n, group].
    """
    scale = softmax.scale
    if not softmax.is_standard:
        logits = cap((query.float() * scale) @ keys.float().transpose(1, 2), softmax.softcap)
        weights = weigh(logits if bias is None else logits + bias[:, None], softmax.sinks)
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
    storage: StorageFormat,
    keys: Parts,
    values: Parts,
    uncompressed_tail: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    """Attend to entries as they are stored, decoding them block by block inside the attention.

    keys, values: parts [n, packed / group, ...] of the format; `uncompressed_tail` keys and values [n, m, d] in the
    model's dtype that follow them; bias [n, packed + m]. Returns the output and the probabilities
    float32 [n, group, packed + m].
    """
    packed = keys[0].shape[1] * storage.group
    block = BLOCK // storage.group
    groups = range(0, keys[0].shape[1], block)
    scaled = query.float() * softmax.scale  # float16 would overflow before it is scaled, bfloat16 round
    turned = storage.to_basis(scaled)
    logits = [
        turned @ storage.decode_keys(tuple(part[:, at : at + block] for part in keys), torch.float32).transpose(1, 2)
        for at in groups
    ]
    if uncompressed_tail:
        logits.append(scaled @ uncompressed_tail[0].float().transpose(1, 2))
    shares = cap(torch.cat(logits, dim=-1), softmax.softcap)
    if bias is not None:
        shares += bias[:, None]
    shares = weigh(shares, softmax.sinks)
    weights = shares.to(query.dtype)
    out = torch.zeros_like(query)
    for at in groups:
        entries = storage.decode_values(tuple(part[:, at : at + block] for part in values), query.dtype)
        first = at * storage.group
        out += weights[..., first : first + entries.shape[1]] @ entries
    out = storage.from_basis(out)
    if uncompressed_tail:
        out = out + weights[..., packed:] @ uncompressed_tail[1]
    return out, shares


def attend_segments(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lowest: Tensor,
    highest: Tensor,
    lengths: Tensor,
    read_limits: Tensor,
    channels: Tensor,
    most: int,
    softmax: Softmax,
) -> Tensor:
    """Attend q [n, group, d] to the most promising of keys and values [n, C, d] (RocketKV's second stage).

    lowest, highest [n, C / segment, d] are the element-wise bounds of each segment's keys, lengths [n] the entries in
    use, read_limits [n] how many each row may read, at most `most`, and channels [n] how many its choice goes by.
    """
    capacity = keys.shape[1]
    entries = choose_entries(query, lowest, highest, lengths, read_limits, channels, capacity, most, softmax.scale)
    index = entries.clamp(max=capacity - 1)[..., None].expand(-1, -1, keys.shape[2])
    bias = query.new_zeros(entries.shape).masked_fill_(entries == capacity, float("-inf"))
    return attend_rows(query, keys.gather(1, index), values.gather(1, index), bias, softmax)


def choose_entries(
    query: Tensor,
    lowest: Tensor,
    highest: Tensor,
    lengths: Tensor,
    read_limits: Tensor,
    channels: Tensor,
    capacity: int,
    most: int,
    scale: float,
) -> Tensor:
    """Return the entries that each row reads, int64 [n, at least `most`], padded with `capacity`.

    The attention of every query head on every segment is estimated from the channels where |q| is largest over the
    group, by the greatest key of the segment where the group's queries sum to a positive number and the least one
    elsewhere; the scale makes up for the channels left out. Entries of the segments with the most attention, on average
    over the group, are read (arXiv 2502.14051, section 3.3). Arguments as of `attend_segments`.
    """
    size, segment = query.float().abs(), capacity // lowest.shape[1]
    order = size.sum(dim=1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(query.shape[2], device=query.device).expand_as(order)
    )
    part = query * (rank < channels[:, None])[:, None]
    positive = query.float().sum(dim=1, keepdim=True) > 0
    logits = (part * positive) @ highest.transpose(1, 2) + (part * ~positive) @ lowest.transpose(1, 2)
    seen = part.float().abs().sum(dim=-1, keepdim=True) / size.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    in_use = (lengths[:, None] - torch.arange(0, capacity, segment, device=query.device)).clamp(0, segment)[:, None]
    # One logit stands for all entries of its segment.
    shares = (logits.float() * scale * seen.clamp(min=1e-30).rsqrt() + in_use.log()).softmax(dim=-1) / in_use
    score = shares.mean(dim=1).masked_fill(in_use[:, 0] == 0, -1.0)
    segments = score.argsort(dim=-1, descending=True, stable=True)[
        :, : -(-most // segment) + 1
    ]  # the newest may be part full
    entries = (segments[..., None] * segment + torch.arange(segment, device=query.device)).flatten(1)
    used = entries < lengths[:, None]
    return torch.where(used & (used.cumsum(dim=1) <= read_limits[:, None]), entries, capacity)


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
