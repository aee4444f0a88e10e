"""Sizes that a configuration leaves open, as the running replicas have them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from warmkv.config import Config, ModelConfig
from warmkv.model_shape import ModelShape, ModelShapeError, kv_figures
from warmkv.models import tiny
from warmkv.simulator.cluster.memory import resolved

log = logging.getLogger(__name__)

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Held:
    """Hold what replicas report of themselves.

    `limits` are those of the one with the least memory, by group and setting.
    """

    replicas: int = 0
    stored_bytes: int | None = None  # of prefixes, all tiers and replicas
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    on_gpu: bool = False
    slot_bytes: int = 0  # of decode slots, all replicas

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Held:
        """Read what the prefix directory knows of the replicas."""
        replicas = [replica for replica in status["replicas"].values() if "phase" not in replica]  # that serve
        limits: dict[str, dict[str, int]] = {}
        for replica in replicas:
            least = limits.setdefault(replica.get("group", ""), {})
            for name, limit in (replica.get("memory") or {"limits": {}})["limits"].items():
                least[name] = min(limit["bytes"], least.get(name, limit["bytes"]))
        stored = sum(sum(replica.get("store_tiers", {}).values()) for replica in replicas)
        on_gpu = any(replica.get("allocator_bytes") is not None for replica in replicas)  # none is counted on a CPU
        slots = sum(replica.get("slot_bytes", 0) for replica in replicas)
        return cls(len(replicas), stored if replicas else None, limits, on_gpu, slots)


def with_sizes(config: Config, held: Held) -> Config:
    """Return a configuration with every `auto` size in bytes and the KV shape of the model that is served.

    Where a size is not known it is the simulator's; where the model's configuration is not on this node, the shape is
    that of `simulator.model`.
    """
    simulator = config.simulator
    if simulator.model == ModelShape.model_validate({}) and (folder := _folder(config.model)) is not None:
        simulator = simulator.model_copy(update={"model": _shape(folder, config.model, held.on_gpu)})
    config = config.model_copy(update={"simulator": simulator})
    sized = {name: _sized(group, held.limits.get(name, {})) for name, group in config.groups().items()}
    trees = {name: _with_sizes(tree, sized[name]) for name, tree in config.cluster.groups.items()}
    return sized[""].model_copy(update={"cluster": config.cluster.model_copy(update={"groups": trees})})


def _sized(config: Config, limits: Mapping[str, int]) -> Config:
    """Return the settings of a group with its sizes."""
    engine, cache = config.engine, config.prefix_cache
    if engine.kv_bytes == "auto" and (limit := limits.get("engine.kv_bytes")):
        engine = engine.model_copy(update={"kv_bytes": ByteSize(limit)})
    if cache.memory_bytes == "auto" and (limit := limits.get("prefix_cache.memory_bytes")):
        cache = cache.model_copy(update={"memory_bytes": ByteSize(limit)})
    return resolved(config.model_copy(update={"engine": engine, "prefix_cache": cache}))


def _with_sizes(tree: Mapping[str, Any], sized: Config) -> dict[str, Any]:
    """Return the settings in which a group differs, sizes included, else it would have those of the others."""
    engine, cache = sized.engine, sized.prefix_cache
    sizes = {"kv_bytes": int(engine.kv_limit), "step_tokens": engine.step_tokens}
    stored = {"memory_bytes": int(cache.memory_limit)}
    return {
        **tree,
        "engine": {**tree.get("engine", {}), **sizes},
        "prefix_cache": {**tree.get("prefix_cache", {}), **stored},
    }


def _shape(folder: Path, model: ModelConfig, on_gpu: bool) -> ModelShape:
    try:
        figures = kv_figures(folder)
    except ModelShapeError as error:
        log.warning("replays take the KV cache of the model in the package, set simulator.model: %s", error)
        figures = {}
    dtype = ("bfloat16" if on_gpu else "float32") if model.dtype == "auto" else model.dtype
    return ModelShape.model_validate({**figures, "dtype_bytes": _BYTES[dtype]})


def _folder(model: ModelConfig) -> Path | None:
    """Return the folder, or the config.json in the hub's cache, of a model; None if it is not on this node."""
    path = tiny.PATH if model.path == "tiny" else Path(model.path)
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except ValueError:  # no name of a model of the hub
        return None
    return Path(found) if isinstance(found, str) else None
