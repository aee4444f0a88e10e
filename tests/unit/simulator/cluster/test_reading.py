"""What is warm in a slower tier takes time to read; results are the same by runs, by blocks and by steps."""

import pytest
from hypothesis import given

from tests.unit.simulator.conversations import EXACT, config, logs, record
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

TIERS = ("prefix_cache.memory_bytes=16", "prefix_cache.host={memory_bytes: 64}", "prefix_cache.block_size=4")
# A block of 4 tokens takes 8 bytes: two of them fit on the device.


def waits(records, *flags, **options):
    """Seconds to the first token of every request, and what it reused."""
    settings = config(*TIERS, *flags)
    jobs, lifetimes = prepare(records, settings, Variant())
    simulate(jobs, settings, lifetimes, kv_shape(settings).token_bytes, EXACT, **options)
    return [(job.first - job.started, job.reused) for job in jobs]


def test_reading_from_host_memory_takes_its_bytes_at_the_bandwidth():
    prompts = [record(0.0, [1] * 20), record(100.0, [2] * 20), record(200.0, [1] * 20)]
    (_, _), (_, _), (at_once, reused) = waits(prompts)
    (_, _), (_, _), (slow, again) = waits(prompts, "simulator.host_bandwidth=16")
    assert reused == again > 8
    in_host = reused * 2  # bytes; the device has what came last, which is another prompt
    assert slow - at_once == pytest.approx(in_host / 16)


def test_what_is_on_the_device_is_not_read():
    prompts = [record(0.0, [1] * 8), record(100.0, [1] * 8 + [3])]
    assert waits(prompts) == waits(prompts, "simulator.host_bandwidth=1")


def test_a_gpu_reads_over_its_pcie(tmp_path):
    shape = '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, '
    (tmp_path / "config.json").write_text(shape + '"vocab_size": 8, "dtype": "bfloat16"}')
    from warmkv.config import load
    from warmkv.policies.prefix_cache import Lifetimes
    from warmkv.simulator.cache.layout import layout
    from warmkv.simulator.cluster.stores import Levels, Stores

    flags = [f"simulator.model={tmp_path}", "simulator.gpu=L4", "prefix_cache.host={memory_bytes: 1MiB}"]
    for more, rate in (([], 32e9), (["simulator.host_bandwidth=1e9"], 1e9)):
        settings = load(flags=[*flags, *more], environ={})
        lifetimes = Lifetimes.of(settings.prefix_cache)
        stores = Stores(settings, lifetimes, kv_shape(settings).token_bytes, 1, layout([]), Levels())
        assert stores.tier_seconds == (pytest.approx(kv_shape(settings).token_bytes / rate), 0.0)


@given(logs(policies=["full"]))
def test_stepping_and_jumping_agree(records):
    plain = [record(r.arrival, [int(r.id[1:]) % 2] * r.input_tokens, r.output_tokens, name=r.id) for r in records]
    slow = ("simulator.host_bandwidth=16",)
    expected = waits(plain, *slow)
    assert waits(plain, *slow, fast_forward=False) == expected
