"""The first tokens and the last."""

from __future__ import annotations

from typing import Any

KEPT = ["streaming_llm@9", "streaming_llm@0.3:sinks=2"]
SERVED = ["streaming_llm@20", "streaming_llm@0.3:sinks=2"]


def ends(spec: Any, budget: int) -> tuple[int, int]:
    return spec.sinks, budget - spec.sinks
