"""Race `chunks` and `long`: a chunk of a prompt at the end of contexts of many lengths; whole long prompts.

Chunks are compared with the seconds in which the device would do their products as it does those of large matrices.
"""

from __future__ import annotations

import torch

from benchmarks.engine.arena import Arena
from benchmarks.engine.device_work import watch
from warmkv.measuring import synthetic
from warmkv.measuring.clock import Stopwatch
from warmkv.policies.compression.observe import compute_prompt
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine

ENDS = (2_048, 8_192, 32_768, 131_072)
"""Tokens up to the end of a chunk, as far as the model goes."""
PROMPTS, POLICIES = (2_048, 8_192, 131_072), ("full", "h2o@1024")
TIMED = 3
SIDE = 8_192
"""Rows and columns of the matrices that tell how fast the device multiplies."""


def race(arena: Arena) -> None:
    """Compare the seconds of chunks with those of their products."""
    results, models, most = arena.results, arena.models, _most(arena)
    rate = products_per_second(models.device, models.warm.dtype, SIDE if models.device.type == "cuda" else SIDE // 8)
    results.add("products_per_second", rate)
    engine = arena.engine
    for end in (end for end in ENDS if end <= most):
        arena.say(f"chunks: up to {end:,}")
        arena.attempt(f"chunks: up to {end:,}", _chunk, arena, engine, end, rate)


def long(arena: Arena) -> None:
    """Time whole prompts, computed in chunks with nothing beside them."""
    for tokens in (tokens for tokens in PROMPTS if tokens <= _most(arena)):
        for name in POLICIES:
            arena.say(f"long: a prompt of {tokens:,} tokens under {name}")
            arena.attempt(
                f"a prompt of {tokens:,} under {name}", _prompt, arena, PolicySpec.model_validate(name), tokens
            )


def _most(arena: Arena) -> int:
    return min(arena.models.warm.max_context, ENDS[0] if arena.setting.quick else ENDS[-1])


def products_per_second(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Return multiplications and additions a second in a product of two large matrices."""
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    best = 0.0
    for _ in range(5):
        stopwatch = Stopwatch(device)
        left @ right
        best = max(best, 2 * side**3 / stopwatch.seconds())
    return best


def _chunk(arena: Arena, engine: Engine, end: int, rate: float) -> None:
    models, spec, results, whole = arena.models, PolicySpec(), arena.results, engine.scheduler.step_tokens
    tokens = min(whole, end // 2)
    random = synthetic.random_keys_and_values(models.warm, end + 1, arena.setting.seed)
    prompt = synthetic.random_prompt(models.warm, spec, random)
    times = []

    def compute() -> None:
        synthetic.begin_chunk(engine, spec, prompt, end - tokens)
        engine.scheduler.step_tokens = tokens  # a token is left, so that no hand-off follows
        try:
            engine.step()
        finally:
            engine.scheduler.step_tokens = whole
            synthetic.end_all(engine)

    for _ in range(TIMED + 1):
        stopwatch = Stopwatch(models.device)
        compute()
        times.append(stopwatch.seconds())
    shape = models.warm.kv_shape
    attended = 4 * tokens * (end - tokens / 2) * shape.layers * shape.q_heads * shape.head_dim
    least = (2 * tokens * models.weight_bytes / models.warm.dtype.itemsize + attended) / rate
    results.add(f"chunk_{end}", least / min(times[1:]))
    results.add(f"chunk_milliseconds_{end}", 1e3 * min(times[1:]))
    if (seen := watch(models.device, compute)) is not None:
        results.add(f"chunk_busy_{end}", seen.busy / seen.seconds)
        results.note(f"a chunk of {tokens} tokens up to {end:,}, {seen.kernels} kernels: {seen.longest(8)}")


@torch.inference_mode()
def _prompt(arena: Arena, spec: PolicySpec, tokens: int) -> None:
    warm = arena.models.warm
    ids = torch.randint(warm.vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens))
    chunk = arena.engine.scheduler.step_tokens
    compute_prompt(warm, ids[: 4 * chunk], spec, chunk=chunk)
    stopwatch = Stopwatch(warm.device)
    compute_prompt(warm, ids, spec, chunk=chunk)
    arena.results.add(f"prompt_seconds_{spec.name}_{tokens}", stopwatch.seconds())
