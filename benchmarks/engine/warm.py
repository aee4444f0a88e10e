"""warmkv as a contestant: its engine, from the synthetic contexts on."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.generate import Run, step_seconds
from benchmarks.engine.setting import Models, Setting
from benchmarks.engine.synthetic import FIRST, Contexts
from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import synthetic
from warmkv.measuring.clock import Stopwatch, now
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine import Engine

PLENTY = 1 << 42
"""Bytes, where memory is not the question."""


def engine(models: Models, *, slots: int, chunk: int | None = None, kv_bytes: int = PLENTY, stored: int = 0) -> Engine:
    """An engine; `stored` is what its prefix cache may take, in bytes. It has none by default."""
    settings: dict[str, Any] = {"max_slots": slots, "kv_bytes": kv_bytes, "max_queue": 1 << 16}
    if chunk is not None:
        settings["prefill_chunk"] = chunk
    cache = PrefixCacheConfig(memory_bytes=stored) if stored else PrefixCacheConfig(enabled=False)  # type: ignore[arg-type]
    return Engine(models.warm, EngineConfig(**settings), cache, clock=now)


class Warm:
    """A policy of warmkv. Every step is a step of the engine, with all that it does beside computing."""

    def __init__(self, models: Models, contexts: Contexts, setting: Setting, policy: str, name: str) -> None:
        self._models, self._contexts, self._new = models, contexts, setting.new_tokens
        self.policy, self.name = PolicySpec.model_validate(policy), name
        self._engine = engine(models, slots=setting.sequences)
        self.kv_bytes = 0  # of the slots of the last run

    def run(self, sequences: int, steps: int) -> Run:
        running, slots = self._engine, []
        synthetic.end_all(running)
        for number in range(sequences):
            prompt = synthetic.random_prompt(self._models.warm, self.policy, self._contexts.of(number))
            slots += synthetic.begin_decoding(running, self.policy, prompt, 1, self._new).slots
        self.kv_bytes = sum(slot.resident_bytes for slot in slots)
        decoding = [running.scheduler.decoding[slot] for slot in slots]
        drawn: list[list[int]] = [[] for _ in decoding]
        for sequence, tokens in zip(decoding, drawn, strict=True):
            sequence.last_token = FIRST
            sequence.emit = lambda event, tokens=tokens: tokens.append(event) if isinstance(event, int) else None
        Stopwatch(self._models.device)  # nothing of the hand-off runs on into the first step
        times = []
        for _ in range(steps):
            running.step()
            times.append(now())
        synthetic.end_all(running)
        if any(len(tokens) != steps for tokens in drawn):
            raise RuntimeError("a sequence ended early: its logits were not finite")
        return Run(step_seconds(times), drawn)
