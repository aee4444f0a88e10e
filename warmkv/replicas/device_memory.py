"""Read how much memory a replica may use: its GPU's, else its control group's or the machine's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warmkv.config import ClusterConfig, Config, EngineConfig, ModelConfig, PrefixCacheConfig
from warmkv.faults import UserError
from warmkv.model_shape import ModelShapeError, dtype_bytes
from warmkv.policies import memory_plan
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.memory_plan import CUDA_CONTEXT_BYTES, DeviceMemory, MemoryPlan, MemoryPlanError, ModelSizes
from warmkv.replicas.control_groups import limit_files
from warmkv.replicas.cores import node_resources
from warmkv.replicas.loading.load import LoadedModel, resolve_device, resolve_dtype
from warmkv.replicas.loading.tokenizer import model_path

UNLIMITED = 1 << 60
"""Limits of control groups from here on are none: version 1 writes the largest multiple of a page below 2**63."""

PROBED_TOKENS = 8192
"""Context at which the memory of a chunk's attention is measured; it is in proportion to the context."""

SPREAD = (
    "vLLM spreads a model over several GPUs by tensor parallelism (engine.kind: vllm, "
    "cluster.gpus_per_replica: 2 or more)"
)


class DeviceError(UserError):
    """A device that torch does not have."""


def check_device(name: str) -> None:
    """Raise DeviceError if torch does not know a device, or finds no GPU for it."""
    try:
        device = resolve_device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is no device: {str(error).splitlines()[0]}; try cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"torch finds no GPU for device {name}; try cpu")


def plan_replica(model: LoadedModel, engine: EngineConfig, cache: PrefixCacheConfig, share: float = 1.0) -> MemoryPlan:
    """Plan the memory of a replica whose model is loaded and that has a share of the device."""
    memory = read(model.device, share)
    measured = None
    if model.device.type == "cuda":
        measured = measure_attention(model, engine.tokens_per_step(on_gpu=True), Peak.of_gpu(model.device))
    return memory_plan.plan(
        memory,
        sizes_of(model),
        engine,
        cache,
        engine.max_context or model.max_context,
        attention_token_bytes=measured,
    )


def read(device: torch.device, share: float = 1.0) -> DeviceMemory:
    """Read the memory of the device, of which a replica has a share."""
    return gpu_memory(device, share) if device.type == "cuda" else host_memory(share)


def check_before_loading(config: Config, share: float) -> None:
    """Raise MemoryPlanError if the weights in the model's folder are more than a replica can have.

    Raises DeviceError if a replica is given several GPUs.
    """
    if config.engine.kind == "warmkv" and (gpus := config.cluster.gpus_per_replica) > 1:
        raise DeviceError(f"cluster.gpus_per_replica {gpus:g}: an engine of kind warmkv computes on one GPU. {SPREAD}")
    device = resolve_device(config.model.device)
    weights = stored_weight_bytes(config.model, resolve_dtype(config.model.dtype, device))
    if weights is None:
        return
    memory = read(device, share)
    try:
        memory_plan.check_weights(memory, config.engine, weights)
    except MemoryPlanError as error:
        raise MemoryPlanError(f"{error}. {SPREAD}" if memory.kind == "gpu" else f"{error}") from None


# --- the device


def gpu_memory(device: torch.device, share: float) -> DeviceMemory:
    """Read a GPU, which stands for all where a replica has several.

    What others hold of it counts where the replica has it for itself; sharers keep to their shares.
    """
    free, total = torch.cuda.mem_get_info(device)
    taken = CUDA_CONTEXT_BYTES
    if share >= 1:
        taken = int(share) * max(0, total - free - torch.cuda.memory_reserved(device))
    return DeviceMemory("gpu", torch.cuda.get_device_name(device), total, total, share, taken)


def host_memory(share: float, root: Path = Path("/")) -> DeviceMemory:
    """Read the limit of the control group if it has one below the machine's memory, else what is free."""
    known = _meminfo(root / "proc/meminfo")
    total = known["MemTotal"]
    limit = min(group_limits(root), default=UNLIMITED)
    if limit < total:
        return DeviceMemory("group", "the control group", limit, limit, share)
    free = min(total, known.get("MemAvailable", known["MemFree"]) + _own_bytes(root))
    return DeviceMemory("machine", "this machine's free memory", free, total, share)


def group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the memory limits of this process's control groups, up to the root, of both versions."""
    for file in limit_files("memory", "memory.max", "memory.limit_in_bytes", root):
        limit = _number(file)
        if limit is not None and limit < UNLIMITED:
            yield limit


