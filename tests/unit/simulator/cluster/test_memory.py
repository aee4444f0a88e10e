"""What `auto` sizes stand for in a simulation."""

import json

import pytest

from tests.unit.simulator.conversations import record, run
from warmkv.config import load
from warmkv.policies.memory_plan import MemoryPlanError
from warmkv.simulator.cluster.memory import resolved

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


def sizes(*flags):
    found = resolved(load(flags=flags, environ={}))
    return found.engine.kv_bytes, found.prefix_cache.memory_bytes


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return f"simulator.model={tmp_path}"


def test_without_a_model_a_replica_has_what_it_always_had():
    assert sizes() == (1 << 30, 512 << 20)


def test_explicit_sizes_stay(model):
    flags = ("engine.kv_bytes=3GiB", "prefix_cache.memory_bytes=2GiB", "engine.step_tokens=512")
    assert sizes(*flags) == sizes(*flags, model) == (3 << 30, 2 << 30)
    assert sizes(flags[0]) == (3 << 30, 512 << 20)
    settings = load(flags=flags, environ={})
    assert resolved(settings) is settings


def test_a_model_has_what_its_gpu_has_room_for(model):
    kv, stored = sizes(model, "simulator.gpu=H100-SXM")
    assert 32e9 < kv < 36e9
    assert stored == pytest.approx(kv / 2, abs=1)
    assert sizes(model, "simulator.gpu=H200-SXM")[0] > kv + 30e9
    assert sizes(model, "simulator.gpu=H100-SXM", "cluster.gpus_per_replica=0.5")[0] < kv / 2


def test_a_model_that_does_not_fit_its_gpu_is_refused_but_with_explicit_sizes(model):
    half = (model, "simulator.gpu=L4", "cluster.gpus_per_replica=0.5")
    with pytest.raises(MemoryPlanError, match="does not fit"):
        sizes(*half)
    given = ("engine.kv_bytes=1GiB", "prefix_cache.memory_bytes=1GiB", "engine.step_tokens=512")
    assert sizes(*half, *given) == (1 << 30, 1 << 30)


def test_a_simulation_resolves_its_settings_itself():
    records = [record(at, [at % 3] * 16 + [10 + at], output=5) for at in range(12)]
    explicit = ["engine.kv_bytes=1GiB", "prefix_cache.memory_bytes=512MiB"]
    (jobs, outcome), (same, other) = (run(records, load(flags=flags, environ={})) for flags in ([], explicit))
    assert [job.finished for job in jobs] == [job.finished for job in same]
    assert outcome.stored.peak == other.stored.peak > 0
