"""Race `steps`: decode steps of one sequence and of batches, of equal and of mixed lengths, under many policies.

Each is compared with the seconds in which its weights and resident keys and values could be copied. On a GPU it is
also said how many kernels a step runs, for what share of it one runs, and how fast attention reads.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from benchmarks.engine.arena import Arena
from benchmarks.engine.decode import copy_bandwidth
from benchmarks.engine.device_work import watch
from warmkv.measuring import synthetic
from warmkv.measuring.clock import Stopwatch
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine

POLICIES = ("full", "snapkv@{}", "full+fp8", "full+kivi4", "h2o@{}", "rocketkv@{}")
MANY = (8, 32)
MIXED = (32, 16, 8, 4, 2, 1)
"""Of a context, the parts that sequences of mixed lengths have, in turn."""
EQUAL = 4
"""The same where a batch has equal lengths."""
UNTIMED, TIMED, WATCHED = 4, 24, 4
"""Steps: what is recorded and first read, what is timed, and what the profiler sees."""
ATTENTION = ("attend_split", "combine")


def race(arena: Arena) -> None:
    """Compare the seconds of steps with their bound."""
    setting, models = arena.setting, arena.models
    copied = copy_bandwidth(models.device, setting.copy_bytes)
    arena.results.add("steps_copy_bytes_per_second", copied)
    engine = arena.engine
    batches = {"alone": [setting.context]}
    batches |= {f"equal_{batch}": [setting.context // EQUAL] * batch for batch in MANY}
    batches |= {f"mixed_{batch}": [setting.context // MIXED[at % len(MIXED)] for at in range(batch)] for batch in MANY}
    for name in POLICIES:
        spec = PolicySpec.model_validate(name.format(setting.memory_budget))
        for what, lengths in batches.items():
            arena.say(f"steps: {spec.label}, {what}")
            arena.attempt(f"steps: {spec.label}, {what}", _measure, arena, engine, spec, what, lengths, copied)


def _measure(arena: Arena, engine: Engine, spec: PolicySpec, what: str, lengths: list[int], copied: float) -> None:
    device, setting, results = arena.models.device, arena.setting, arena.results
    new = UNTIMED + TIMED + WATCHED + 2
    name = f"{spec.name}{'' if spec.storage == 'model' else '_' + spec.storage}_{what}"
    synthetic.end_all(engine)
    held = 0
    for number, tokens in enumerate(lengths):
        prompt = synthetic.random_prompt(
            arena.models.warm, spec, arena.contexts.of(number % setting.sequences)[:, :, :, :tokens]
        )
        held += sum(slot.resident_bytes for slot in synthetic.begin_decoding(engine, spec, prompt, 1, new).slots)
    try:
        graphs = engine.executor.steps.graphs
        with graphs.recording_soon() if graphs is not None else nullcontext():
            _step(engine, UNTIMED)
        stopwatch = Stopwatch(device)
        _step(engine, TIMED)
        seconds = stopwatch.seconds() / TIMED
        seen = watch(device, lambda: _step(engine, WATCHED))
        if len(engine.scheduler.decoding) != len(lengths):
            raise RuntimeError("a sequence ended early: its logits were not finite")
    finally:
        synthetic.end_all(engine)
    results.add(f"steps_{name}", (arena.models.weight_bytes + held) / copied / seconds)
    results.add(f"step_milliseconds_{name}", 1e3 * seconds)
    if seen is not None:
        results.add(f"step_kernels_{name}", seen.kernels / WATCHED)
        results.add(f"step_busy_{name}", seen.busy / seen.seconds)
        if attended := seen.of(*ATTENTION):
            results.add(f"attention_bandwidth_{name}", WATCHED * held / attended / copied)
        results.note(f"{name}, a step: {seen.longest(8)} (of {WATCHED})")


@torch.inference_mode()
def _step(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
