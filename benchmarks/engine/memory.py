"""Bytes that stay resident while sequences decode, everything counted."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from benchmarks.engine.arena import Arena
from benchmarks.engine.setting import Models, Setting
from benchmarks.engine.warm import PLENTY
from warmkv.config import PrefixCacheConfig
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool


def race(arena: Arena) -> None:
    """Slots of all sequences, each with room for its new tokens, against the cache of `generate` after them."""
    setting, results, models = arena.setting, arena.results, arena.models
    snapkv = f"snapkv@{setting.memory_budget}"
    for name, policy in (("snapkv", snapkv), ("snapkv_kivi4", f"{snapkv}+kivi4"), ("warmkv_full", "full")):
        arena.say(f"memory: {policy}")
        results.add(f"bytes_{name}", slots(models, setting, PolicySpec.model_validate(policy)))
        arena.tidy()
    results.add("bytes_full", generate(models, setting))
    results.note(
        "bytes: every tensor of the slabs that hold the slots (keys, values, scales, tails, room for new tokens, rows "
        "that stand idle), against the keys and values in the dynamic cache of transformers"
    )


def slots(models: Models, setting: Setting, spec: PolicySpec) -> int:
    """Return bytes of a pool with a slot for every sequence: the most that its tensors, itself or the GPU's allocator
    say.
    """
    device = models.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    pool = SlotPool(models.warm.kv_shape, models.warm.dtype, device, PrefixCacheConfig().block_size)
    slot_request = SlotRequest(
        budgets.in_force(spec, setting.context, setting.new_tokens), setting.context, setting.new_tokens
    )
    for _ in range(setting.sequences):
        if pool.claim(slot_request, PLENTY) is None:
            raise RuntimeError(f"no slot for {spec.label}")
    counted = [pool.allocated_bytes, sum(tensor.nbytes for tensor in pool.tensors())]
    if device.type == "cuda":
        counted.append(torch.cuda.memory_allocated(device) - before)
    return max(counted)


def generate(models: Models, setting: Setting) -> int:
    """Return bytes of transformers' dynamic cache once all new tokens are drawn; the last one was never written."""
    shape = models.warm.kv_shape
    size = (1, shape.kv_heads, setting.context + setting.new_tokens - 1, shape.head_dim)
    cache = DynamicCache(config=models.peer.config)
    cache.update(*(torch.zeros(size, dtype=models.warm.dtype, device=models.device) for _ in range(2)), 0)
    layer = cache.layers[0]  # of one sequence; all layers and sequences are alike
    return int(setting.sequences * shape.layers * (layer.keys.nbytes + layer.values.nbytes))
