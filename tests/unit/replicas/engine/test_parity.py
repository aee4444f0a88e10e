"""What the engine reuses and keeps is what the simulator's cache says of the same requests."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.unit.replicas.conftest import BLOCK, Driver, make_request, random_model
from warmkv.config import PrefixCacheConfig
from warmkv.policies import budgets, slot_sizes
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import tiers_of
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.loading.load import prepare
from warmkv.simulator.cache.layout import layout
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache

MODEL = prepare(random_model("llama"))
SHAPE = MODEL.kv_shape
TTLS = {"5m": 300.0, "1h": 3600.0}


@st.composite
def requests(draw):
    """Prompts of two families of prefixes, with breakpoints, policies and pauses between them."""
    family, length = draw(st.sampled_from([1, 2])), draw(st.integers(2, 60))
    marks = {at: draw(st.sampled_from(list(TTLS))) for at in draw(st.sets(st.integers(1, length), max_size=2))}
    reads = sorted({*marks, *draw(st.sets(st.integers(1, length), max_size=2))})
    policy = draw(st.sampled_from(["full", "h2o@10", "h2o@0.5+append", "snapkv@10:window=4", "fastgen"]))
    return [(family * at) % 50 for at in range(length)], marks, reads, policy, draw(st.sampled_from([0.0, 10.0, 400.0]))


@hypothesis_settings(max_examples=60)
@given(
    sequence=st.lists(requests(), min_size=1, max_size=12),
    blocks=st.sampled_from([0, 6, 1000]),
    below=st.sampled_from([0, 8, 1000]),
    order=st.sampled_from(["lru", "lfu", "length", "cost"]),
    share=st.sampled_from([0.0, 0.3]),
)
def test_reuse_and_resident_bytes_are_equal(sequence, blocks, below, order, share):
    now, number, block = [0.0], itertools.count(), BLOCK * SHAPE.token_bytes
    host = {"memory_bytes": below * block}
    settings = {"memory_bytes": blocks * block, "host": host, "eviction": order, "tenant_share": share}
    live = Driver(MODEL, clock=lambda: now[0], prefix_cache=settings)
    config = PrefixCacheConfig.model_validate(settings)
    records, steps = [], []
    for tokens, marks, reads, policy, pause in sequence:
        now[0] += pause
        request = make_request(tokens, new=1, policy=policy, marks=marks, reads=reads, name=str(next(number)))
        request = dataclasses.replace(request, tenant="even" if tokens[-1] % 2 == 0 else "odd")
        steps.append((now[0], request))
        records.append(RequestRecord(
            id=request.id, arrival=now[0], api="messages", model="m", policy=policy, tenant=request.tenant, replica="a",
            block_size=BLOCK, input_tokens=len(tokens), output_tokens=1, max_tokens=1,
            hashes=request.hashes, marks=request.marks, reads=request.reads,
        ))  # fmt: skip
    laid_out, stored = layout(records), TimeWeightedGauge()
    cache = ReplicaCache(
        "a",
        laid_out,
        tiers_of(config, SHAPE),
        SHAPE.token_bytes,
        Lifetimes.of(config),
        stored,
        Removals(),
        share,
    )
    for (now[0], request), record, prompt in zip(steps, records, laid_out.prompts, strict=True):
        live.run(request)
        length = record.input_tokens
        spec = budgets.in_force(request.policy, length, 1)
        token_bytes = slot_sizes.column_sum_bytes(spec, SHAPE, length)
        cache.expire(now[0])
        found = cache.match(prompt, now[0])
        reused = min(found.tokens, length - min(length, budgets.recomputed_tokens(spec, length)))
        if token_bytes:
            reused = cache.sums(found, prompt, reused, now[0])
        cache.store(prompt, record.marks, now[0], found, now[0])
        if token_bytes:
            cache.store_sums(prompt, record.marks, reused, token_bytes, now[0])
        cache.release(found)
        assert live.started(request.id).cached_tokens == reused
        assert sum(live.engine.store.tier_bytes.values()) == stored.value
