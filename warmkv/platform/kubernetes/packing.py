"""Which replicas of a service find room on the pods that it can have: those of all kinds together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from warmkv.config import ClusterConfig, Config
from warmkv.platform.kubernetes.rendered import RenderedService

UNIT = 10_000  # of a CPU or GPU: Ray counts in such parts, so that 0.1 ten times is 1


@dataclass
class _Pod:
    """Track the CPUs, and each of the GPUs, that a pod has left, in units."""

    group: str
    cpus: int
    gpus: list[int]

    def takes(self, cluster: ClusterConfig) -> bool:
        """Place a replica, if there is room; a share of a GPU lies on one GPU."""
        cpus, wanted = _units(cluster.cpus_per_replica), _units(cluster.gpus_per_replica)
        each = min(wanted, UNIT)
        free = [number for number, left in enumerate(self.gpus) if left >= each]
        count = math.ceil(wanted / UNIT)
        if cpus > self.cpus or count > len(free):
            return False
        self.cpus -= cpus
        for number in free[:count]:
            self.gpus[number] -= each
        return True


@dataclass(frozen=True)
class Packed:
    """Count replicas without room, by kind ("" is the settings' own), and those placed, by group of pods."""

    left: Counter[str]
    placed: Counter[str]


def pack(service: RenderedService, kinds: Mapping[str, Config]) -> Packed:
    """Place replicas on pods, the largest first, each on the first pod with room; pods without GPUs come first."""
    pods = [
        _Pod(group.name, _units(group.cpus), [UNIT] * int(group.gpus))
        for group in service.groups
        for _ in range(group.most_pods)
    ]
    pods.sort(key=lambda pod: len(pod.gpus))
    left, placed = Counter[str](), Counter[str]()
    clusters = {name: config.cluster for name, config in kinds.items()}
    for name, cluster in sorted(clusters.items(), key=lambda item: _size(item[1]), reverse=True):
        for number in range(cluster.most_replicas):
            pod = next((pod for pod in pods if pod.takes(cluster)), None)
            if pod is None:  # nor do the others of this kind find any
                left[name] = cluster.most_replicas - number
                break
            placed[pod.group] += 1
    return Packed(left, placed)


def _size(cluster: ClusterConfig) -> tuple[float, float]:
    return cluster.gpus_per_replica, cluster.cpus_per_replica


def _units(amount: float) -> int:
    return round(amount * UNIT)
