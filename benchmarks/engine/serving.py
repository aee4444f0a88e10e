"""The race of whole requests under one memory limit: prompts and answers of mixed lengths, all there at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice

import torch

from benchmarks.engine import paged
from benchmarks.engine.arena import Arena
from benchmarks.engine.results import PAGED
from benchmarks.engine.warm import engine
from warmkv.measuring.clock import Stopwatch
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.protocol import Failed, Finished, GenerateRequest, SamplingParams

Requests = list[tuple[list[int], int]]
"""Token ids of each prompt, and tokens to draw."""
SHORT = 4
"""Requests that warm a contestant up."""


def race(arena: Arena) -> None:
    """Requests per second until the last is answered."""
    setting, results, load = arena.setting, arena.results, arena.setting.load
    limit = load.limit * arena.models.warm.kv_shape.token_bytes
    results.note(
        f"serving: {load.requests} requests, prompts of {_listed(load.prompts)} and answers of "
        f"{_listed(load.new_tokens)} tokens; {limit:,} bytes of KV memory ({load.limit:,} tokens of a full cache), of "
        f"warmkv for slots and prompts together, of the peer for pages alone; snapkv keeps {load.budget} tokens"
    )
    ours = {"warmkv_snapkv": PolicySpec(name="snapkv", budget=load.budget), "warmkv_full": PolicySpec()}
    running = engine(arena.models, setting, max_slots=load.requests, kv_bytes=limit, step_tokens=load.chunk)
    contestants: dict[str, Callable[[Requests], float]] = {
        name: partial(serve, running, policy) for name, policy in ours.items()
    }
    contestants[PAGED] = partial(_serve_paged, arena)
    for name, contestant in list(contestants.items()):
        arena.say(f"warming up serving: {name}")
        if arena.attempt(f"serving: {name}", contestant, requests(arena, 0)[:SHORT]) is None:
            del contestants[name]
    for number, turn in enumerate(arena.repeats("serving"), 1):
        mix = requests(arena, number)
        for name, contestant in list(contestants.items()):
            arena.say(f"{turn}: {name}, {len(mix)} requests")
            seconds = arena.attempt(f"serving: {name}", contestant, mix)
            if seconds is None:
                del contestants[name]
            else:
                results.add(f"requests_per_second_{name}", len(mix) / seconds)


def requests(arena: Arena, number: int) -> Requests:
    """Return new prompts in every repeat, so that no prefix is shared; lengths of prompts and answers meet in all
    pairs.
    """
    load, vocabulary = arena.setting.load, arena.models.warm.vocabulary
    generator = torch.Generator().manual_seed(arena.setting.seed + 1_000 * (number + 1))
    pairs = [
        (prompt, load.new_tokens[(at + lap) % len(load.new_tokens)])
        for lap in range(len(load.new_tokens))
        for at, prompt in enumerate(load.prompts)
    ]
    return [
        (torch.randint(vocabulary, (prompt,), generator=generator).tolist(), new)
        for prompt, new in islice(cycle(pairs), load.requests)
    ]


def serve(running: Engine, policy: PolicySpec, requests: Requests) -> float:
    """Return seconds that warmkv's engine takes. Raises RuntimeError if it does not answer all."""
    told: list[EngineEvent] = []
    watch = Stopwatch(running.model.device)
    for number, (prompt, new) in enumerate(requests):
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        running.submit(GenerateRequest(f"{number}", tuple(prompt), (), sampling, policy), told.append)
    while running.step():
        pass
    seconds = watch.seconds()
    drawn, asked = (
        sum(event.output_tokens for event in told if isinstance(event, Finished)),
        sum(new for _, new in requests),
    )
    if drawn != asked or any(isinstance(event, Failed) for event in told):
        raise RuntimeError(f"{drawn} tokens came, {asked} were asked for")
    return seconds


def _serve_paged(arena: Arena, requests: Requests) -> float:
    """Return seconds that continuous batching takes once its manager runs.

    Raises RuntimeError if it does not answer all.
    """
    load = arena.setting.load
    with paged.manager(arena.models.peer, load.limit // paged.PAGE, load.chunk) as running:
        watch = Stopwatch(arena.models.device)
        answers = paged.answers(running, [prompt for prompt, _ in requests], [new for _, new in requests])
        seconds = watch.seconds()
    if any(len(answer.generated_tokens) != new for answer, (_, new) in zip(answers, requests, strict=True)):
        raise RuntimeError("not all tokens came")
    return seconds


def _listed(lengths: tuple[int, ...]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
