"""What a model's configuration alone tells of its context, without torch: gateways and replicas go by the same."""

from __future__ import annotations

from typing import Any

from warmkv.policies.sliding import configured_windows
from warmkv.replicas.loading import supported


def computed_context(text: Any) -> int:
    """Return tokens up to which warmkv's engine computes a model as transformers does."""
    limits: list[int] = [text.max_position_embeddings]
    for parameters in _rope_parameters(text):
        if parameters.get("rope_type") == "longrope":  # beyond this length the rotation of all keys changes
            limits.append(parameters["original_max_position_embeddings"])
    if text.model_type not in supported.SERVED:  # within a window a layer attends to everything
        limits += [window for window in configured_windows(text) if window]
    return min(limits)


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """Return the parameters of each rotation: layer types may have some of their own."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
