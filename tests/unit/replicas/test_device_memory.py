"""Reading memory: control groups of both versions on fake file trees, GPUs on faked figures, models by their files."""

import json
import os

import numpy as np
import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.families import tiny_model
from warmkv.config import EngineConfig, PrefixCacheConfig, load
from warmkv.policies import compression
from warmkv.policies.memory_plan import DeviceMemory, MemoryPlanError, ModelSizes, plan
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas import device_memory
from warmkv.replicas.device_memory import Peak, group_limits, host_memory, share_of
from warmkv.replicas.engine.scheduler import Scheduler, Sequence
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import UnservableRequestError
from warmkv.replicas.slots.slots import SlotPool

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {20 * GIB // 1024} kB\nHugePages_Free: 0\n"


def tree(root, files):
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/statm": "900 100 0 0 0 0 0\n", **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        # version 2: the least of the group's own and those above it
        (
            {
                "proc/self/cgroup": "0::/kubepods/pod1/box\n",
                "sys/fs/cgroup/kubepods/pod1/box/memory.max": "max\n",
                "sys/fs/cgroup/kubepods/pod1/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/kubepods/memory.max": f"{8 * GIB}\n",
            },
            [3 * GIB, 8 * GIB],
        ),
        # in a container's own namespace
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, [2 * GIB]),
        # version 1, where the path is that of the host and the mount is the container's group
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            },
            [4 * GIB],
        ),
        # version 1 without a limit, and both versions side by side
        (
            {
                "proc/self/cgroup": "4:memory:/\n0::/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/unified/x/memory.max": f"{5 * GIB}\n",
            },
            [5 * GIB],
        ),
        ({"proc/self/cgroup": "0::/../../outside\n"}, []),
        ({}, []),
    ],
)
def test_control_groups_give_their_limits(tmp_path, files, limits):
    root = tree(tmp_path, files)
    assert list(group_limits(root)) == limits
    found = host_memory(0.5, root)
    if limits:
        assert (found.kind, found.total, found.hard, found.share) == ("group", min(limits), min(limits), 0.5)
    else:  # what is free, and what this process holds already
        page = os.sysconf("SC_PAGE_SIZE")
        assert (found.kind, found.hard) == ("machine", 64 * GIB)
        assert found.total == 20 * GIB + 100 * page


