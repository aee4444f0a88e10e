"""warmkv as a contestant: its engine, from the synthetic contexts on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from benchmarks.engine.generate import Run, step_seconds
from benchmarks.engine.setting import Models, Setting
from benchmarks.engine.synthetic import FIRST, Contexts
from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import synthetic
from warmkv.measuring.clock import Stopwatch, now
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.slots.slot import Slot

PLENTY = 1 << 42
"""Bytes, where memory is not the question."""


def engine(models: Models, setting: Setting, *, stored: int = 0, **settings: Any) -> Engine:
    """Return a warm engine; `stored` is what its prefix cache may take, in bytes. It has none by default."""
    settings = {"max_slots": setting.sequences, "kv_bytes": PLENTY, "max_queue": 1 << 16, **settings}
    config = EngineConfig.model_validate(settings | dict(setting.engine))
    cache = PrefixCacheConfig.model_validate({"memory_bytes": stored} if stored else {"enabled": False})
    running = Engine(models.warm, config, cache, clock=now)
    running.warm_up()
    return running


class Warm:
    """A policy of warmkv. Every step is a step of the engine, with all that it does beside computing."""

    def __init__(
        self, models: Models, contexts: Contexts, setting: Setting, policy: str, name: str, running: Engine
    ) -> None:
        self._models, self._contexts, self._new = models, contexts, setting.new_tokens
        self.policy, self.name = PolicySpec.model_validate(policy), name
        self._engine = running
        self.kv_bytes = 0  # of the slots of the last run

    def run(self, sequences: int, steps: int) -> Run:
        running = self._engine
        slots: list[Slot] = []
        synthetic.end_all(running)
        for number in range(sequences):
            prompt = synthetic.random_prompt(self._models.warm, self.policy, self._contexts.of(number))
            slots += synthetic.begin_decoding(running, self.policy, prompt, 1, self._new).slots
        self.kv_bytes = sum(slot.resident_bytes for slot in slots)
        decoding = [running.scheduler.decoding[slot] for slot in slots]
        told: list[list[EngineEvent]] = [[] for _ in decoding]
        for sequence, events in zip(decoding, told, strict=True):
            sequence.last_token, sequence.emit = FIRST, events.append
        Stopwatch(self._models.device)  # nothing of the hand-off runs on into the first step
        times = []
        graphs = running.executor.steps.graphs
        with graphs.recording_soon() if graphs is not None else nullcontext():
            for _ in range(steps):
                running.step()
                times.append(now())
        running.collect()  # the tokens of the last step
        synthetic.end_all(running)
        drawn = [[event for event in events if isinstance(event, int)] for events in told]
        if any(len(tokens) != steps for tokens in drawn):
            raise RuntimeError("a sequence ended early: its logits were not finite")
        return Run(step_seconds(times), drawn)
