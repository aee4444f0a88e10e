"""What `GET /v1/warmkv/live` tells: this gateway's latest requests, and what all replicas hold and do now."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warmkv.prefixes.usage import Usage

SECONDS = 300.0  # that requests count
REQUESTS = 20_000  # that are kept at most


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended, by the gateway's clock. Times are seconds, prices dollars."""

    at: float
    status: str  # ok, error, cancelled
    prompt: int = 0  # tokens
    cached: int = 0
    output: int = 0
    ttft: float | None = None
    tpot: float | None = None  # time per output token after the first
    billed: float = 0.0
    saved: float = 0.0  # what the same tokens cost without a cache, less what was billed


class RecentRequests:
    """The latest requests of a gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[Ended] = deque(maxlen=REQUESTS)

    def failed(self, status: str) -> None:
        """Count a request that got no token."""
        self._ended.append(Ended(self._clock(), status))

    def ended(
        self, status: str, usage: Usage, cached: int, ttft: float, e2e: float, price: Callable[[Usage], float]
    ) -> None:
        """Count an answer. `price` returns what tokens cost under the prices in force for it."""
        billed = price(usage)
        plain = price(Usage(input=usage.prompt, output=usage.output))
        tpot = (e2e - ttft) / (usage.output - 1) if usage.output > 1 and status == "ok" else None
        self._ended.append(
            Ended(self._clock(), status, usage.prompt, cached, usage.output, ttft, tpot, billed, plain - billed)
        )

    def figures(self) -> dict[str, Any]:
        """Return sums and percentiles over the last SECONDS."""
        since = self._clock() - SECONDS
        while self._ended and self._ended[0].at < since:
            self._ended.popleft()
        ended = self._ended
        prompt, cached = sum(one.prompt for one in ended), sum(one.cached for one in ended)
        statuses = Counter(one.status for one in ended)
        return {
            "seconds": SECONDS,
            "requests": {status: statuses[status] for status in ("ok", "error", "cancelled")},
            "tokens": {"prompt": prompt, "cached": cached, "output": sum(one.output for one in ended)},
            "hit_rate": cached / prompt if prompt else None,
            "ttft": _percentiles([one.ttft for one in ended if one.ttft is not None]),
            "tpot": _percentiles([one.tpot for one in ended if one.tpot is not None]),
            "dollars": {"billed": sum(one.billed for one in ended), "saved": sum(one.saved for one in ended)},
        }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def summed(replicas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over all replicas that serve, as they reported last."""
    serving = [status for status in replicas.values() if "phase" not in status]
    stored: Counter[str] = Counter()
    for status in serving:
        stored.update(status.get("store_tiers", {}))
    limits = [plan["limits"]["prefix_cache.memory_bytes"]["bytes"] for one in serving if (plan := one.get("memory"))]
    keys = ("waiting", "decoding", "weight_bytes", "slot_bytes")
    return {
        "serving": len(serving),
        **{key: sum(status.get(key, 0) for status in serving) for key in keys},
        "stored_bytes": dict(stored),
        "prefix_limit_bytes": sum(limits),
    }
