"""Start vLLM in a replica: read the model's sizes, map settings to its arguments, count its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warmkv.config import Config, ConfigError
from warmkv.config.engine import VLLM_STORAGES
from warmkv.model_shape import ModelShape, ModelShapeError, figures, kv_figures, vocabulary
from warmkv.policies import memory_plan
from warmkv.policies.memory_plan import MemoryPlan, MemoryPlanError, ModelSizes
from warmkv.policies.tiers import weight
from warmkv.policy_spec import STORAGES
from warmkv.replicas import device_memory
from warmkv.replicas.loading.load import fetch, resolve_device, resolve_dtype
from warmkv.replicas.loading.tokenizer import load_max_context

CPU_BLOCK, GPU_BLOCK = 32, 16
"""Tokens of which vLLM's blocks are multiples."""

FP8_HEAD = 32
"""Of which the size of a head is a multiple where attention on a CPU reads fp8."""

CPU_WORKER = "warmkv.replicas.engines.vllm_cpu_worker.CpuWorker"

TOPIC = "kv"
REPLAYED = 10_000  # batches of events that vLLM keeps for who has missed some


@dataclass(frozen=True, slots=True)
class Model:
    """Hold the sizes of the model that vLLM serves."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    sizes: ModelSizes
    max_context: int
    eos_ids: frozenset[int]
    storage: str = "model"  # of its KV cache

    @property
    def token_bytes(self) -> int:
        """Return what a token takes in the KV cache."""
        shape = self.sizes.shape
        return weight(self.storage, shape)(shape.token_bytes, 1)


def read_model(config: Config) -> Model:
    """Read the model's sizes from its folder. Raises OSError, or ModelShapeError where they cannot be told."""
    from transformers import AutoConfig, GenerationConfig

    folder = fetch(config.model)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        eos = text.eos_token_id
    most = load_max_context(config.model, "vllm")
    wanted = config.engine.max_context
    if wanted is not None and wanted > most:
        raise ConfigError(f"engine.max_context {wanted} exceeds the model's {most} tokens")
    return Model(
        folder,
        device,
        dtype,
        _sizes(folder, text.to_dict(), dtype),
        wanted or most,
        frozenset([eos] if isinstance(eos, int) else eos or ()),
        config.prefix_cache.storage,
    )


def _sizes(folder: Path, described: Mapping[str, Any], dtype: torch.dtype) -> ModelSizes:
    """Return a model's sizes, its weights by its files where they tell.

    `described` is its configuration with what files leave out, the defaults of its family. Of an architecture that is
    not counted here (`model_shape`) they are the KV cache and the vocabulary: that is what limits and bills go by.
    Raises ModelShapeError where these are not known.
    """
    try:
        sizes = ModelSizes.of(ModelShape.model_validate(figures(described)), dtype.itemsize, quantised=True)
    except ModelShapeError:
        cache = ModelShape.model_validate(kv_figures(described))
        sizes = replace(ModelSizes.of(cache, dtype.itemsize), vocabulary=vocabulary(described))
    weights = device_memory.weight_bytes(folder, dtype)
    return sizes if weights is None else replace(sizes, weights=weights)


def plan_memory(config: Config, model: Model, share: float) -> tuple[MemoryPlan, str]:
    """Plan the memory of a replica that has a share of its device, or several GPUs, over which vLLM spreads all of it.

    Return the plan, and what does not fit where vLLM measures for itself. Raises MemoryPlanError where it does not.
    """
    memory = device_memory.read(model.device, share)
    plan = memory_plan.plan(memory, model.sizes, config.engine, config.prefix_cache, model.max_context)
    try:
        plan.check()
    except MemoryPlanError as error:
        if not _measures(plan, model.device):
            raise
        return plan, f"{error}. vLLM measures what it needs, and refuses by itself"
    return plan, ""