def _number(file: Path) -> int | None:
    """Read a number from a file; None if it is missing or says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _meminfo(file: Path) -> dict[str, int]:
    """Return bytes by name. Machines without the file (macOS) tell the total only."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"MemTotal": total, "MemFree": total}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}


def _own_bytes(root: Path) -> int:
    """Return the bytes this process holds now: the plan counts them anew."""
    try:
        pages = int((root / "proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def share_here(config: Config, replicas: int, node: str) -> float:
    """Return the share of a replica, of so many, on a node of the Ray cluster that this process belongs to."""
    known = node_resources(node)
    cpus = known.get("CPU", 0.0) if known else None
    return share_of(config.cluster, replicas, resolve_device(config.model.device), cpus)


def share_of(cluster: ClusterConfig, replicas: int, device: torch.device, node_cpus: float | None = None) -> float:
    """Return the share of its device, or of its node's memory, that a replica of so many has: the number of its GPUs.

    `node_cpus` are those that Ray gives out on the node: no more replicas come there than have room on them.
    """
    beside = replicas
    if node_cpus is not None and cluster.cpus_per_replica > 0:
        beside = max(1, min(beside, int(node_cpus / cluster.cpus_per_replica)))
    if device.type == "cuda" and cluster.gpus_per_replica > 0:
        return cluster.gpus_per_replica
    return 1 / beside


# --- the model


def sizes_of(model: LoadedModel) -> ModelSizes:
    """Read the sizes of a loaded model."""
    text = model.module.config.get_text_config()
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = _most(getattr(text, "num_experts_per_tok", None)) or 1
    if experts > 1:
        width = max(width, experts * (_most(getattr(text, "moe_intermediate_size", None)) or width))
    return ModelSizes(model.weight_bytes(), model.kv_shape, text.hidden_size, width, model.vocabulary)


def _most(figure: int | list[int] | None) -> int | None:
    """Return a figure of a model's layers, which Hunyuan tells layer by layer: the largest."""
    return max(figure) if isinstance(figure, list) else figure


def stored_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int | None:
    """Return what the weights of a model take in a dtype; None where no files tell, as of a hub name."""
    return weight_bytes(Path(model_path(config)), dtype)


def weight_bytes(folder: Path, dtype: torch.dtype) -> int | None:
    """Return what the weights in a folder take in a dtype; None where its files do not tell.

    Quantised ones are taken as they are stored: in the engine they take as much at least.
    """
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        else:
            size = (folder / "model.safetensors").stat().st_size
    except (OSError, ValueError, KeyError, TypeError):  # a hub name, another format: loading it will tell
        return None
    if "quantization_config" in described:
        return size
    try:
        return size * dtype.itemsize // dtype_bytes(described)
    except ModelShapeError:
        return None


@dataclass(frozen=True, slots=True)
class Peak:
    """The allocator's account of a device."""

    allocated: Callable[[], int]
    reset: Callable[[], None]
    most: Callable[[], int]  # since `reset`

    @classmethod
    def of_gpu(cls, device: torch.device) -> Peak:
        return cls(
            lambda: torch.cuda.memory_allocated(device),
            lambda: torch.cuda.reset_peak_memory_stats(device),
            lambda: torch.cuda.max_memory_allocated(device),
        )


@torch.inference_mode()
def measure_attention(model: LoadedModel, chunk: int, peak: Peak) -> float:
    """Measure the bytes that the attention of a chunk takes for each token of the prompt, in one layer.

    Some kernels hold all logits of the chunk at once, others none: GPU, dtype and mask decide which one torch takes.
    """
    shape = model.kv_shape
    chunk = min(chunk, max(1, model.max_context // 2))
    tokens = min(model.max_context, max(PROBED_TOKENS, 2 * chunk))

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, shape.head_dim, dtype=model.dtype, device=model.device)

    one = replace(shape, layers=1, windows=())
    prompt = PrefillState.allocate(
        one, range(tokens), (), dtype=model.dtype, device=model.device, inv_freq=model.inv_freq
    )
    prompt.reuse(tokens - chunk)
    query, key, value = (zeros(1, heads, chunk) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads))
    before = peak.allocated()
    peak.reset()
    prompt.begin_chunk(chunk)
    prompt.attend(0, query, key, value, Softmax(shape.head_dim**-0.5))
    return max(0, peak.most() - before) / tokens
