"""Load a model's tokenizer and its maximum context, without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from warmkv.config import Config, ModelConfig
from warmkv.config.engine import EngineKind
from warmkv.models import tiny
from warmkv.replicas.loading.context import computed_context


@contextmanager
def without_torch() -> Iterator[None]:
    """Have transformers load without torch, unless that is there already: for processes that compute nothing.

    A gateway starts in 3.6 CPU seconds less and takes 390 MB less. From then on transformers takes torch for missing.
    """
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch be installed
    sys.modules["torch"] = None  # type: ignore[assignment]  # as Python marks what is not to be found
    try:
        yield
    finally:
        del sys.modules["torch"]


def model_path(config: ModelConfig) -> str:
    """Return folder or hub name to load; `tiny` is the model in the package."""
    return str(tiny.PATH) if config.path == "tiny" else config.path


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the model's tokenizer. Imports transformers, but runs nothing on a device."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(config), revision=config.revision)


def decoder(tokenizer: Any) -> Any:
    """Return what makes text of tokens as they come: the tokenizers library's own object where there is one."""
    return getattr(tokenizer, "backend_tokenizer", None) or tokenizer


def load_max_context(config: ModelConfig, kind: EngineKind) -> int:
    """Read the model's maximum context, as an engine of a kind serves it, from its configuration alone."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model_path(config), revision=config.revision).get_text_config()
    limit: int = computed_context(text) if kind == "warmkv" else text.max_position_embeddings
    return limit


def served_context(config: Config) -> int:
    """Return tokens that replicas of every group take: a request may get to any of them."""
    engines = [group.engine for group in config.groups().values()]
    limits = {engine.max_context for engine in engines if engine.max_context}
    kinds = {engine.kind for engine in engines if not engine.max_context}
    return min(limits | {load_max_context(config.model, kind) for kind in kinds})
