"""Sharing a device's memory among weights, activations, decode slots and stored prefixes. Pure: numbers in, a plan out.

The service plans with what it reads from the device or the control group (`replicas/device_memory.py`), the simulator
with a GPU's data sheet. Explicit sizes are taken as they are; what is `auto` shares the rest.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ByteSize

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.faults import UserError
from warmkv.model_shape import ModelShape
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import weight

CUDA_CONTEXT_BYTES = 512 << 20
"""What a process takes on a GPU before its first tensor: context, kernels, library workspaces."""

PROCESS_BYTES = 768 << 20
"""Host memory of a replica's process beside weights and KV: Python, torch, transformers and Ray's worker take 575 MB
resident before the first request."""

NODE_BYTES = 3 << 29
"""Host memory of a node for Ray (raylet, GCS, agents, proxy, controller), the directory and a gateway with its
tokenizer: 520 MB resident for the gateway, 80 to 170 MB for each of ten others, much of it shared."""

SAMPLING_BYTES = 32
"""Bytes a logit: in its dtype, then probabilities, their order and running sums (`replicas/engine/sampling.py`)."""

SCORING_BYTES = 4 * 4 << 22
"""What scoring a prompt takes at most: four float32 matrices of `LOGITS_AT_ONCE` logits (`compression/softmax.py`)."""

MOST_RECORDED = 128
"""Decode steps that an engine keeps as CUDA graphs (`replicas/engine/graphs.py`)."""

RECORDED_LAYER_BYTES = 1 << 15
"""What a driver keeps of a layer's launches in a CUDA graph, some twenty kernels: an estimate that no GPU has
confirmed."""

STORED_SHARE = 1 / 3
"""Share of stored prefixes where both limits are `auto`: a request has twice that, its slot and a workspace."""

MACHINE_SHARE = 0.25
"""Share of a machine's free memory that slots and stored prefixes take together, where nobody has set a limit for the
service: other programs run there, too."""

MACHINE_LEAST = 3 << 29
"""They may have 1.5 GiB in any case, as far as that is free: 1 GiB for slots and 512 MiB for stored prefixes."""

MOVING_SHARE = 1 / 8
"""Share of the room for slots and stored prefixes that evicted blocks may take on their way to lower tiers, at most."""

MOVING_LEAST = 256 << 20
"""They may have so much in any case, if the longest prompt and the lower tiers do."""

CHUNK_FACTOR = 3
"""Slots have room for so many times the KV of a chunk at least: its workspace, and a slot rounded up."""

HELP = (
    "What helps: lower engine.kv_bytes, prefix_cache.memory_bytes or another size that is set; lower "
    "engine.max_context or engine.step_tokens; a smaller model or model.dtype; more memory for each replica "
    "(cluster.gpus_per_replica, fewer replicas, a larger control group); a higher engine.memory_fraction"
)
GIB = 1 << 30


class MemoryPlanError(UserError):
    """The model and what was asked for do not fit; the message has all lines of the plan."""

    @property
    def reason(self) -> str:
        """Return the message without the lines of the plan."""
        return str(self).splitlines()[0]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that a replica may plan with, in bytes; shared by all replicas on the device."""

    kind: Literal["gpu", "group", "machine"]  # a GPU; a control group with a limit; a machine that others use, too
    name: str
    total: int  # of a machine: what is free
    hard: int  # that nothing can exceed
    share: float = 1.0  # of one replica; above 1 it has several like this
    taken: int = 0  # of that share, by others or by the driver


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model takes memory. Widths in elements; `intermediate` is that of all experts a token goes through."""

    weights: int  # bytes, packed ones included
    shape: KVShape
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(
        cls, model: ModelShape, dtype_bytes: int | None = None, *, packed: bool = False, quantised: bool = False
    ) -> ModelSizes:
        """Return the sizes that a model's config.json tells; `dtype_bytes` are those it is served in, if other ones.

        Packed, as on a CPU, the matrix before the logits is there twice where the embeddings share it. `quantised` says
        that layers of a quantised checkpoint stay so. Norms and biases are left out: a thousandth of the rest.
        """
        size = dtype_bytes or model.dtype_bytes
        layers = model.layer_bytes(size) if quantised else size * model.layer_weights
        matrices = 1 if model.tied and not packed else 2  # before the first layer and behind the last
        return cls(
            layers + size * matrices * model.head_weights,
            KVShape(model.layers, model.kv_heads, model.head_dim, size, model.heads),
            model.hidden,
            max(model.experts_per_token * model.intermediate + model.shared, model.dense_intermediate),
            model.vocabulary,
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the plan in bytes, and whether the plan chose it."""

    bytes: int
    auto: bool

    def __str__(self) -> str:
        return f"auto = {self.bytes} bytes" if self.auto else f"{self.bytes}"


