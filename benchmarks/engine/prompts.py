"""Races of computing prompts: with most of one stored, and what compressing it costs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.arena import Arena
from benchmarks.engine.warm import PLENTY, engine
from warmkv.config import EngineConfig
from warmkv.measuring import ttft
from warmkv.measuring.clock import Stopwatch
from warmkv.policies import budgets, compression
from warmkv.policies.compression.observe import compute_prompt
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool

TTL = "5m"


def first_tokens(arena: Arena) -> None:
    """Seconds from submission to the first token, through the engine: of a new prompt, then of one that shares 90%."""
    setting, results, models, policy = arena.setting, arena.results, arena.models, PolicySpec()
    random = np.random.default_rng(setting.seed)
    arena.say("warming up ttft")
    running = engine(models, setting, stored=4 * setting.prompt * models.warm.kv_shape.token_bytes)
    ttft.cold_and_warm(running, policy, min(1_024, setting.prompt), setting.new_tokens, TTL, random)
    for turn in arena.repeats("ttft"):
        arena.say(f"{turn}: {setting.prompt} tokens, cold and warm")
        pair = ttft.cold_and_warm(running, policy, setting.prompt, setting.new_tokens, TTL, random)
        results.add("ttft_seconds_cold", pair.cold.seconds)
        results.add("ttft_seconds_warm", pair.warm.seconds)
        results.add("ttft_warm_share_reused", pair.warm.reused / setting.prompt)


@torch.inference_mode()
def hand_off(arena: Arena) -> None:
    """Seconds of choosing what is kept and of filling a slot with it, and of computing the prompt before."""
    setting, results, warm = arena.setting, arena.results, arena.models.warm
    specs = {
        name: PolicySpec.model_validate(f"snapkv@{setting.memory_budget}{storage}")
        for name, storage in (("snapkv", ""), ("snapkv_kivi4", "+kivi4"))
    }
    generator = torch.Generator().manual_seed(setting.seed)
    arena.say("warming up handoff")
    for spec in specs.values():
        _hand_off(arena, spec, _ids(warm, min(setting.prompt, 4 * setting.memory_budget), generator))
    for turn in arena.repeats("handoff"):
        arena.say(f"{turn}: {setting.prompt} tokens")
        ids = _ids(warm, setting.prompt, generator)
        for name, spec in specs.items():
            prefill, seconds = _hand_off(arena, spec, ids)
            results.add(f"prefill_seconds_{name}", prefill)
            results.add(f"handoff_seconds_{name}", seconds)


def _ids(model: LoadedModel, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(model.vocabulary, (tokens,), generator=generator)


def _hand_off(arena: Arena, spec: PolicySpec, ids: Tensor) -> tuple[float, float]:
    """Return seconds of computing a prompt in chunks, and of its hand-off."""
    warm, new_tokens = arena.models.warm, arena.setting.new_tokens
    spec = budgets.in_force(spec, len(ids), new_tokens)
    pool = SlotPool(warm.kv_shape, warm.dtype, warm.device)
    slot = pool.claim(SlotRequest(spec, len(ids), new_tokens), PLENTY)
    if slot is None:
        raise RuntimeError(f"no slot for {spec.label}")
    watch = Stopwatch(warm.device)
    chunk = EngineConfig().tokens_per_step(on_gpu=warm.device.type == "cuda")
    prompt = compute_prompt(warm, ids, spec, chunk=chunk)
    prefill = watch.seconds()
    pool.fill(slot, prompt, compression.build(spec).select(prompt))
    return prefill, watch.seconds()
