"""The engines that a replica may run, behind one interface: a module for each kind, chosen by `engine.kind`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warmkv.config import Config

if TYPE_CHECKING:
    from warmkv.replicas.block_store.presence import Publish
    from warmkv.replicas.engines.interface import Parts, Place

MODULES = {"warmkv": "own", "vllm": "vllm_engine"}
"""Kinds of engines by where `build` makes them: what one needs is not loaded for another."""


def build_engine(config: Config, tokenizer: Any, place: Place, publish: Publish, say: Callable[[str], None]) -> Parts:
    """Build the engine of `engine.kind`, ready to start. Raises what goes wrong; `say` is told what is next."""
    module = import_module(f"{__name__}.{MODULES[config.engine.kind]}")
    parts: Parts = module.build(config, tokenizer, place, publish, say)
    return parts
