"""The figures of a replay as one flat mapping, which programs compare, plot and search by."""

from __future__ import annotations

from dataclasses import asdict

from warmkv.simulator.studies.replays.replay import Result


def figures(result: Result) -> dict[str, float]:
    """Return names to numbers. Times are seconds, rates shares, sizes bytes over all replicas.

    `dollars` is what the tenants are billed, `gpu_dollars` what the replicas cost. `resident_bytes` are those of stored
    prefixes, in all tiers and by tier; `slot_bytes` those of decode slots. `retries` and `resumptions` count how often
    requests were sent again because a replica failed, before and after the first token; `replicas` are those that are
    alive. `fetches` get blocks from other replicas, `handed_bytes` are what stopped replicas left to others.
    """
    tokens = result.prompt_tokens + result.usage.output
    places = {"slot_bytes": result.slots, "resident_bytes": result.stored}
    places |= {f"resident_bytes_{tier}": level for tier, level in result.tiers.items()}
    times = {"ttft": result.ttft, "tpot": result.tpot, "e2e": result.e2e}
    return {
        "requests": result.requests,
        "refused": result.refused,
        "refused_too_large": result.too_large,
        "failed": result.failed,
        "retries": result.retries,
        "resumptions": result.resumptions,
        "fetches": result.fetches,
        "fetches_declined": result.fetches_declined,
        "fetched_bytes": result.fetched_bytes,
        "handed_bytes": result.handed_bytes,
        "seconds": result.seconds,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.usage.output,
        "reused_tokens": result.reused_tokens,
        "read_tokens": result.usage.read,
        "written_tokens": result.usage.total_written,
        "hit_rate_tokens": result.token_hit_rate,
        "hit_rate_blocks": result.block_hit_rate,
        **{f"{place}_max": level.peak for place, level in places.items()},
        **{f"{place}_mean": level.mean for place, level in places.items()},
        "evictions": result.evictions,
        "expirations": result.expirations,
        **{f"{name}_{share}": seconds for name, values in times.items() for share, seconds in asdict(values).items()},
        "in_slo": result.in_slo / result.requests if result.requests else 0.0,
        "goodput": result.goodput,
        "dollars": result.dollars,
        "dollars_uncached": result.dollars_uncached,
        "dollars_per_million_tokens": result.dollars / tokens * 1e6 if tokens else 0.0,
        "saving": result.saving,
        "replicas_max": result.replicas.peak,
        "replicas_mean": result.replicas.mean,
        "gpu_hours": result.gpu_hours,
        "gpu_dollars": result.gpu_dollars,
        "gpu_dollars_per_million_tokens": result.gpu_dollars_per_million_tokens,
    }
