"""Read the cores of a replica: control groups of both versions on fake file trees, and who shares a node."""

import os

import pytest

from warmkv.config import load
from warmkv.replicas.cores import group_cores, threads_per_replica, usable_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        # version 2: the group's own quota and those above it
        (
            {
                "proc/self/cgroup": "0::/kubepods/pod1/box\n",
                "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "25000 100000\n",
                "sys/fs/cgroup/kubepods/cpu.max": "50000 100000\n",
            },
            [0.25, 0.5],
        ),
        # version 1, where the path is that of the host and the mount is the container's group
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:cpuset:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "75000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            [0.75],
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            [],
        ),
        ({}, []),
    ],
)
def test_quotas_of_control_groups_limit_the_cores(tmp_path, files, cores):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert list(group_cores(tmp_path)) == cores
    assert usable_cores(tmp_path) == min([len(os.sched_getaffinity(0)), *cores])


@pytest.mark.parametrize(
    ("flags", "cores", "node", "threads"),
    [
        (("cluster.replicas=2",), 8.0, {}, 4),
        (("cluster.replicas=2",), 8.0, {"CPU": 8.0}, 4),
        (("cluster.replicas=2",), 1.0, {"CPU": 1.0}, 1),  # in pods of one CPU
        (("cluster.replicas=100", "cluster.cpus_per_replica=64"), 64.0, {"CPU": 64.0}, 64),  # one finds room
        (("cluster.replicas=100", "cluster.gpus_per_replica=1"), 64.0, {"CPU": 64.0, "GPU": 8.0}, 8),
        (("cluster.replicas=2", "cluster.cpus_per_replica=0"), 8.0, {"CPU": 6.0}, 3),  # Ray was given fewer
        (("cluster.replicas=3", "cluster.cpus_per_replica=0"), 8.0, {"CPU": 0.0}, 2),
        (("cluster.replicas=2",), 2.5, {"CPU": 64.0}, 1),
        (("engine.threads=3", "cluster.replicas=2"), 8.0, {"CPU": 8.0}, 3),
    ],
)
def test_replicas_share_the_cores_of_their_node(flags, cores, node, threads):
    config = load(flags=flags, environ={})
    assert threads_per_replica(config, config.most_replicas, cores, node) == threads
