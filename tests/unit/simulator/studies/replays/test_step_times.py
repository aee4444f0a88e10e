import json
from dataclasses import replace

import pytest

from tests.unit.simulator.conversations import config, record, run, uniform, with_timings
from warmkv.config import load
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.steps.costs import StepCost, StepKind, times_of
from warmkv.simulator.steps.roofline import OVERHEAD_SECONDS, roofline
from warmkv.simulator.studies.replays import step_times
from warmkv.simulator.studies.replays.replay import recorded_policy, replay
from warmkv.simulator.studies.replays.variants import Variant

TRUE = StepCost(0.005, 1e-4, 5e-7)
FULL = StepKind("full", "append", "model")


def test_where_step_times_come_from():
    settings = config()
    bare = [record(float(n), [n] * 9, output=5) for n in range(30)]
    measured = with_timings(run(bare, settings, cost=TRUE)[0])
    spec_of = recorded_policy()
    configured = uniform(StepCost(settings.simulator.step_a, settings.simulator.step_b, settings.simulator.step_c))

    assert step_times.choose_cost(bare, settings, spec_of) == (configured, "configuration (simulator.step_*)")
    assert step_times.choose_cost(measured[:5], settings, spec_of)[0] == configured
    assert step_times.choose_cost(measured, settings, spec_of, "config")[0] == configured
    cost, source = step_times.choose_cost(measured, settings, spec_of)
    assert cost != configured
    assert source == "fitted to 30 measured requests of the log"
    with pytest.raises(ValueError, match="no record of the log carries timings"):
        step_times.choose_cost(bare, settings, spec_of, "log")


def test_each_group_of_replicas_has_step_times_of_its_own():
    slow = StepCost(0.05, 1e-3, 5e-6)
    bare = [record(float(n), [n] * 9, output=5) for n in range(44)]
    fast_ones, slow_ones = bare[::2], bare[1::2]
    log = [
        *with_timings(run(fast_ones, config(), cost=TRUE)[0]),
        *(replace(one, group="vllm") for one in with_timings(run(slow_ones, config(), cost=slow)[0])),
    ]
    settings = config("cluster.groups={vllm: {engine: {kind: vllm}, simulator: {step_a: 0.5}}}")
    spec_of = recorded_policy()
    times, source = step_times.choose_cost(log, settings, spec_of)
    expected = step_times.choose_cost(log[:22], config(), spec_of)[0]
    assert (times.of(FULL), times.overhead) == (expected.of(FULL), expected.overhead)
    assert times_of(times, "") == expected
    assert times_of(times, "vllm") == step_times.choose_cost(log[22:], settings.groups()["vllm"], spec_of)[0]
    assert times_of(times, "vllm").of(FULL).decode.seconds(1, 10) > 5 * expected.of(FULL).decode.seconds(1, 10)
    fitted = "fitted to 22 measured requests of the log"
    assert source == f"replica: {fitted}; vllm: {fitted}"

    # Which of them served a request is not told: both could have served `full`.
    unknown = [replace(one, group="") for one in log]
    assert times_of(step_times.choose_cost(unknown, settings, spec_of)[0], "vllm").of(FULL) == (
        step_times.choose_cost(unknown, settings.groups()["vllm"], spec_of)[0].of(FULL)
    )
    compressed = [replace(one, group="", policy="snapkv@0.5") for one in log]
    for choice in ("auto", "log"):
        found, source = step_times.choose_cost(compressed, settings, spec_of, choice)
        assert source.endswith("vllm: configuration (simulator.step_*)")
        assert times_of(found, "vllm").of(FULL).decode.a == 0.5
    with pytest.raises(ValueError, match="no record of the log carries timings"):
        step_times.choose_cost(bare, settings, spec_of, "log")


def test_a_model_on_a_gpu_gives_a_roofline(tmp_path):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    file = tmp_path / "small" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(shape | {"vocab_size": 100, "dtype": "bfloat16"}))
    flags = [f"simulator.model={file}", "simulator.gpu=L4", "cluster.gpus_per_replica=0.5"]
    settings = load(flags=flags, environ={})
    times, source = step_times.choose_cost([], settings, recorded_policy())
    assert source == "roofline of small on L4"
    assert times == roofline(settings.simulator.model, settings.simulator.gpu, 0.5)
    assert json.loads(json.dumps(times.figures()))["gpu"]["name"] == "L4"
    assert kv_shape(settings).token_bytes == 2 * 2 * 4 * 16 * 2

    sizes = ["engine.kv_bytes=12GB", "prefix_cache.memory_bytes=512MiB", "engine.step_tokens=512"]
    groups = "cluster.groups={half: {cluster: {gpus_per_replica: 0.25}}, whole: {cluster: {gpus_per_replica: 1}}}"
    crowded = load(flags=[*flags, *sizes, groups], environ={})
    sizes_take = "weights, engine.kv_bytes and prefix_cache.memory_bytes take 13 GB, and a replica has"
    assert step_times.crowding(crowded) == f"{sizes_take} 12; group half: {sizes_take} 6"
    assert step_times.crowding(settings) == step_times.crowding(config()) == ""
    (result,) = replay([record(0.0, [1] * 20, output=5)], settings, [Variant()], times)
    assert result.ttft.p50 > OVERHEAD_SECONDS
    assert result.gpu_dollars == pytest.approx(0.5 * result.seconds / 3600 * settings.simulator.gpu.dollars)
