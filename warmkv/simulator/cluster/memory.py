"""What `engine.kv_bytes: auto` and `prefix_cache.memory_bytes: auto` stand for in a simulation."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ByteSize

from warmkv.config import Config
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape
from warmkv.policies import memory_plan
from warmkv.policies.memory_plan import CUDA_CONTEXT_BYTES, DeviceMemory, MemoryPlan, MemoryPlanError, ModelSizes

KV_BYTES = 1 << 30
"""Slots and workspace of a replica on no device in particular: `simulator.model` does not give its weights."""

STORED_BYTES = 512 << 20
"""Stored prefixes of such a replica."""

CONTEXT = 131_072
"""Most tokens of prompts that are planned for where `engine.max_context` is not given: a config.json may promise more
than people serve."""


def gpus_per_replica(config: Config) -> float:
    """Return the GPUs of a replica; one without a GPU stands for one that has one."""
    return config.cluster.gpus_per_replica or 1.0


def gpu_hours(config: Config, replicas: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the GPU hours by group, of so many replicas on average over a time."""
    groups = config.groups()
    return {name: gpus_per_replica(groups[name]) * count * seconds / 3600 for name, count in replicas.items()}


def gpu_dollars(config: Config, hours: Mapping[str, float]) -> float:
    """Return the price of GPU hours, by group."""
    groups = config.groups()
    return sum([hours[name] * groups[name].simulator.gpu.dollars for name in hours])


def pool_bytes(config: Config) -> int:
    """Return the bytes of the one pool that vLLM has for running requests and prefixes; sizes are not `auto`."""
    cache = config.prefix_cache
    return config.engine.kv_limit + (cache.memory_limit if cache.enabled else 0)


def resolved(config: Config) -> Config:
    """Return the settings with every `auto` size in bytes, and the tokens of a step.

    With a whole `simulator.model` they are what `simulator.gpu` has room for, as in the service; without its weights
    the constants above, and steps are those of a CPU. Raises MemoryPlanError where the model does not fit the GPU.
    """
    engine, cache = config.engine, config.prefix_cache
    if "auto" not in (engine.kv_bytes, cache.memory_bytes, engine.step_tokens):
        return config
    step_tokens = engine.tokens_per_step(on_gpu=config.simulator.model.is_whole)
    kv, stored = KV_BYTES, STORED_BYTES
    if (model := config.simulator.model).is_whole:
        planned = plan(config, model, config.simulator.gpu)
        planned.check()
        kv, stored = planned.kv.bytes, planned.stored.bytes
    engine = engine.model_copy(update={"step_tokens": step_tokens})
    if engine.kv_bytes == "auto":
        engine = engine.model_copy(update={"kv_bytes": ByteSize(kv)})
    if cache.memory_bytes == "auto":
        cache = cache.model_copy(update={"memory_bytes": ByteSize(stored)})
    return config.model_copy(update={"engine": engine, "prefix_cache": cache})


def why_unfit(config: Config) -> str:
    """Return why replicas of a group do not fit their GPU; an empty text where all do, or have explicit sizes."""
    for name, group in config.groups().items():
        try:
            resolved(group)
        except MemoryPlanError as error:
            return f"group {name}: {error.reason}" if name else error.reason
    return ""


def plan(config: Config, model: ModelShape, gpu: Gpu) -> MemoryPlan:
    """Plan a replica's memory from a GPU's data sheet and a model's sizes. Replicas that name no GPU have one."""
    sizes = ModelSizes.of(model, quantised=config.engine.keeps_quantised)
    total, share = int(gpu.memory), gpus_per_replica(config)
    memory = DeviceMemory("gpu", gpu.name, total, total, share, CUDA_CONTEXT_BYTES)
    context = config.engine.max_context or min(model.context or CONTEXT, CONTEXT)
    return memory_plan.plan(memory, sizes, config.engine, config.prefix_cache, context)
