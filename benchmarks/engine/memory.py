"""Bytes that stay resident while sequences decode, everything counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from transformers import DynamicCache

from benchmarks.engine.results import Results
from benchmarks.engine.setting import Models, Setting
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots import Demand, SlotPool


def race(models: Models, setting: Setting, results: Results, progress: Callable[[str], None]) -> None:
    """Slots of all sequences, each with room for its new tokens, against the cache of `generate` after them."""
    snapkv = f"snapkv@{setting.memory_budget}"
    for name, policy in (("snapkv", snapkv), ("snapkv_kivi4", f"{snapkv}+kivi4"), ("warmkv_full", "full")):
        progress(f"memory: {policy}")
        results.add(f"bytes_{name}", slots(models, setting, PolicySpec.model_validate(policy)))
    results.add("bytes_full", generate(models, setting))
    results.note(
        "bytes: every tensor of the slots (keys, values, scales, tails, scores, room for new tokens) and their "
        "bookkeeping, against the keys and values in the dynamic cache of transformers"
    )


def slots(models: Models, setting: Setting, spec: PolicySpec) -> int:
    """Bytes of a pool with a slot for every sequence. On a GPU the allocator is asked, too."""
    device = models.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    pool = SlotPool(models.warm.kv_shape, models.warm.dtype, device)
    demand = Demand(budgets.in_force(spec, setting.context, setting.new_tokens), setting.context, setting.new_tokens)
    one = demand_bytes(models, demand)
    for _ in range(setting.sequences):
        # The limit that admits one more slot: no slab is larger than it must be.
        assert pool.claim(demand, pool.allocated_bytes + one) is not None
    total = sum(tensor.nbytes for slab in pool.slabs for tensor in slab.tensors())
    total += sum(getattr(slab.state, field.name).nbytes for slab in pool.slabs for field in fields(slab.state))
    if device.type == "cuda":
        total = max(total, torch.cuda.memory_allocated(device) - before)
    return total


def demand_bytes(models: Models, demand: Demand) -> int:
    """Bytes of one slot."""
    pool = SlotPool(models.warm.kv_shape, models.warm.dtype, torch.device("meta"))
    slot = pool.claim(demand, 1 << 62)
    assert slot is not None
    return slot.resident_bytes


def generate(models: Models, setting: Setting) -> int:
    """Bytes of transformers' dynamic cache when the last of the new tokens is drawn: it was never written."""
    shape = models.warm.kv_shape
    cache = DynamicCache(config=models.peer.config)
    one = torch.empty(
        1,
        shape.kv_heads,
        setting.context + setting.new_tokens - 1,
        shape.head_dim,
        dtype=models.warm.dtype,
        device=models.device,
    )
    cache.update(one, one.clone(), 0)
    layer = cache.layers[0]
    return setting.sequences * shape.layers * (layer.keys.nbytes + layer.values.nbytes)
