"""Limits of replicas that batch as vLLM does."""

from __future__ import annotations

from warmkv.config import Config
from warmkv.policies.tiers import weight
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.jobs import Jobs
from warmkv.simulator.cluster.memory import pool_bytes
from warmkv.simulator.cluster.replica import ONE_GROUP, WHOLE_CACHE
from warmkv.simulator.engine.kv_blocks import BLOCK
from warmkv.simulator.engine.limits import BatchingError, Limits
from warmkv.simulator.steps.costs import StepKind


def mixed_limits(jobs: Jobs, config: Config, token_bytes: int, group: str = "") -> Limits:
    """Return the limits of replicas of a group that batch as vLLM does.

    Raises BatchingError for what vLLM does not do of what the group is to serve.
    """
    engine, kind = config.engine, StepKind.of(config.whole_cache)
    for number, sizes in enumerate(jobs.sizes):
        asked = sizes.kind
        if asked not in (kind, WHOLE_CACHE) and group in (jobs.groups[number] if jobs.groups else ONE_GROUP):
            raise BatchingError(
                f"simulator.batching=mixed keeps the whole cache, as vLLM does, but request {jobs.records.id[number]} "
                f"has {asked.label}; choose the policy {kind.label}"
            )
    block = config.kv_block or BLOCK
    if config.has_one_pool and config.prefix_cache.enabled and len(jobs):
        block = jobs.block_size  # by which prefixes are found
    room = pool_bytes(config) if config.has_one_pool else engine.kv_limit
    tokens = room // entry_bytes(config, token_bytes)
    if config.prefix_cache.keep_warm > room // 2:
        raise BatchingError(f"prefix_cache.keep_warm must not exceed half of vLLM's cache, which has {room} bytes")
    if config.has_one_pool:
        tokens -= block  # which vLLM sets aside
    return Limits(engine.max_slots, engine.tokens_per_step(on_gpu=False), tokens, block)


def entry_bytes(config: Config, token_bytes: int) -> int:
    """Return the bytes of a token in the format of vLLM's cache."""
    return weight(config.whole_cache.storage, kv_shape(config))(token_bytes, 1)
