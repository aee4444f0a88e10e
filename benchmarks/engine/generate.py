"""The peers `model.generate` with a dynamic cache, and with a static one and compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache, StoppingCriteria

from benchmarks.engine.setting import Models
from benchmarks.engine.synthetic import Contexts
from warmkv.measuring.clock import now

WARM_UP = 3
"""Steps at the beginning of every run that are not timed: the first is never compiled, others may be recorded."""


@dataclass(frozen=True, slots=True)
class Run:
    """What decoding from the synthetic contexts gave."""

    seconds: float  # for one token of every sequence
    tokens: list[list[int]]  # that each sequence drew


class Contestant(Protocol):
    """Somebody who decodes from the synthetic contexts."""

    name: str

    def run(self, sequences: int, steps: int) -> Run:
        """Fill a cache, then draw `steps` tokens of each of the first sequences. Only steps are timed."""
        ...


def step_seconds(times: list[float]) -> float:
    """Return seconds of a step, from the moments in which steps ended."""
    first = min(WARM_UP, len(times) - 1) - 1
    return (times[-1] - times[first]) / (len(times) - 1 - first)


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each step ended; never stops anything. `generate` itself waits for the device after every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Generate:
    """`generate` with sdpa. Nothing is padded, so that no mask is built for the dynamic cache."""

    name = "generate_dynamic"

    def __init__(self, models: Models, contexts: Contexts, new_tokens: int) -> None:
        self._model, self._contexts, self._new = models.peer, contexts, new_tokens

    def run(self, sequences: int, steps: int) -> Run:
        ids = self._contexts.ids[:sequences].to(self._model.device)
        cache, clock = self._cache(), _Clock()
        with torch.no_grad():
            for layer in range(self._model.config.num_hidden_layers):
                cache.update(*self._contexts.layer(layer, sequences), layer)
        out = self._model.generate(
            ids, past_key_values=cache, generation_config=self._config(steps), stopping_criteria=[clock]
        )
        return Run(step_seconds(clock.times), out[:, ids.shape[1] :].tolist())

    def _cache(self) -> Any:
        return DynamicCache(config=self._model.config)

    def _config(self, steps: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=steps, do_sample=False)


class GenerateStatic(Generate):
    """`generate` with a static cache, its step compiled: reduce-overhead (CUDA graphs) on a GPU."""

    name = "generate_static"

    def __init__(self, models: Models, contexts: Contexts, new_tokens: int, *, compiled: bool) -> None:
        super().__init__(models, contexts, new_tokens)
        self._compiled = compiled

    def _cache(self) -> Any:
        return StaticCache(config=self._model.config, max_cache_len=self._contexts.tokens + self._new)

    def _config(self, steps: int) -> GenerationConfig:
        config = super()._config(steps)
        if not self._compiled:
            config.disable_compile = True
            return config
        on_cuda = self._model.device.type == "cuda"
        config.compile_config = CompileConfig(mode="reduce-overhead" if on_cuda else "default", dynamic=False)
        config.compile_config._compile_all_devices = True  # transformers compiles on a CPU only if told so
        return config
