"""What is planned from a config.json, beside what a replica plans once its model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from warmkv.config import Config, ModelConfig, parse
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape, config_file
from warmkv.platform.kubernetes import memory
from warmkv.policies import memory_plan
from warmkv.policies.memory_plan import PROCESS_BYTES, DeviceMemory, MemoryPlan, MemoryPlanError
from warmkv.replicas import device_memory
from warmkv.replicas.loading.load import load_model

TINY = ModelShape.model_validate(str(config_file("tiny")))
LARGE = ModelShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocabulary=128256, dtype_bytes=2
)
LIMIT = 3 << 30
GIB = 1 << 30
ROOT = Path(__file__).parents[4]


def alike(planned: MemoryPlan, real: MemoryPlan, share: float) -> None:
    """Every line, and the limits that follow from them."""
    assert [line.name for line in planned.lines] == [line.name for line in real.lines]
    for ours, theirs in zip(planned.lines, real.lines, strict=True):
        assert ours.bytes == pytest.approx(theirs.bytes, rel=share), ours.name
    assert planned.kv.bytes == pytest.approx(real.kv.bytes, rel=share)
    assert planned.stored.bytes == pytest.approx(real.stored.bytes, rel=share)


def test_a_pod_is_planned_as_its_replica_plans() -> None:
    """The demo's pods, from what the repository holds, and from the loaded model."""
    config = Config()
    model = load_model(ModelConfig())
    group = DeviceMemory("group", "the control group", LIMIT, LIMIT, 0.5)
    sizes = device_memory.sizes_of(model)
    real = memory_plan.plan(group, sizes, config.engine, config.prefix_cache, model.max_context)
    alike(memory.plan_in_pod(config, TINY, LIMIT, 2), real, 0.01)


def test_a_gpu_is_planned_from_its_data_sheet() -> None:
    """In the dtype that a GPU serves: half of float32."""
    h100 = Gpu.model_validate("H100-SXM")
    planned = memory.plan_on_gpu(parse({"cluster": {"gpus_per_replica": 1}}), TINY, h100)
    assert planned.given.bytes == int(0.9 * h100.memory)
    assert planned.lines[0].bytes == memory.sizes_of(Config(), TINY, True).weights
    assert memory.sizes_of(Config(), LARGE, False).weights == 2 * memory.sizes_of(Config(), LARGE, True).weights
    large = memory.plan_on_gpu(parse({"cluster": {"gpus_per_replica": 1}}), LARGE, h100)
    assert large.needed > large.most
    several = {kind: {"cluster": {"gpus_per_replica": 4}, "engine": {"kind": kind}} for kind in ("warmkv", "vllm")}
    own, vllm = (memory.plan_on_gpu(parse(settings), TINY, h100) for settings in several.values())
    assert (own.given.bytes, vllm.given.bytes) == (int(0.9 * h100.memory), int(4 * 0.9 * h100.memory))


def test_host_memory_is_that_of_the_weights_on_their_way_or_of_the_tiers() -> None:
    config = parse({"prefix_cache": {"host": {"memory_bytes": "20GiB"}}})
    names = [[line.name for line in memory.host_lines(config, model, 1, GIB)] for model in (TINY, LARGE)]
    assert names == [
        ["node", "process", "object store", "host tier", "moving"],
        ["node", "process", "object store", "weights"],
    ]
    assert memory.pod_memory(config, TINY, 1, True) in range(22 * GIB, 27 * GIB, GIB)
    assert memory.pod_memory(config, TINY, 2, True) > memory.pod_memory(config, TINY, 1, True) + 20 * GIB
    assert memory.pod_memory(Config(), TINY, 2, False) in range(5 * GIB, 8 * GIB, GIB)


@pytest.mark.parametrize(
    ("kind", "gpus", "processes"), [("warmkv", 1, 1), ("vllm", 0, 3), ("vllm", 0.5, 3), ("vllm", 4, 6)]
)
def test_the_processes_of_an_engine_count(kind: str, gpus: float, processes: int) -> None:
    """Count vLLM's engine core and a worker for each GPU beside a replica's own."""
    config = parse({"engine": {"kind": kind}, "cluster": {"gpus_per_replica": gpus}})
    (line,) = [line for line in memory.host_lines(config, TINY, 2, GIB) if line.name == "process"]
    assert line.bytes == 2 * processes * PROCESS_BYTES


def test_ray_has_its_object_store_beside_replicas() -> None:
    """Take it from what replicas without a GPU share, and count what the base sets in pods of a plan."""
    config = parse({"engine": {"kv_bytes": "1GiB"}, "prefix_cache": {"memory_bytes": "1GiB"}})
    memory.plan_in_pod(config, TINY, LIMIT, 1).check()
    with pytest.raises(MemoryPlanError, match="less Ray's object store"):
        memory.plan_in_pod(config, TINY, LIMIT, 1, GIB).check()
    base = yaml.safe_load((ROOT / "k8s/base/rayservice.yaml").read_text())
    (group,) = base["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["rayStartParams"]["object-store-memory"] == str(memory.OBJECT_STORE_BYTES)
