"""Races of decoding from synthetic contexts: against the peers, and against the machine's bandwidth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from benchmarks.engine.generate import Contestant, Generate, GenerateStatic, Run
from benchmarks.engine.paged import ContinuousBatching
from benchmarks.engine.results import Results
from benchmarks.engine.setting import Models, Setting
from benchmarks.engine.synthetic import Contexts
from benchmarks.engine.warm import Warm
from warmkv.measuring.clock import Stopwatch

FEWEST = 8
"""Steps of a run, at least."""
PAGED = "continuous_batching"


def race(models: Models, setting: Setting, results: Results, progress: Callable[[str], None]) -> None:
    """Tokens per second of everybody, taking turns in every repeat."""
    contexts = Contexts(models, setting)
    snapkv, full = (Warm(models, contexts, setting, policy, name) for policy, name in _policies(setting))
    paged: list[Contestant] = [ContinuousBatching(models, contexts, setting.new_tokens, n) for n in (None, 1)]
    static = GenerateStatic(models, contexts, setting.new_tokens, compiled=setting.compile)
    dynamic = Generate(models, contexts, setting.new_tokens)
    steps = {}
    warmed: dict[str, Run] = {}
    for contestant in (snapkv, full, dynamic, static, *paged):
        progress(f"decode: warming up {contestant.name}")
        try:
            warmed[contestant.name] = run = _run(contestant, setting.sequences, min(FEWEST, setting.new_tokens - 1))
        except Exception as error:  # a peer that fails on this machine is reported, and the others race on
            if contestant in (snapkv, full):
                raise
            results.note(f"{contestant.name} could not run: {type(error).__name__}: {_first_line(error)}")
            continue
        steps[contestant.name] = max(min(FEWEST, setting.new_tokens - 1), _affordable(run, setting))
    everybody = [each for each in (snapkv, full, dynamic, static, *_fastest(paged, warmed, results)) if each.name in steps]
    for repeat in range(setting.repeats):
        for contestant in everybody:
            count = steps[contestant.name]
            progress(f"decode {repeat + 1}/{setting.repeats}: {contestant.name}, {count} steps")
            run = _run(contestant, setting.sequences, count)
            name = PAGED if contestant in paged else contestant.name
            results.add(f"tokens_per_second_{name}", setting.sequences / run.seconds)
            if contestant is dynamic and (mine := warmed[full.name].tokens):
                results.add("same_tokens_full_as_generate", _agreement(mine, run.tokens))
    if not setting.compile:
        results.note("generate_static ran without torch.compile")
    timed = ", ".join(f"{name} {count}" for name, count in steps.items())
    results.note(f"decode steps timed per repeat, of {setting.new_tokens - 1} (at most {setting.seconds:g} s): {timed}")


def bandwidth(models: Models, setting: Setting, results: Results, progress: Callable[[str], None]) -> None:
    """How much of the bound set by bytes a decode step of warmkv reaches, alone and in the batch."""
    contexts = Contexts(models, setting)
    contestants = [Warm(models, contexts, setting, policy, name) for policy, name in _policies(setting)]
    for batch in (1, setting.sequences):
        steps = {}
        for contestant in contestants:
            progress(f"bandwidth: warming up {contestant.name}, batch {batch}")
            steps[contestant.name] = max(
                min(FEWEST, setting.new_tokens - 1),
                _affordable(_run(contestant, batch, min(FEWEST, setting.new_tokens - 1)), setting),
            )
        for repeat in range(setting.repeats):
            copied = copy_bandwidth(models.device, setting.copy_bytes)
            results.add("copy_bytes_per_second", copied)
            for contestant in contestants:
                progress(f"bandwidth {repeat + 1}/{setting.repeats}: {contestant.name}, batch {batch}")
                run = _run(contestant, batch, steps[contestant.name])
                bound = (models.weight_bytes + contestant.kv_bytes) / copied
                results.add(f"bandwidth_{contestant.name.removeprefix('warmkv_')}_{_batch_name(batch)}", bound / run.seconds)


def copy_bandwidth(device: torch.device, size: int, repeats: int = 5) -> float:
    """Bytes per second of a copy of `size` bytes, those read and those written counted: the best of some."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # touches the pages
    best = 0.0
    for _ in range(repeats):
        watch = Stopwatch(device)
        target.copy_(source)
        best = max(best, 2 * size / watch.seconds())
    return best


def _batch_name(batch: int) -> str:
    return "alone" if batch == 1 else "batch"


def _policies(setting: Setting) -> tuple[tuple[str, str], tuple[str, str]]:
    return (f"snapkv@{setting.budget}", "warmkv_snapkv"), ("full", "warmkv_full")


def _run(contestant: Contestant, sequences: int, steps: int) -> Run:
    run = contestant.run(sequences, steps)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what one contestant took is there for the next
    return run


def _affordable(run: Run, setting: Setting) -> int:
    """Steps that a run may have: all new tokens, unless that takes longer than a contestant has."""
    return min(setting.new_tokens - 1, int(setting.seconds / run.seconds))


def _fastest(paged: Sequence[Contestant], warmed: dict[str, Run], results: Results) -> list[Contestant]:
    """The faster way of the peer to batch."""
    able = [each for each in paged if each.name in warmed]
    if not able:
        return []
    best = min(able, key=lambda each: warmed[each.name].seconds)
    others = ", ".join(f"{each.name} {warmed[each.name].seconds:.4g} s a step" for each in able)
    results.note(f"continuous batching, its paged cache filled with the same contexts, ran as {best.name} ({others})")
    return [best]


def _agreement(these: list[list[int]], those: list[list[int]]) -> float:
    """Share of equal tokens, as far as both go."""
    pairs = [(a, b) for one, other in zip(these, those, strict=True) for a, b in zip(one, other, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