@dataclass(frozen=True, slots=True)
class Line:
    """An item of a plan. What is not `certain` is an estimate that never stops a start."""

    name: str
    bytes: int
    source: str
    certain: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of one replica goes. `given` is the sum of the lines and `left`."""

    device: str
    given: Line
    lines: tuple[Line, ...]
    most: int  # bytes that the certain lines may take together
    kv: Limit  # engine.kv_bytes
    stored: Limit  # prefix_cache.memory_bytes
    moving: Limit  # prefix_cache.moving_bytes
    prompt_tokens: int  # longest prompt whose attention was counted

    @property
    def left(self) -> int:
        """Return the bytes that no line takes; below 0 where limits exceed what is given."""
        return self.given.bytes - sum(line.bytes for line in self.lines)

    @property
    def needed(self) -> int:
        return sum(line.bytes for line in self.lines if line.certain)

    def check(self) -> None:
        """Raise MemoryPlanError with all lines if what is needed for certain does not fit."""
        if self.needed <= self.most:
            return
        raise MemoryPlanError(
            f"the model does not fit the memory of a replica: needed {self.needed:,} bytes, given {self.most:,}\n"
            f"{self.table()}\n{HELP}"
        )

    def sized(self, cache: PrefixCacheConfig) -> PrefixCacheConfig:
        """Return the settings of the prefix cache with the limits of this plan."""
        limits = {"memory_bytes": ByteSize(self.stored.bytes), "moving_bytes": ByteSize(self.moving.bytes)}
        return cache.model_copy(update=limits)

    def table(self) -> str:
        """Return a line of text an item, for people."""
        lines = [self.given, *self.lines, Line("left", self.left, "")]
        return "\n".join(
            f"  {line.bytes:>18,}  {amount(line.bytes):>10}  {line.name}" + (f" ({line.source})" if line.source else "")
            for line in lines
        )

    @property
    def summary(self) -> str:
        """Return the plan in one line."""
        items = ", ".join(f"{line.name} {amount(line.bytes)}" for line in self.lines if line.bytes)
        return f"memory of a replica on {self.device}: {amount(self.given.bytes)} = {items}, left {amount(self.left)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "given": asdict(self.given),
            "lines": [asdict(line) for line in self.lines],
            "left_bytes": self.left,
            "longest_prompt_tokens": self.prompt_tokens,
            "limits": {"engine.kv_bytes": asdict(self.kv), "prefix_cache.memory_bytes": asdict(self.stored)},
            "summary": self.summary,
        }


def plan(
    memory: DeviceMemory,
    sizes: ModelSizes,
    engine: EngineConfig,
    cache: PrefixCacheConfig,
    max_context: int,
    *,
    attention_token_bytes: float | None = None,
) -> MemoryPlan:
    """Plan the memory of a replica that serves contexts of up to `max_context` tokens.

    vLLM has kernels of its own, so on GPUs nothing is planned for those of warmkv.
    `attention_token_bytes` is what computing the attention of a chunk takes for each token before it, where that was
    measured. The plan may not fit: see `MemoryPlan.check`.
    """
    on_gpu, shape = memory.kind == "gpu", sizes.shape
    own = engine.has_own_kernels or not on_gpu
    given = given_by(memory, engine)
    fixed = _fixed(memory, sizes, engine, cache)
    token = attention_bytes(sizes, engine.tokens_per_step(on_gpu=on_gpu)) if own else 0.0
    if attention_token_bytes is not None:
        token = max(attention_token_bytes, _scoring_bytes(shape))
    room = given.bytes - sum(line.bytes for line in fixed)
    left = room - _set_bytes(engine, cache) - token * max_context
    moving = moving_limit(cache, shape, max_context, min(MOVING_SHARE * room, left))
    if cache.lower_bytes:
        fixed.append(Line("moving", moving.bytes, f"prefix_cache.moving_bytes{', auto' * moving.auto}", on_gpu))
        room -= moving.bytes
    if not on_gpu:  # estimates leave slots and prefixes as much as they would have of a machine without a limit
        certain = given.bytes - sum(line.bytes for line in fixed if line.certain)
        room = max(room, min(certain, int(MACHINE_SHARE * given.bytes)))
    kv, stored = _limits(memory, shape, engine, cache, room, token, max_context)
    prompt = min(max_context, kv.bytes // shape.token_bytes)
    lines = list(fixed)
    if own:
        how = "estimated" if attention_token_bytes is None else "measured"
        lines.append(Line("attention", math.ceil(token * prompt), f"{how} for a chunk at {prompt:,} tokens", on_gpu))
    lines += [
        Line("slots", kv.bytes, f"engine.kv_bytes{', auto' * kv.auto}"),
        Line("prefixes", stored.bytes, f"prefix_cache.memory_bytes{', auto' * stored.auto}"),
    ]
    return MemoryPlan(memory.name, given, tuple(lines), most_of(memory, engine), kv, stored, moving, prompt)


def given_by(memory: DeviceMemory, engine: EngineConfig) -> Line:
    """Return the memory that a replica is planned with."""
    whole = "" if memory.share == 1 else f" x {memory.share:.3g} for one replica"
    return Line(
        "given",
        int(memory.total * memory.share * engine.memory_fraction),
        f"{amount(memory.total)} of {memory.name}{whole} x engine.memory_fraction {engine.memory_fraction:g}",
    )


def most_of(memory: DeviceMemory, engine: EngineConfig) -> int:
    """Return bytes that what a replica needs for certain may take.

    On a CPU, where a limit takes nothing until it is used, that is its share of all memory there is.
    """
    return given_by(memory, engine).bytes if memory.kind == "gpu" else int(memory.hard * memory.share)


def check_weights(memory: DeviceMemory, engine: EngineConfig, weights: int) -> None:
    """Raise MemoryPlanError, before anything is loaded, if weights alone do not fit."""
    if weights > (most := most_of(memory, engine)):
        raise MemoryPlanError(
            f"the weights alone do not fit the memory of a replica: needed {weights:,} bytes, given {most:,} "
            f"({given_by(memory, engine).source}). {HELP}"
        )


def _fixed(memory: DeviceMemory, sizes: ModelSizes, engine: EngineConfig, cache: PrefixCacheConfig) -> list[Line]:
    """Return the lines that do not depend on the limits of slots and stored prefixes."""
    on_gpu = memory.kind == "gpu"
    step_tokens = engine.tokens_per_step(on_gpu=on_gpu)
    lines = [
        Line("weights", sizes.weights, "of the model as loaded"),
        Line(
            "activations",
            activation_bytes(sizes, step_tokens, engine.max_slots),
            f"estimated for {step_tokens} tokens at a time (engine.step_tokens) and the logits of "
            f"{engine.max_slots} sequences (engine.max_slots)",
            on_gpu and engine.has_own_kernels,
        ),
    ]
    if on_gpu and engine.records and engine.has_own_kernels:
        graphs = graph_bytes(sizes, engine.max_slots)
        lines.append(Line("graphs", graphs, f"estimated for {MOST_RECORDED} decode steps that are recorded"))
    if memory.taken:
        lines.append(Line("others", memory.taken, "CUDA context, and other processes on the device"))
    if not on_gpu:
        lines.append(Line("process", engine.processes(0) * PROCESS_BYTES, "estimated, of each replica", False))
        lines.append(Line("node", int(NODE_BYTES * memory.share), "estimated, for Ray and a gateway", False))
        if engine.preempt_seconds is not None:
            lines.append(Line("parked", int(engine.parked_bytes), "engine.parked_bytes", False))
        if cache.enabled and cache.host.memory_bytes:
            lines.append(Line("host tier", int(cache.host.memory_bytes), "prefix_cache.host.memory_bytes"))
    return lines


def _set_bytes(engine: EngineConfig, cache: PrefixCacheConfig) -> int:
    """Return the bytes of slots and stored prefixes that are set, and not `auto`."""
    kv = 0 if engine.kv_bytes == "auto" else engine.kv_limit
    return kv + (0 if cache.memory_bytes == "auto" or not cache.enabled else cache.memory_limit)


def moving_limit(cache: PrefixCacheConfig, shape: KVShape, max_context: int, most: float = math.inf) -> Limit:
    """Return the limit of evicted blocks on their way to lower tiers: that of the longest prompt, if `most` allows.

    Storing a prompt evicts as much as it takes at once, before a thread has copied any of it.
    """
    if cache.moving_bytes != "auto":
        return Limit(int(cache.moving_bytes), False)
    longest = weight(cache.storage, shape)(max_context * shape.token_bytes, max_context)
    return Limit(int(min(longest, cache.lower_bytes, max(most, MOVING_LEAST))), True)


def _limits(
    memory: DeviceMemory,
    shape: KVShape,
    engine: EngineConfig,
    cache: PrefixCacheConfig,
    room: int,
    token: float,
    max_context: int,
) -> tuple[Limit, Limit]:
    """Return the limits of slots and of stored prefixes, which share `room` with the attention of the longest prompt.

    Slots get at least what a request of one chunk needs: with less nothing could be served.
    """
    cap = math.inf  # of both together
    if memory.kind == "machine":
        cap = max(MACHINE_SHARE * memory.total * memory.share, MACHINE_LEAST)
    auto_stored = cache.enabled and cache.memory_bytes == "auto"
    share = STORED_SHARE if auto_stored else 0.0
    stored = 0 if auto_stored or not cache.enabled else cache.memory_limit
    if engine.kv_bytes == "auto":
        most = (1 - share) * cap if auto_stored else max(cap - stored, (1 - STORED_SHARE) * cap)
        free = _slots(room - stored, shape.token_bytes, token, max_context, share)
        step_tokens = engine.tokens_per_step(on_gpu=memory.kind == "gpu")
        least = CHUNK_FACTOR * min(max_context, step_tokens) * shape.token_bytes
        kv = max(int(min(free, most)), least)
    else:
        kv = engine.kv_limit
    if auto_stored:
        left = room - kv - math.ceil(token * min(max_context, kv // shape.token_bytes))
        wanted = kv * share / (1 - share) if engine.kv_bytes == "auto" else max(cap - kv, share * cap)
        stored = max(0, int(min(left, wanted)))
    return Limit(kv, engine.kv_bytes == "auto"), Limit(stored, auto_stored)


def _slots(room: float, kv_token: int, attention_token: float, max_context: int, share: float) -> float:
    """Return bytes for slots, such that attention of the longest prompt that they admit and the share of prefixes fit,
    too.
    """
    whole = (1 - share) * (room - attention_token * max_context)
    if whole >= kv_token * max_context:
        return whole
    # The longest prompt is what slots have room for: tokens = slots / kv_token, slots = (1 - share) (room - attention).
    return (1 - share) * room * kv_token / (kv_token + (1 - share) * attention_token)


def activation_bytes(sizes: ModelSizes, step_tokens: int, max_slots: int) -> int:
    """Return bytes of one layer's activations for the tokens of a step, of the logits and of scoring a prompt.

    Tensors of a layer are freed before the next one's: residual and its normed copy (float32 meanwhile), queries, keys
    and values before and after rotation, then gate, up and their product in the MLP. Logits are those of the last
    position of each sequence.
    """
    return _pass_bytes(sizes, max(step_tokens, max_slots), max_slots) + SCORING_BYTES


def _pass_bytes(sizes: ModelSizes, rows: int, drawn: int) -> int:
    shape = sizes.shape
    heads = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    elements = 4 * sizes.hidden + 2 * heads + 3 * sizes.intermediate
    layer = rows * (elements * shape.dtype_bytes + 2 * 4 * sizes.hidden)
    return layer + drawn * sizes.vocabulary * (SAMPLING_BYTES + shape.dtype_bytes)


def graph_bytes(sizes: ModelSizes, max_slots: int) -> int:
    """Return bytes of the CUDA graphs of decode steps.

    They share one pool, in which the largest batch has its activations, and the logits that steps leave. A driver
    keeps the launches of each.
    """
    rows = -(-max_slots // 16) * 16  # batches are padded to such multiples at most
    left = rows * sizes.vocabulary * sizes.shape.dtype_bytes
    return _pass_bytes(sizes, rows, rows) + left + MOST_RECORDED * sizes.shape.layers * RECORDED_LAYER_BYTES


def attention_bytes(sizes: ModelSizes, step_tokens: int) -> float:
    """Return bytes that the attention of a chunk of a whole step, in one layer, takes for each token of the prompt up
    to it.

    The mask of the chunk as a bool and as a bias; keys and values repeated for the query heads of a group, as kernels
    without grouped queries want them; for policies that score, keys in float32, twice, and four scores a query head.
    Kernels that hold all logits at once take more: on a GPU that is measured (`replicas/device_memory.py`).
    """
    shape = sizes.shape
    repeated = 2 * shape.q_heads * shape.head_dim * shape.dtype_bytes
    return step_tokens * (1 + shape.dtype_bytes) + repeated + _scoring_bytes(shape)


def _scoring_bytes(shape: KVShape) -> int:
    return 2 * shape.kv_heads * shape.head_dim * 4 + 4 * 4 * shape.q_heads


def amount(size: int) -> str:
    """Return bytes as people write them, as in `1.50 GiB`."""
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB else f"{size / (1 << 20):,.0f} MiB"
