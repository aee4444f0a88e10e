from warmkv.config import PrefixCacheConfig
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import FILE_BYTES, tiers_of, weight


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
