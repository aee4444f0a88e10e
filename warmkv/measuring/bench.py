"""`warmkv bench`: what policies cost and save on this machine, cell by cell.

Policies take turns within every repeat, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pydantic import ByteSize

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import synthetic, ttft
from warmkv.measuring.clock import now
from warmkv.measuring.decoding import Decoded, decode
from warmkv.measuring.plan import BenchPlan
from warmkv.measuring.spread import Spread
from warmkv.policies import budgets
from warmkv.policies.slot_sizes import slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.device_memory import plan_replica
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import LoadedModel

Progress = Callable[[str], None]
"""Told what is measured next; once for every measurement."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A prompt alone in the engine, under one policy. Times in seconds."""

    policy: str
    prompt_tokens: int
    warm_tokens: int  # of the warm request's prompt, whose keys and values were stored
    tokens_per_second: float  # prompt tokens over `prefill`
    prefill: Spread  # computing a cold prompt, hand-off included
    ttft_cold: Spread  # from submission to the first token
    ttft_warm: Spread
    workspace_bytes: int  # while it is computed


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A batch that decodes from synthetic keys and values. Times in seconds, bytes of all its sequences together."""

    policy: str
    prompt_tokens: int  # of every sequence
    batch: int
    kept_tokens: float  # entries per layer and KV head after the hand-off, the average
    tokens_per_second: float  # of the whole batch
    tpot: Spread  # a decode step
    hand_off: Spread  # of one sequence: select, fill its slot
    slot_bytes: int  # of the batch's slots, everything counted, room for its new tokens included
    pool_bytes: int  # all that is allocated for slots, idle ones included
    full_bytes: int  # what slots of the full cache would take


@dataclass(frozen=True, slots=True)
class Bench:
    prefill: list[PrefillRow]
    decode: list[DecodeRow]


def measurements(plan: BenchPlan) -> int:
    """Count the reports of progress that `run` makes."""
    cells = len(plan.specs()) * len(plan.lengths)
    return len(plan.specs()) + cells * plan.repeats * (len(plan.batches) + plan.prefill)


def run(
    plan: BenchPlan, model: LoadedModel, engine: EngineConfig, cache: PrefixCacheConfig, progress: Progress
) -> Bench:
    """Measure every cell. Raises MeasureError if the model or engine.kv_bytes cannot do one."""
    engine = engine.model_copy(update={"max_slots": max(engine.max_slots, *plan.batches)})
    stored = 4 * max(plan.lengths) * model.kv_shape.token_bytes  # so that what is to be warm stays warm
    planned = plan_replica(model, engine, cache)
    cache = cache.model_copy(update={"enabled": True, "memory_bytes": ByteSize(max(planned.stored.bytes, stored))})
    runner = Engine(model, engine, cache, clock=now)
    for label, spec in plan.specs().items():
        progress(f"warm-up, {label}")
        ttft.warm_up(runner, spec)
    bench = Bench([], [])
    for length in plan.lengths:
        if plan.prefill:
            bench.prefill.extend(_prefill_rows(plan, length, runner, cache.default_ttl, progress))
        bench.decode.extend(_decode_rows(plan, length, runner, progress))
    return bench


def _prefill_rows(plan: BenchPlan, length: int, engine: Engine, ttl: str, progress: Progress) -> list[PrefillRow]:
    random = np.random.default_rng((plan.seed, length))
    specs = plan.specs()
    pairs: dict[str, list[ttft.Pair]] = defaultdict(list)
    for _ in range(plan.repeats):
        for label, spec in specs.items():
            progress(f"prompts of {length:,}, {label}")
            pairs[label].append(ttft.cold_and_warm(engine, spec, length, plan.new_tokens, ttl, random))
    return [_prefill_row(label, spec, length, engine, pairs[label]) for label, spec in specs.items()]


def _prefill_row(label: str, spec: PolicySpec, length: int, engine: Engine, pairs: list[ttft.Pair]) -> PrefillRow:
    prefill = Spread.of([pair.cold.prefill for pair in pairs])
    return PrefillRow(
        policy=label,
        prompt_tokens=length,
        warm_tokens=min(pair.warm.reused for pair in pairs),
        tokens_per_second=length / prefill.median,
        prefill=prefill,
        ttft_cold=Spread.of([pair.cold.seconds for pair in pairs]),
        ttft_warm=Spread.of([pair.warm.seconds for pair in pairs]),
        workspace_bytes=synthetic.workspace_bytes(engine, spec, length),
    )


def _decode_rows(plan: BenchPlan, length: int, engine: Engine, progress: Progress) -> list[DecodeRow]:
    full = slot_bytes(PolicySpec(), engine.model.kv_shape, length, plan.new_tokens)
    specs = {label: budgets.in_force(spec, length, plan.new_tokens) for label, spec in plan.specs().items()}
    random = synthetic.random_keys_and_values(engine.model, length, plan.seed)
    prompts = {label: synthetic.random_prompt(engine.model, spec, random) for label, spec in specs.items()}
    rows = []
    for batch in plan.batches:
        taken: dict[str, list[Decoded]] = defaultdict(list)
        for _ in range(plan.repeats):
            for label, spec in specs.items():
                progress(f"{batch} x {length:,}, {label}")
                taken[label].append(decode(engine, spec, prompts[label], batch, plan.new_tokens))
        rows += [_decode_row(label, length, batch, taken[label], batch * full) for label in specs]
    return rows


def _decode_row(label: str, length: int, batch: int, taken: list[Decoded], full: int) -> DecodeRow:
    tpot, first = Spread.of([one.tpot for one in taken]), taken[0]
    return DecodeRow(
        policy=label,
        prompt_tokens=length,
        batch=batch,
        kept_tokens=first.kept,
        tokens_per_second=batch / tpot.median,
        tpot=tpot,
        hand_off=Spread.of([one.hand_off for one in taken]),
        slot_bytes=first.slot_bytes,
        pool_bytes=first.pool_bytes,
        full_bytes=full,
    )
