"""The figures of a replay as one flat mapping of names to numbers, and which way each of them is better."""

from __future__ import annotations

from dataclasses import asdict

from warmkv.simulator.replay import Result

Figures = dict[str, float]

_MORE_IS_BETTER = ("hit_rate", "saving", "goodput", "in_slo", "quality", "reused")
_NEITHER = (
    "requests",
    "seconds",
    "prompt_tokens",
    "output_tokens",
    "dollars_uncached",
    "read_tokens",
    "written_tokens",
)


def figures(result: Result) -> Figures:
    """Rates are shares, times seconds, sizes bytes over all replicas, `dollars` what the tenants are billed."""
    tokens = result.usage.prompt + result.usage.output
    flat: Figures = {
        "requests": result.requests,
        "refused": result.refused,
        "seconds": result.seconds,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.usage.output,
        "reused_tokens": result.reused_tokens,
        "read_tokens": result.usage.read,
        "written_tokens": result.usage.total_written,
        "hit_rate_tokens": result.token_hit_rate,
        "hit_rate_blocks": result.block_hit_rate,
        "dollars": result.dollars,
        "dollars_uncached": result.dollars_uncached,
        "dollars_per_million_tokens": result.dollars / tokens * 1e6 if tokens else 0.0,
        "saving": 1 - result.dollars / result.dollars_uncached if result.dollars_uncached else 0.0,
        "slot_bytes_mean": result.slots.mean,
        "slot_bytes_max": result.slots.peak,
        "resident_bytes_mean": result.stored.mean,
        "resident_bytes_max": result.stored.peak,
        "evictions": result.evictions,
        "expirations": result.expirations,
    }
    for name, values in (("ttft", result.ttft), ("tpot", result.tpot), ("e2e", result.e2e)):
        flat |= {f"{name}_{percentile}": seconds for percentile, seconds in asdict(values).items()}
    return flat


def sense(name: str) -> int:
    """1 where more of a figure is better, -1 where less is, 0 where neither."""
    if name in _NEITHER:
        return 0
    return 1 if name.startswith(_MORE_IS_BETTER) else -1
