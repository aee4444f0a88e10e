"""Time to the first token of a prompt whose first 90% lie in one tier, against computing all of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.results import Results
from benchmarks.engine.setting import Models
from benchmarks.engine.warm import PLENTY
from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import ttft
from warmkv.measuring.clock import now
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine

TIERS = ("device", "host", "disk")
TTL = "1h"


def race(
    models: Models, lengths: tuple[int, ...], repeats: int, seed: int, results: Results, say: Callable[[str], None]
) -> None:
    """A prompt that nobody has seen in a cache without room, then its tiers in turn, in every repeat."""
    random = np.random.default_rng(seed)
    with engines(models) as running:
        for engine in running.values():
            ttft.warm_up(engine, PolicySpec())
        for length in lengths:
            for repeat in range(1, repeats + 1):
                say(f"{length} tokens {repeat}/{repeats}")
                for name, engine in running.items():
                    reused = _measure(engine, name, length, random, results)
                    results.add(f"share_reused_{name}_{length}", reused / length)


@contextmanager
def engines(models: Models) -> Iterator[dict[str, Engine]]:
    """Yield an engine without a cache, and one for each tier whose blocks can lie nowhere else."""
    folder = Path(tempfile.mkdtemp(prefix="warmkv-race-"))
    plenty = {"memory_bytes": PLENTY}
    caches: dict[str, dict[str, Any]] = {
        "cold": {"enabled": False},
        "device": plenty,
        "host": {"memory_bytes": 0, "host": plenty, "moving_bytes": PLENTY},
        "disk": {"memory_bytes": 0, "disk": plenty | {"path": folder}, "moving_bytes": PLENTY},
    }
    limits = EngineConfig.model_validate({"kv_bytes": PLENTY})
    try:
        yield {
            name: Engine(models.warm, limits, PrefixCacheConfig.model_validate(cache), clock=now)
            for name, cache in caches.items()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(engine: Engine, name: str, length: int, random: np.random.Generator, results: Results) -> int:
    """Return seconds to the first token; before, the tier is given the first 90% of the prompt. The tokens reused."""
    tokens = random.integers(0, engine.model.vocabulary, length)
    shared = round(ttft.WARM_SHARE * length)
    if name != "cold":
        ttft.first_token(engine, ttft.request(engine, tokens[:shared].tolist(), PolicySpec(), 1, (shared, TTL)))
        settle(engine)
    mark = (shared, TTL) if name != "cold" else None
    asked = ttft.first_token(engine, ttft.request(engine, tokens.tolist(), PolicySpec(), 1, mark))
    results.add(f"ttft_seconds_{name}_{length}", asked.seconds)
    settle(engine)
    engine.store.drop("")
    return asked.reused


def settle(engine: Engine) -> None:
    """Wait until all blocks are where they belong; files leave the system's cache, so that they are read from disk."""
    while engine.store.moving:
        engine.store.settle()
    for place in engine.store.places:
        if place.folder is not None:
            for path in place.folder.path.rglob("*.safetensors"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
