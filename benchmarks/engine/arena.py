"""Where the races are held: models, contexts and contestants that several of them need, and what they measure."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.engine.results import Results
from benchmarks.engine.setting import Models, Setting, build, fitted
from benchmarks.engine.synthetic import Contexts
from benchmarks.engine.warm import Warm
from benchmarks.engine.warm import engine as started
from warmkv.measuring.machine import identity
from warmkv.replicas.engine.engine import Engine

T = TypeVar("T")


class Arena:
    """One run. Says on the error stream what begins, and the seconds since the start."""

    def __init__(self, setting: Setting, vllm: Path | None = None) -> None:
        self.setting, self.results = setting, Results()
        self.vllm = vllm  # its command, if it is raced
        self.machine = identity(torch.device(setting.device))  # with the load before this run made its own
        self._start = time.perf_counter()
        self._end = float("inf")
        self.save: Callable[[], None] = lambda: None  # what is known so far
        self._warm: dict[str, Warm] = {}

    @cached_property
    def models(self) -> Models:
        self.say(f"building {self.setting.shape} in {self.setting.dtype} on {self.setting.device}")
        return build(self.setting)

    def fit(self) -> None:
        """Build the models, and let no more sequences decode than fit the memory that is left."""
        device = self.models.device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            setting = fitted(self.setting, self.models.warm.kv_shape.token_bytes, free)
            if setting != self.setting:
                told = f"{setting.sequences} of {self.setting.sequences} sequences"
                self.results.note(f"{told}: no more full caches fit {free:,} bytes")
                self.setting = setting

    @cached_property
    def contexts(self) -> Contexts:
        return Contexts(self.models, self.setting)

    def warm(self, policy: str, name: str) -> Warm:
        """Return warmkv under a policy, from the synthetic contexts on."""
        if name not in self._warm:
            self._warm[name] = Warm(self.models, self.contexts, self.setting, policy, name, self.engine)
        return self._warm[name]

    @cached_property
    def engine(self) -> Engine:
        """Start the engine without a prefix cache, which races of steps share: it compiles once."""
        self.say("starting the engine")
        return started(self.models, self.setting)

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {what}", file=sys.stderr, flush=True)

    def until(self, share: float) -> None:
        """From now on, repeats begin within this share of the minutes that there are, if they are limited."""
        if self.setting.minutes is not None:
            self._end = self._start + 60 * self.setting.minutes * share

    def repeats(self, what: str) -> Iterator[str]:
        """Yield names of the repeats. One more begins only if it would end in time, going by the one before."""
        for repeat in range(1, self.setting.repeats + 1):
            began = time.perf_counter()
            yield f"{what} {repeat}/{self.setting.repeats}"
            ended = time.perf_counter()
            if repeat < self.setting.repeats and 2 * ended - began > self._end:
                self.results.note(f"{what}: {repeat} of {self.setting.repeats} repeats, for want of time")
                return

    def attempt(self, name: str, action: Callable[..., T], *arguments: Any) -> T | None:
        """What somebody did; None, and a note, if that failed. Memory that it took is given back."""
        try:
            try:
                return action(*arguments)
            except torch.OutOfMemoryError:
                torch._dynamo.reset()  # recorded graphs may hold the cache of who ran before
                self.tidy()
                return action(*arguments)
        except Exception as error:  # whoever fails on this machine is reported, and the others race on
            self.results.note(f"{name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return None
        finally:
            self.tidy()
            self.save()

    def tidy(self) -> None:
        """Give back what the last contestant took."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
