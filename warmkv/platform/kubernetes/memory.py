"""What the memory of a pod must hold, by the plan that a replica makes at its start (`policies/memory_plan.py`)."""

from __future__ import annotations

import math

from warmkv.config import Config
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape
from warmkv.policies import memory_plan
from warmkv.policies.memory_plan import (
    CUDA_CONTEXT_BYTES,
    NODE_BYTES,
    PROCESS_BYTES,
    DeviceMemory,
    Line,
    MemoryPlan,
    ModelSizes,
)
from warmkv.simulator.cluster.memory import CONTEXT

GPU_PRODUCT = "nvidia.com/gpu.product"
"""Label of nodes that NVIDIA's feature discovery sets."""

PRODUCTS = {
    "A100-SXM": "NVIDIA-A100-SXM4-80GB",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "H200-SXM": "NVIDIA-H200",
    "L40S": "NVIDIA-L40S",
    "L4": "NVIDIA-L4",
}
"""Its value by the GPU's name in the catalogue."""

OBJECT_STORE_BYTES = 256 << 20
"""Ray's object store in the worker pods of the base (`object-store-memory` of its rayStartParams)."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def sizes_of(config: Config, model: ModelShape, on_gpu: bool) -> ModelSizes:
    """Return a model's sizes in the dtype that it is served in: `auto` is bfloat16 on a GPU and float32 on a CPU."""
    named = config.model.dtype
    size = (2 if on_gpu else 4) if named == "auto" else _DTYPE_BYTES[named]
    packed = not on_gpu and size == 4  # replicas/loading/packed_weights.py
    return ModelSizes.of(model, size, packed=packed, quantised=config.engine.keeps_quantised)


def plan_in_pod(config: Config, model: ModelShape, limit: int, replicas: int, store: int = 0) -> MemoryPlan:
    """Plan a replica without a GPU in a pod's memory limit, which `replicas` share beside Ray's object store."""
    name = "the pod's memory limit" + " less Ray's object store" * bool(store)
    memory = DeviceMemory("group", name, limit - store, limit - store, 1 / replicas)
    return plan_replica(config, model, memory)


def plan_on_gpu(config: Config, model: ModelShape, gpu: Gpu) -> MemoryPlan:
    """Plan a replica on a GPU of the catalogue, or on its share of one; of vLLM on all that it has."""
    total, share = int(gpu.memory), config.cluster.gpus_per_replica or 1.0
    if config.engine.has_own_kernels:
        share = min(1.0, share)
    return plan_replica(config, model, DeviceMemory("gpu", gpu.name, total, total, share, CUDA_CONTEXT_BYTES))


def plan_replica(config: Config, model: ModelShape, memory: DeviceMemory) -> MemoryPlan:
    """Plan a replica as it does at its start, from what a model's config.json tells."""
    sizes = sizes_of(config, model, memory.kind == "gpu")
    context = config.engine.max_context or model.context or CONTEXT
    return memory_plan.plan(memory, sizes, config.engine, config.prefix_cache, context)


def host_lines(config: Config, model: ModelShape, replicas: int, store: int) -> list[Line]:
    """Return what a pod with replicas on GPUs, and an object store of so many bytes, takes of the host's memory.

    Weights pass through it while they are loaded, of all replicas at once where they start together; what the tiers
    hold comes after that. The longest prompt may be on its way between them: which GPU would allow less is not known.
    """
    cache = config.prefix_cache
    tier = int(cache.host.memory_bytes) * cache.enabled
    sizes, context = sizes_of(config, model, True), config.engine.max_context or model.context or CONTEXT
    moving = memory_plan.moving_limit(cache, sizes.shape, context).bytes if cache.lower_bytes else 0
    parked = int(config.engine.parked_bytes) if config.engine.preempt_seconds is not None else 0
    weights = sizes.weights
    processes = replicas * config.engine.processes(config.cluster.gpus_per_replica)
    lines = [
        Line("node", NODE_BYTES, "estimated, for Ray and a gateway"),
        Line("process", processes * PROCESS_BYTES, f"estimated, of {replicas} replica(s)"),
        Line("object store", store, "Ray's, in /dev/shm"),
    ]
    later = [
        Line("host tier", replicas * tier, "prefix_cache.host.memory_bytes"),
        Line("moving", replicas * moving, "prefix_cache.moving_bytes"),
        Line("parked", replicas * parked, "engine.parked_bytes"),
    ]
    if weights > tier + moving + parked:
        return [*lines, Line("weights", replicas * weights, "on their way to the GPU")]
    return [*lines, *(line for line in later if line.bytes)]


def pod_memory(config: Config, model: ModelShape, replicas: int, on_gpu: bool) -> int:
    """Return a memory limit for a pod with so many replicas: what they need, and a tenth more, in whole GiB.

    Without a GPU `auto` sizes take what there is: the limit leaves slots and prefixes a GiB for each replica.
    """
    if on_gpu:
        needed = sum(line.bytes for line in host_lines(config, model, replicas, OBJECT_STORE_BYTES))
    else:
        weights = sizes_of(config, model, False).weights
        process = config.engine.processes(0) * PROCESS_BYTES
        needed = NODE_BYTES + OBJECT_STORE_BYTES + replicas * (process + weights + (1 << 30))
    return math.ceil(1.1 * needed / (1 << 30)) << 30
