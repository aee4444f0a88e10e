"""Manifests as kubectl renders them, and what of them belongs to the Ray cluster."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.polling import PATIENCE
from warmkv.config import Config, parse
from warmkv.config.strict_yaml import FastLoader

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
OVERLAYS = ("demo", "single-gpu", "production", "vllm")
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())

Object = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """Rendered objects. Those of one `copy` may be changed."""

    objects: list[Object]

    def copy(self) -> Manifests:
        return Manifests(copy.deepcopy(self.objects))

    def kind(self, name: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == name]

    def named(self, kind: str, name: str) -> Object:
        (found,) = [one for one in self.kind(kind) if one["metadata"]["name"] == name]
        return found

    @property
    def service(self) -> Object:
        (found,) = self.kind("RayService")
        return found

    @property
    def cluster(self) -> Object:
        found: Object = self.service["spec"]["rayClusterConfig"]
        return found

    @property
    def document(self) -> Object:
        found: Object = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        return found

    @property
    def config(self) -> Config:
        (application,) = self.document["applications"]
        return parse(application["args"])

    @property
    def workers(self) -> list[Object]:
        """Groups of worker pods."""
        found: list[Object] = self.cluster["workerGroupSpecs"]
        return found

    @property
    def groups(self) -> dict[str, Object]:
        """Head and worker groups by name."""
        return {"head": self.cluster["headGroupSpec"], **{group["groupName"]: group for group in self.workers}}

    @property
    def templates(self) -> dict[str, Object]:
        """All templates of pods by name, of the Ray cluster and others."""
        others = {one["metadata"]["name"]: one["spec"]["template"] for one in self.kind("StatefulSet")}
        return {name: group["template"] for name, group in self.groups.items()} | others

    def containers(self, *, init: bool = True) -> Iterator[tuple[str, Object]]:
        """Yield every container with its place: those of the pods, and the autoscaler's, which KubeRay adds to the
        head.
        """
        for name, template in self.templates.items():
            for key in ("containers", *(["initContainers"] if init else [])):
                for box in template["spec"].get(key, ()):
                    yield f"{name}/{box['name']}", box
        if init and "autoscalerOptions" in self.cluster:
            yield "head/autoscaler", self.cluster["autoscalerOptions"]

    @property
    def first(self) -> Object:
        """The container of the first worker group that runs Ray."""
        found: Object = self.workers[0]["template"]["spec"]["containers"][0]
        return found


def kustomize(folder: Path) -> Manifests:
    """Render a folder. Skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return Manifests(list(yaml.load_all(done.stdout, FastLoader)))


@functools.cache
def overlay(name: str) -> Manifests:
    return kustomize(K8S / "overlays" / name)


def combined(folder: Path, components: Sequence[str], settings: str = "demo") -> Manifests:
    """Render the base with components, and the settings of an overlay, by a kustomization in a folder."""

    def path(*parts: str) -> str:
        return os.path.relpath(K8S.joinpath(*parts), folder)

    shutil.copy(K8S / "overlays" / settings / "serve-config.yaml", folder)
    shutil.copy(K8S / "overlays" / settings / "warmkv.yaml", folder)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "warmkv",
        "resources": [path("base")],
        "components": [path("components", component) for component in components],
        "configMapGenerator": [{"name": "warmkv-config", "files": ["warmkv.yaml"]}],
        "generatorOptions": {"disableNameSuffixHash": True},
        "patches": [{"path": "serve-config.yaml"}],
    }
    folder.joinpath("kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return kustomize(folder)


_UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(text: str | int) -> float:
    """Read a quantity of Kubernetes."""
    digits = str(text).rstrip("mkMGTKi")
    return float(digits) * _UNITS[str(text)[len(digits) :]]
