"""Races of decoding from synthetic contexts: against the peers, and against the machine's bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.engine.arena import Arena
from benchmarks.engine.generate import Contestant, Generate, GenerateStatic, Run
from benchmarks.engine.paged import ContinuousBatching
from benchmarks.engine.results import PAGED
from benchmarks.engine.warm import Warm
from warmkv.measuring.clock import Stopwatch

FEWEST = 8
"""Steps of a run, at least."""


def race(arena: Arena) -> None:
    """Tokens per second of everybody, taking turns in every repeat."""
    setting, results, models = arena.setting, arena.results, arena.models
    snapkv, full = _ours(arena)
    dynamic = Generate(models, arena.contexts, setting.new_tokens)
    static = GenerateStatic(models, arena.contexts, setting.new_tokens, compiled=setting.compile)
    paged = [ContinuousBatching(models, arena.contexts, setting.new_tokens, at_once) for at_once in (None, 1)]
    warmed = _warm_up(arena, (snapkv, full, dynamic, static, *paged), setting.sequences)
    racing: dict[str, Contestant] = {each.name: each for each in (snapkv, full, dynamic, static) if each.name in warmed}
    if best := _fastest(arena, paged, warmed):
        racing[PAGED] = best
        warmed[PAGED] = warmed[best.name]
    steps = {name: _steps(arena, warmed[name]) for name in racing}
    for turn in arena.repeats("decode"):
        for name, contestant in list(racing.items()):
            arena.say(f"{turn}: {name}, {steps[name]} steps")
            run = arena.attempt(name, contestant.run, setting.sequences, steps[name])
            if run is None:
                del racing[name]
                continue
            results.add(f"tokens_per_second_{name}", setting.sequences / run.seconds)
            if contestant is dynamic and full.name in warmed:
                results.add("same_tokens_full_as_generate", _agreement(warmed[full.name].tokens, run.tokens))
    if not setting.compile:
        results.note("generate_static ran without torch.compile")
    timed = ", ".join(f"{name} {count}" for name, count in steps.items())
    results.note(f"decode steps per repeat, of {setting.new_tokens - 1} (at most {setting.seconds:g} s): {timed}")


def bandwidth(arena: Arena) -> None:
    """How much of the bound set by bytes a decode step of warmkv reaches, alone and in the batch."""
    setting, results, models = arena.setting, arena.results, arena.models
    contestants = _ours(arena)
    batches = {"alone": 1, "batch": setting.sequences}
    warmed = {name: _warm_up(arena, contestants, batch) for name, batch in batches.items()}
    for turn in arena.repeats("bandwidth"):
        copied = copy_bandwidth(models.device, setting.copy_bytes)
        results.add("copy_bytes_per_second", copied)
        for batch, sequences in batches.items():
            for contestant in contestants:
                if contestant.name not in warmed[batch]:
                    continue
                arena.say(f"{turn}: {contestant.name}, {sequences} sequences")
                steps = _steps(arena, warmed[batch][contestant.name])
                run = arena.attempt(contestant.name, contestant.run, sequences, steps)
                if run is None:
                    del warmed[batch][contestant.name]
                    continue
                bound = (models.weight_bytes + contestant.kv_bytes) / copied
                results.add(f"bandwidth_{contestant.name.removeprefix('warmkv_')}_{batch}", bound / run.seconds)
    arena.tidy()


def copy_bandwidth(device: torch.device, size: int, repeats: int = 5) -> float:
    """Return bytes per second of a copy of `size` bytes, those read and those written counted: the best of some."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # touches the pages
    best = 0.0
    for _ in range(repeats):
        watch = Stopwatch(device)
        target.copy_(source)
        best = max(best, 2 * size / watch.seconds())
    return best


def _ours(arena: Arena) -> tuple[Warm, Warm]:
    return arena.warm(f"snapkv@{arena.setting.budget}", "warmkv_snapkv"), arena.warm("full", "warmkv_full")


def _warm_up(arena: Arena, contestants: Sequence[Contestant], sequences: int) -> dict[str, Run]:
    """Return a short run of everybody who is able to, by name."""
    warmed = {}
    for contestant in contestants:
        arena.say(f"warming up {contestant.name}, {sequences} sequences")
        if run := arena.attempt(contestant.name, contestant.run, sequences, min(FEWEST, arena.setting.new_tokens - 1)):
            warmed[contestant.name] = run
    return warmed


def _steps(arena: Arena, warmed: Run) -> int:
    """Return steps that a run may have: for all new tokens, unless that takes longer than a contestant has."""
    most = arena.setting.new_tokens - 1
    return max(min(FEWEST, most), min(most, int(arena.setting.seconds / warmed.seconds)))


def _fastest(arena: Arena, paged: Sequence[Contestant], warmed: dict[str, Run]) -> Contestant | None:
    """Return the faster way of continuous batching to batch."""
    able = [each for each in paged if each.name in warmed]
    if not able:
        return None
    best = min(able, key=lambda each: warmed[each.name].seconds)
    speeds = ", ".join(f"{each.name} {warmed[each.name].seconds:.4g} s a step" for each in able)
    arena.results.note(
        f"{PAGED}: its paged cache held the same contexts; raced as {best.name}, the fastest of {speeds}"
    )
    return best


def _agreement(these: list[list[int]], those: list[list[int]]) -> float:
    """Share of equal tokens, as far as both go."""
    pairs = [(a, b) for one, other in zip(these, those, strict=True) for a, b in zip(one, other, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs)