def test_a_limit_beyond_the_machine_is_none(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{128 * GIB}\n"}
    assert host_memory(1.0, tree(tmp_path, files)).kind == "machine"


def test_a_machine_without_proc_tells_its_size(tmp_path):
    found = host_memory(1.0, tmp_path)
    assert (found.kind, found.total) == ("machine", found.hard)


@pytest.mark.parametrize(
    ("flags", "device", "cpus", "share"),
    [
        ((), "cpu", None, 1.0),
        (("cluster.replicas=4",), "cpu", None, 0.25),
        (("cluster.replicas=4",), "cpu", 2.5, 0.5),  # two of them find room on the node
        (("cluster.replicas=4", "cluster.cpus_per_replica=0"), "cpu", 2.0, 0.25),
        (("cluster.autoscaling={max_replicas: 8}",), "cpu", 64.0, 0.125),
        (("cluster.replicas=4", "cluster.gpus_per_replica=0.5"), "cuda", 8.0, 0.5),
        (("cluster.replicas=4", "cluster.gpus_per_replica=2"), "cuda", 8.0, 2.0),
        (("cluster.replicas=2",), "cuda", 8.0, 0.5),  # all on the first GPU
        (("cluster.groups={other: {cluster: {replicas: 3}}}",), "cpu", None, 0.25),
    ],
)
def test_replicas_share_what_they_are_on(flags, device, cpus, share):
    config = load(flags=flags, environ={})
    assert share_of(config.cluster, config.most_replicas, torch.device(device), cpus) == share


def test_a_gpu_of_its_own_counts_what_others_hold(monkeypatch):
    total, free, reserved = 80 * GIB, 50 * GIB, 10 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    alone, shared, two = (device_memory.read(torch.device("cuda"), share) for share in (1.0, 0.5, 2.0))
    assert (alone.kind, alone.total, alone.taken) == ("gpu", total, 20 * GIB)
    assert shared.taken < GIB  # the other replica has a share of its own
    assert (two.total, two.share, two.taken) == (total, 2.0, 40 * GIB)


def test_a_prompt_of_100_000_tokens_is_admitted_by_an_8b_model_on_80_gb(models):
    shape, size = KVShape(32, 8, 128, 2, 32), 80 * 10**9
    sizes = ModelSizes(16_060_522_496, shape, 4096, 14336, 128_256)
    engine = EngineConfig()
    found = plan(DeviceMemory("gpu", "H100", size, size), sizes, engine, PrefixCacheConfig(), 131_072)
    pool = SlotPool(shape, torch.bfloat16, torch.device("cpu"))
    store = Driver(models["llama"]).engine.store
    scheduler = Scheduler(engine, shape, 131_072, sizes.vocabulary, pool, store, found.kv, step_tokens=768)
    request = make_request([7] * 100_000, new=500)

    def check(limit):
        scheduler.kv = limit
        sequence = Sequence(request, compression.build(PolicySpec()), lambda event: None, 0.0, np.random.default_rng(0))
        scheduler.validate(sequence)
        scheduler.size(sequence)
        scheduler.check_queue(sequence, 0)

    check(found.kv)
    small = plan(DeviceMemory("gpu", "L4", 24 * 10**9, 24 * 10**9), sizes, engine, PrefixCacheConfig(), 131_072)
    with pytest.raises(UnservableRequestError, match=rf"engine\.kv_bytes is auto = {small.kv.bytes} bytes"):
        check(small.kv)


def test_the_plan_reaches_engine_pool_and_store(models, monkeypatch):
    memory = DeviceMemory("group", "the control group", 4 * GIB, 4 * GIB)
    monkeypatch.setattr(device_memory, "read", lambda device, share: memory)
    model = models["llama"]
    driver = Driver(model, kv_bytes="auto")
    engine, found = driver.engine, driver.engine.memory
    assert found.lines[0].bytes == model.weight_bytes()
    assert engine.scheduler.kv == found.kv
    assert engine.store.tier_limits["device"] == found.stored.bytes == pytest.approx(found.kv.bytes / 2, abs=1)
    assert len(driver.run(make_request([1, 2, 3], new=4))[0]) == 4


def test_a_replica_that_does_not_fit_is_refused_before_and_after_loading(models, monkeypatch, tmp_path):
    memory = DeviceMemory("gpu", "a small GPU", 40_000, 40_000)
    monkeypatch.setattr(device_memory, "read", lambda device, share: memory)
    found = device_memory.plan_replica(models["llama"], EngineConfig(), PrefixCacheConfig())
    with pytest.raises(MemoryPlanError, match=rf"(?s)needed {found.needed:,} bytes, given 36,000.*weights"):
        found.check()

    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 30_000)
    settings = load(flags=[f"model.path={tmp_path}", "model.device=cpu"], environ={})  # float32: twice as much
    with pytest.raises(
        MemoryPlanError, match=r"weights alone .* needed 60,000 bytes, given 36,000.*engine\.kind: vllm"
    ):
        device_memory.check_before_loading(settings, 1.0)
    device_memory.check_before_loading(load(flags=[f"model.path={tmp_path}", "model.dtype=bfloat16"], environ={}), 1.0)


def test_several_gpus_for_a_replica_are_refused_and_pointed_to_the_engine_that_uses_them():
    settings = load(flags=["cluster.gpus_per_replica=2", "model.device=cpu"], environ={})
    with pytest.raises(
        device_memory.DeviceError, match=r"gpus_per_replica 2: .*tensor parallelism \(engine\.kind: vllm"
    ):
        device_memory.check_before_loading(settings, 1.0)


def test_files_that_do_not_tell_the_weights_stop_nothing(tmp_path):
    def stored(path):
        return device_memory.stored_weight_bytes(load(flags=[f"model.path={path}"], environ={}).model, torch.float32)

    assert stored("some/hub-name") is None
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert stored(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1000}}))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": {}}))
    assert stored(tmp_path) == 1000  # as they are
    for told in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "text_config": {}}, {"text_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(told))
        assert stored(tmp_path) == 2000  # also where nothing tells the dtype
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "complex64"}))
    assert stored(tmp_path) is None


def test_the_attention_of_a_chunk_is_measured_by_the_allocator(models):
    """Its peak over what was there before, for each token of the prompt it was measured at."""
    account = iter([1000, 1000 + 512 * 40])
    resets = []
    peak = Peak(lambda: next(account), lambda: resets.append(1), lambda: next(account))
    assert device_memory.measure_attention(models["llama"], 16, peak) == 40  # the model takes 512 tokens
    assert resets == [1]


@pytest.mark.parametrize(("name", "says"), [("abacus", "is no device"), ("cuda", "finds no GPU")])
def test_a_device_that_is_not_there_is_told(name, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(device_memory.DeviceError, match=says):
        device_memory.check_device(name)


def test_experts_that_are_told_layer_by_layer_count_as_those_of_the_widest_layer():
    model = prepare(tiny_model("hunyuan_v1_moe", num_experts_per_tok=[2, 3, 1], moe_intermediate_size=[48, 48, 40]))
    assert device_memory.sizes_of(model).intermediate == 3 * 48
