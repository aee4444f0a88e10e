"""Write an overlay from a plan: settings, their Serve document, and the worker group that has room for them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from warmkv import __version__
from warmkv.config import Config, place_in, put
from warmkv.model_shape import ModelShape
from warmkv.platform import manifest
from warmkv.platform.drain import END_SECONDS, seconds_after_upgrade, seconds_to_drain
from warmkv.platform.kubernetes.memory import GPU_PRODUCT, PRODUCTS, pod_memory
from warmkv.platform.kubernetes.rendered import GPU
from warmkv.simulator.studies.sweeps.grid import Configure, Settings, point

SETTINGS = "warmkv.yaml"
ACCESS = {"host": "0.0.0.0", "tenants_file": "/etc/warmkv/tenants/tenants.yaml"}
"""Where the pods of the base listen, and where its Secret with tenants is mounted."""
GROUP = "/spec/rayClusterConfig/workerGroupSpecs/0"
CPUS = 4
"""Of a worker pod for each replica: its engine, and what tokenizes beside it."""
OF_PODS = (("simulator", "gpu"), ("cluster", "gpus_per_replica"))
"""Settings of groups of replicas that would need worker pods of another kind."""
SHM_VOLUME = 3
"""Place of /dev/shm among the volumes of the base's worker pods."""
SHM_BYTES = 16 << 30
"""Its size with vLLM: NCCL's buffers, and the queues between its processes."""


def refusal(config: Config) -> str:
    """Return why an overlay, whose one worker group has all replicas, cannot be written; "" if it can."""
    for name, tree in config.cluster.groups.items():
        for section, key in OF_PODS:
            if key in tree.get(section, {}):
                setting = place_in(name, f"{section}.{key}")
                return f"{setting} needs pods of its own, and the overlay has one worker group: leave it out"
    return ""


def write_overlay(
    folder: Path, base: Path, configure: Configure, settings: Settings, shape: ModelShape, why: Sequence[str]
) -> list[Path]:
    """Write the overlay of a deployment with these settings; return its files. Raises OSError.

    Each replica, those of groups as well, has a pod with the GPUs that it asks for. `refusal` has found nothing.
    """
    config = point(settings, configure).config
    folder.mkdir(parents=True, exist_ok=True)
    tree = config.model_dump(mode="json", exclude_defaults=True, exclude={"simulator", "dashboards"})
    for path, value in settings.items():
        if not path.startswith("simulator."):
            put(tree, path, value)
    tree["gateway"] = {**ACCESS, **tree.get("gateway", {})}
    said = "".join(f"# {line}\n" for line in ["Written by `warmkv plan`. Change it, then `warmkv k8s render`.", *why])
    files = {
        SETTINGS: said + yaml.safe_dump(tree, sort_keys=False),
        "kustomization.yaml": yaml.safe_dump(_kustomization(folder, base, config.image_target), sort_keys=False),
        "workers.yaml": yaml.safe_dump(_workers(config, shape), sort_keys=False),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    manifest.render(folder / SETTINGS, folder / "serve-config.yaml")
    return [folder / name for name in (*files, "serve-config.yaml")]


def _kustomization(folder: Path, base: Path, target: str) -> dict[str, Any]:
    """Build on the base, and on its component for GPUs where there is one; with the image of a target if named."""

    def beside(path: Path) -> str:
        return os.path.relpath(path.resolve(), folder.resolve())

    gpu = base.parent / "components" / "gpu"
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "warmkv",
        "resources": [beside(base)],
        **({"components": [beside(gpu)]} if gpu.is_dir() else {}),
        "configMapGenerator": [{"name": "warmkv-config", "files": [SETTINGS]}],
        "generatorOptions": {"disableNameSuffixHash": True},
        **({"images": [{"name": "warmkv", "newTag": f"{__version__}-{target}"}]} if target else {}),
        "patches": [
            {"path": "serve-config.yaml"},
            {"path": "workers.yaml", "target": {"kind": "RayService", "name": manifest.NAME}},
        ],
    }


def _workers(config: Config, shape: ModelShape) -> list[dict[str, Any]]:
    """Return a JSON patch of the worker group."""
    cluster, gpu = config.cluster, config.simulator.gpu
    on_a_pod = max(1, int(1 / cluster.gpus_per_replica)) if cluster.gpus_per_replica < 1 else 1
    pods = -(-config.most_replicas // on_a_pod)
    groups = config.groups().values()
    cpus = max(group.cluster.cpus_per_replica for group in groups)
    memory = max(pod_memory(group, shape, on_a_pod, True) for group in groups)
    memory += SHM_BYTES if config.image_target else 0
    resources = {
        "cpu": str(max(CPUS, round(CPUS * on_a_pod * max(1.0, cpus)))),
        "memory": f"{memory >> 30}Gi",
        GPU: str(max(1, round(cluster.gpus_per_replica))),
    }
    grace = math.ceil(seconds_to_drain(config) + END_SECONDS)
    changes: dict[str, Any] = {f"{GROUP}/{key}": pods for key in ("replicas", "minReplicas", "maxReplicas")}
    changes[f"{GROUP}/template/spec/terminationGracePeriodSeconds"] = grace
    changes["/spec/rayClusterDeletionDelaySeconds"] = seconds_after_upgrade(config)
    changes |= {
        f"{GROUP}/template/spec/containers/0/resources/{bound}/{name.replace('/', '~1')}": amount
        for bound in ("requests", "limits")
        for name, amount in resources.items()
    }
    if product := PRODUCTS.get(gpu.name):
        changes[f"{GROUP}/template/spec/nodeSelector"] = {GPU_PRODUCT: product}
    patch = [{"op": "add", "path": path, "value": value} for path, value in changes.items()]
    if config.image_target:
        volume = f"{GROUP}/template/spec/volumes/{SHM_VOLUME}"
        patch.append({"op": "test", "path": f"{volume}/name", "value": "shm"})
        patch.append({"op": "replace", "path": f"{volume}/emptyDir/sizeLimit", "value": f"{SHM_BYTES >> 30}Gi"})
    return patch