def _measures(plan: MemoryPlan, device: torch.device) -> bool:
    """Return True if vLLM takes for its cache what it measures to be left on its GPUs."""
    return device.type == "cuda" and plan.kv.auto and (plan.stored.auto or not plan.stored.bytes)


def start_llm(config: Config, model: Model, plan: MemoryPlan, threads: int, folder: Path, steps: Steps) -> Any:
    """Start vLLM's asynchronous engine. For the thread of the event loop. Raises ConfigError for what it cannot do."""
    on_gpu, block = model.device.type == "cuda", config.prefix_cache.block_size
    multiple = GPU_BLOCK if on_gpu else CPU_BLOCK
    if block % multiple:
        raise ConfigError(f"prefix_cache.block_size {block} must be a multiple of {multiple} with engine.kind vllm")
    check_storage(model.storage, model.device, model.sizes.shape.head_dim)
    engine, cluster = config.engine, config.cluster
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(threads))
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # else it closes the handlers that this process logs by
    from vllm.config import StructuredOutputsConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    parallel = max(1, int(cluster.gpus_per_replica))
    cache_bytes = (plan.kv.bytes + plan.stored.bytes) // parallel  # on each GPU
    arguments = AsyncEngineArgs(
        model=str(model.folder),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_context,
        max_num_seqs=engine.max_slots,
        max_num_batched_tokens=engine.tokens_per_step(on_gpu=on_gpu),
        enable_chunked_prefill=True,
        scheduling_policy="priority",  # by tags of `FairQueue`
        enforce_eager=engine.compile == "off" or (engine.compile == "auto" and not on_gpu),
        enable_prefix_caching=config.prefix_cache.enabled,
        block_size=block,
        tensor_parallel_size=parallel,
        distributed_executor_backend="mp" if parallel > 1 else None,  # else Ray's, as actors beside this one
        gpu_memory_utilization=engine.memory_fraction * min(1.0, cluster.gpus_per_replica or 1.0),
        kv_cache_dtype=VLLM_STORAGES[model.storage],
        kv_cache_memory_bytes=None if _measures(plan, model.device) else cache_bytes,
        structured_outputs_config=StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
        disable_log_stats=True,
        worker_extension_cls="" if on_gpu else CPU_WORKER,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=config.prefix_cache.enabled,
            publisher="zmq" if config.prefix_cache.enabled else "null",
            endpoint=endpoint(folder, "events"),
            replay_endpoint=endpoint(folder, "replay"),
            buffer_steps=REPLAYED,
            topic=TOPIC,
        ),
    )
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda vllm_config, index=0: steps])


def check_storage(storage: str, device: torch.device, head_dim: int) -> None:
    """Raise ConfigError where vLLM's attention cannot read a cache in a format on a device, or with such heads."""
    lacking, multiple = "", STORAGES[storage].head_dim_multiple
    if device.type == "cpu" and storage == "int4":
        lacking = "a GPU"
    elif device.type == "cpu" and storage == "fp8":
        multiple = FP8_HEAD
        if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
            lacking = "AVX-512 or AMX, or a GPU"
    if not lacking and head_dim % multiple:
        lacking = f"heads of a multiple of {multiple}: the model's have {head_dim}"
    if lacking:
        where = "a CPU" if device.type == "cpu" else "a GPU"
        raise ConfigError(f"prefix_cache.storage: {storage} on {where} with engine.kind vllm needs {lacking}")


def endpoint(folder: Path, name: str) -> str:
    """Return the address of a socket that only this machine can reach."""
    return f"ipc://{folder / name}"


class Steps:
    """Count running and waiting requests and note the last step, as vLLM reports them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.turns, self.turned, self.running, self.waiting, self.usage = 0, clock(), 0, 0, 0.0
        self.preempted = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take note of a step. Called by vLLM's front end."""
        self.turns, self.turned = self.turns + 1, self._clock()
        if scheduler_stats is not None:
            self.running, self.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            self.usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM calls it."""

    def log(self) -> None:
        """Do nothing; vLLM calls it."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing; vLLM calls it."""
