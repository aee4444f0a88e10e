"""Read how many cores a replica may use, and share them with the replicas that may come beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from warmkv.config import Config
from warmkv.replicas.control_groups import limit_files


def threads_per_replica(config: Config, replicas: int, cores: float, node: Mapping[str, float]) -> int:
    """Return the torch threads of a replica, one of so many: as configured, or its share of the cores.

    `cores` are those that this process may use, `node` the resources that Ray gives out on its node: no more replicas
    come there than find room. Empty: unknown.
    """
    cluster = config.cluster
    needs = {"CPU": cluster.cpus_per_replica, "GPU": cluster.gpus_per_replica}
    rooms = [int(node[name] / need) for name, need in needs.items() if need > 0 and name in node]
    beside = max(1, min([replicas, *rooms]))
    return config.engine.threads or max(1, int(min(cores, node.get("CPU") or cores) / beside))


def usable_cores(root: Path = Path("/")) -> float:
    """Return the cores that this process may use: those that it may run on, or as many as its control groups allow."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(own), *group_cores(root)])


def group_cores(root: Path = Path("/")) -> Iterator[float]:
    """Yield the quotas of this process's control groups in cores, up to the root, of both versions."""
    for file in limit_files("cpu", "cpu.max", "cpu.cfs_quota_us", root):
        try:
            words = file.read_text().split()
            if file.name == "cpu.cfs_quota_us":
                words += (file.parent / "cpu.cfs_period_us").read_text().split()
        except OSError:
            continue
        quota, period = words
        if quota.isdigit():  # else `max` or -1: no limit
            yield int(quota) / int(period)


def node_resources(node: str) -> dict[str, float]:
    """Return what Ray gives out on a node of the cluster that this process belongs to; nothing if it is unknown."""
    import ray

    return next((known["Resources"] for known in ray.nodes() if known["NodeID"] == node), {})
