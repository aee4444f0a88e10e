"""Where blocks live: what goes down, what comes up, and that every tier can be read on its own."""

from __future__ import annotations

import random

import pytest

from warmkv.config import PrefixCacheConfig
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import FILE_BYTES, Copied, Left, Stored, Tier, Tiers, tiers_of, weight


def chain(*path):
    return [bytes(path[: end + 1]) for end in range(len(path))]


def tiers(*capacities):
    return Tiers([Tier(name, size) for name, size in zip(("device", "host", "disk"), capacities, strict=False)])


def store(of, keys, now=0.0, ttl=100.0):
    return list(of.store(keys, [1] * len(keys), [1] * len(keys), ttl, now, ""))


def test_what_is_evicted_goes_down_with_the_chain_before_it():
    of = tiers(3, 10)
    store(of, chain(1, 1, 1))
    steps = store(of, chain(2), 1.0)
    a, ab, abc = chain(1, 1, 1)
    assert steps == [Copied(a, 0, 1), Copied(ab, 0, 1), Copied(abc, 0, 1), Left(abc, 0), Stored(bytes([2]), 0)]
    assert store(of, chain(3), 2.0) == [Left(ab, 0), Stored(bytes([3]), 0)]  # it is below already
    assert of.match([a, ab, abc], 3.0) == 3


def test_what_has_expired_goes_nowhere():
    of = tiers(3, 10)
    store(of, chain(1, 1, 1), ttl=5.0)
    steps = store(of, chain(2), 6.0)
    assert [step for step in steps if isinstance(step, Copied)] == []
    assert sum(isinstance(step, Left) and step.expired for step in steps) == 3


def test_what_is_found_below_comes_up_with_the_life_that_it_has():
    of = tiers(3, 10)
    store(of, chain(1, 1, 1), ttl=50.0)
    of.mark(bytes([1, 1, 1]), 50.0, 0.0)
    store(of, chain(2, 2, 2), 1.0)
    assert bytes([1]) not in of.indexes[0]
    of.touch(chain(1, 1, 1), 10.0)
    steps = list(of.promote(chain(1, 1, 1), 10.0))
    assert [step for step in steps if isinstance(step, Stored)] == [Stored(key, 0) for key in chain(1, 1, 1)]
    assert of.indexes[0].has_mark(bytes([1, 1, 1]), 59.0)
    assert of.indexes[0].entry(bytes([1])).expires_at == 60.0
    assert list(of.promote(chain(1, 1, 1), 11.0)) == []


def test_a_chain_too_long_for_the_device_is_kept_whole_below():
    of = tiers(2, 10)
    store(of, chain(1, 1, 1, 1, 1))
    assert (len(of.indexes[0]), len(of.indexes[1]), of.match(chain(1, 1, 1, 1, 1), 1.0)) == (2, 5, 5)


def test_a_chain_of_another_replica_comes_where_a_computed_one_would():
    donor, of = tiers(10), tiers(2, 10)
    store(donor, chain(1, 1, 1, 1), ttl=50.0)
    donor.mark(bytes([1, 1]), 20.0, 5.0)
    steps = list(of.adopt(donor.indexes[0].entry(bytes([1, 1, 1, 1])).path(), 10.0))
    kept = [(step.key, step.tier) for step in steps if isinstance(step, Stored)]
    assert kept == [(key, 0) for key in chain(1, 1)] + [(key, 1) for key in chain(1, 1, 1, 1)]
    for index in of.indexes:
        assert (index.entry(bytes([1])).expires_at, index.entry(bytes([1])).ttl) == (50.0, 50.0)
        assert index.has_mark(bytes([1, 1]), 24.0)
        assert not index.has_mark(bytes([1, 1]), 25.0)
    assert list(of.adopt(donor.indexes[0].entry(bytes([1, 1])).path(), 11.0)) == []


def test_what_is_there_lives_as_long_as_what_comes_behind_it():
    donor, of = tiers(10), tiers(10)
    store(donor, chain(1, 1, 1), ttl=50.0)
    store(of, chain(1, 1), ttl=5.0)
    list(of.adopt(donor.indexes[0].entry(bytes([1, 1, 1])).path(), 1.0))
    assert of.match(chain(1, 1, 1), 49.0) == 3
    list(of.expire(49.0))
    assert len(of.indexes[0]) == 3


def test_both_copies_live_equally_long():
    of = tiers(2, 10)
    store(of, chain(1, 1), ttl=10.0)
    store(of, chain(2), 1.0)
    store(of, chain(1, 1), 2.0, ttl=40.0)
    of.touch(chain(1, 1), 30.0)
    ends = {index.entry(key).expires_at for index in of.indexes for key in chain(1, 1) if key in index}
    assert ends == {70.0}


@pytest.mark.parametrize("capacities", [(5,), (5, 9), (5, 9, 20), (0, 9), (9, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_steps_are_what_the_indexes_say_and_every_tier_is_closed(capacities, seed):
    """Carrying out the steps gives what the indexes hold; a copy is only made of what is there."""
    chance, of, now = random.Random(seed), tiers(*capacities), 0.0
    held = [set() for _ in capacities]
    for _ in range(400):
        now += chance.choice([0.0, 1.0, 5.0])
        path = chain(*(chance.randint(0, 1) for _ in range(chance.randint(1, 6))))
        match chance.randrange(4):
            case 0 | 1:
                steps = of.store(path, [1] * len(path), [1] * len(path), chance.choice([3.0, 20.0]), now, "")
            case 2:
                found = path[: of.match(path, now)]
                of.touch(found, now)
                steps = of.promote(found, now)
            case _:
                steps = of.expire(now) if chance.random() < 0.9 else of.drop(path[-1:])
        for step in steps:
            match step:
                case Stored(key, tier):
                    assert key not in held[tier]
                    held[tier].add(key)
                case Copied(key, source, tier):
                    assert key in held[source]
                    assert key not in held[tier]
                    held[tier].add(key)
                case Left(key, tier):
                    held[tier].remove(key)
        for index, keys in zip(of.indexes, held, strict=True):
            assert set(index) == keys
            assert len(keys) <= index.capacity


def test_the_weight_of_a_block_in_each_format():
    shape = KVShape(layers=2, kv_heads=2, head_dim=32, dtype_bytes=2)
    plain = 70 * shape.token_bytes
    assert weight("model", shape)(plain, 70) == plain
    assert weight("fp8", shape)(plain, 70) == plain // 2
    packed = 2 * 2 * 64 * (32 + 4 + 4)  # codes of keys and values; zero points and steps of each
    assert weight("kivi4", shape)(plain, 70) == packed + 6 * shape.token_bytes
    assert weight("fp8", shape, FILE_BYTES)(1000, 0) == 1000 + FILE_BYTES  # column sums stay as they are


def test_tiers_follow_the_settings(tmp_path):
    shape = KVShape(1, 1, 8, 4)
    settings = {"memory_bytes": 100, "eviction": "lfu", "host": {"memory_bytes": 200}}
    config = PrefixCacheConfig.model_validate(settings | {"disk": {"memory_bytes": 300, "path": tmp_path}})
    names = [(tier.name, tier.capacity) for tier in tiers_of(config, shape)]
    assert names == [("device", 100), ("host", 200), ("disk", 300)]
    assert [tier.name for tier in tiers_of(PrefixCacheConfig(memory_bytes=1), shape)] == ["device"]
