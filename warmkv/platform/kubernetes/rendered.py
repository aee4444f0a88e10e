"""Rendered Kubernetes manifests as plain objects, and what of them belongs to a RayService."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from warmkv.config import Config, ConfigError, parse
from warmkv.config.strict_yaml import FastLoader
from warmkv.faults import UserError
from warmkv.model_shape import ModelShape, ModelShapeError, config_file, figures
from warmkv.platform.document import IMPORT_PATH
from warmkv.platform.kubernetes.fields import Fields

Object = Mapping[str, Any]

GPU = "nvidia.com/gpu"
TEMPLATED = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
_QUANTITY = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?")
_TENS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: dict[str, int] = {f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTPE", 1)}
LARGEST = float(2**63)  # what is more counts as this

OBJECT_STORE = "object-store-memory"  # of rayStartParams
OBJECT_STORE_SHARE = 0.3
OBJECT_STORE_MOST = 200 * 10**9
"""What Ray takes for its object store where nobody says: a share of the memory that is free, up to so many bytes
(`ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION`, `DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES`)."""


class RenderError(UserError):
    """Manifests that cannot be rendered or read; the message says what to do."""


@dataclass(frozen=True)
class Pods:
    """Pods of one kind: their specification and where it stands."""

    where: str
    spec: Object
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""

    def containers(self) -> Iterator[tuple[str, Object]]:
        """Yield every container, those that run first included, with its place."""
        for key in ("initContainers", "containers"):
            for number, box in enumerate(self.spec.get(key) or ()):
                yield f"{self.where}.{key}[{box.get('name', number)}]", box


@dataclass(frozen=True)
class Group:
    """The head or a worker group of a Ray cluster. Its first container is the one that runs Ray."""

    name: str
    head: bool
    pods: Pods
    spec: Object
    autoscaled: bool  # Ray's own autoscaler may go up to maxReplicas

    @property
    def box(self) -> Object:
        boxes: Sequence[Object] = self.pods.spec.get("containers") or ({},)
        return boxes[0]

    @property
    def where(self) -> str:
        """Return the place of the container that runs Ray."""
        return f"{self.pods.where}.containers[{self.box.get('name', 0)}]"

    @property
    def most_pods(self) -> int:
        """Return the most pods that the group can have: `replicas`, unless Ray's autoscaler may add some."""
        if self.head:
            return 1
        key = "maxReplicas" if self.autoscaled else "replicas"
        return int(self.spec.get(key, self.spec.get("replicas", 1)) or 0) * self._hosts

    @property
    def least_pods(self) -> int:
        """Return the fewest pods that the group has in service: `replicas`, unless Ray's autoscaler may remove some."""
        if self.head:
            return 1
        key = "minReplicas" if self.autoscaled else "replicas"
        return int(self.spec.get(key, 0 if self.autoscaled else 1) or 0) * self._hosts

    @property
    def _hosts(self) -> int:
        """Return the pods of what KubeRay calls a replica of the group."""
        return int(self.spec.get("numOfHosts") or 1)

    def mount(self, path: str) -> Object | None:
        """Return what is mounted over a path in the container that runs Ray; None if the path is in the image."""
        place = PurePosixPath(path)
        over = [m for m in self.box.get("volumeMounts") or () if place.is_relative_to(m.get("mountPath", ""))]
        return max(over, key=lambda mount: len(str(mount["mountPath"])), default=None)

    def volume(self, mount: Object) -> Object | None:
        """Return the volume of a mount; None where the pod has none of that name."""
        return next((v for v in self.pods.spec.get("volumes") or () if v.get("name") == mount.get("name")), None)

    def limit(self, resource: str) -> float | None:
        """Return a resource's limit, else its request, as KubeRay tells Ray; None where neither can be read."""
        return None if (text := self.written(resource)) is None else quantity(text)

    def written(self, resource: str) -> object:
        """Return what stands there as a resource's limit, else as its request; None where there is neither."""
        resources = self.box.get("resources") or {}
        bounds = ((resources.get(bound) or {}).get(resource) for bound in ("limits", "requests"))
        return next((text for text in bounds if text is not None), None)

    @property
    def cpus(self) -> float:
        """Return the CPUs that Ray gives out on a pod: those of rayStartParams, else the limit, rounded up."""
        return self._given("num-cpus", math.ceil(self.limit("cpu") or 0))

    @property
    def gpus(self) -> float:
        """Return the GPUs that Ray gives out on a pod."""
        return self._given("num-gpus", self.limit(GPU) or 0)

    def object_store(self, limit: float) -> int:
        """Return the bytes that Ray's object store may take of a pod with a limit of memory.

        They lie in /dev/shm, which counts against it; a store that does not fit there is a file, which can be written
        out. Where a pod mounts no /dev/shm, KubeRay mounts one as large as the limit.
        """
        size = self._given(OBJECT_STORE, min(OBJECT_STORE_SHARE * limit, OBJECT_STORE_MOST))
        mount = self.mount("/dev/shm")
        volume = mapping(self.volume(mount) if mount else None)
        room = quantity(mapping(volume.get("emptyDir")).get("sizeLimit"))
        return int(size if room is None else min(size, room))

    def limit_for(self, needed: float) -> float:
        """Return the limit of memory that leaves so many bytes beside the object store."""
        return needed + self.object_store(needed / (1 - OBJECT_STORE_SHARE))

    def _given(self, parameter: str, otherwise: float) -> float:
        text = str((self.spec.get("rayStartParams") or {}).get(parameter, ""))
        return float(text) if text.replace(".", "", 1).isdigit() else otherwise

    def replicas_on_a_pod(self, config: Config) -> int:
        """Return how many replicas find room on a pod of this group."""
        cluster = config.cluster
        rooms = [config.cluster.most_replicas]
        if cluster.cpus_per_replica:
            rooms.append(int(self.cpus / cluster.cpus_per_replica))
        if 0 < cluster.gpus_per_replica < 1:  # a replica lies on one GPU
            rooms.append(int(self.gpus) * int(1 / cluster.gpus_per_replica))
        elif cluster.gpus_per_replica:
            rooms.append(int(self.gpus / cluster.gpus_per_replica))
        return min(rooms)


@dataclass(frozen=True)
class RenderedService:
    """A RayService: its groups, and the configuration inside its Serve document."""

    resource: Object
    where: str

    @cached_property
    def cluster(self) -> Object:
        return mapping(mapping(self.resource.get("spec")).get("rayClusterConfig"))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Return the head and the worker groups."""
        at = f"{self.where}: spec.rayClusterConfig"
        scales = bool(self.cluster.get("enableInTreeAutoscaling"))
        found = []
        if head := mapping(self.cluster.get("headGroupSpec")):
            found.append(self._group("head", True, head, f"{at}.headGroupSpec", scales))
        for number, group in enumerate(self.cluster.get("workerGroupSpecs") or ()):
            name = str(group.get("groupName", number))
            found.append(self._group(name, False, group, f"{at}.workerGroupSpecs[{name}]", scales))
        return tuple(found)

    @property
    def workers(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.head)

    def _group(self, name: str, head: bool, spec: Object, at: str, scales: bool) -> Group:
        template = mapping(spec.get("template"))
        labels = mapping(mapping(template.get("metadata")).get("labels"))
        namespace = str(mapping(self.resource.get("metadata")).get("namespace", ""))
        pods = Pods(f"{at}.template.spec", mapping(template.get("spec")), labels, namespace)
        return Group(name, head, pods, spec, scales)

    @cached_property
    def document(self) -> Object:
        """Return the Serve document. Raises ConfigError where there is none, or it cannot be read."""
        text = mapping(self.resource.get("spec")).get("serveConfigV2")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError("there is none")
        try:
            document = yaml.load(text, FastLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"it is not YAML: {error}") from None
        if not isinstance(document, dict) or not document.get("applications"):
            raise ConfigError("it has no applications")
        return document

    @cached_property
    def config(self) -> Config:
        """Return the configuration of the application that is warmkv's. Raises ConfigError."""
        for application in self.document["applications"]:
            if application.get("import_path") == IMPORT_PATH:
                return parse(application.get("args") or {})
        raise ConfigError(f"no application has the import_path {IMPORT_PATH}")

    @property
    def known_config(self) -> Config | None:
        """Return the configuration; None where it cannot be read, which a rule of its own tells."""
        try:
            return self.config
        except ConfigError:
            return None


@dataclass(frozen=True)
class RenderedManifests:
    """All objects that are about to be applied, the fields that each kind has, and the model's sizes where known."""

    objects: tuple[Object, ...]
    fields: Mapping[str, Fields]
    model: ModelShape | None = None

    @cached_property
    def services(self) -> tuple[RenderedService, ...]:
        return tuple(RenderedService(one, name_of(one)) for one in self.objects if one["kind"] == "RayService")

    @property
    def configured(self) -> Iterator[tuple[RenderedService, Config]]:
        """Yield the services whose configuration can be read, with it."""
        for service in self.services:
            if (config := service.known_config) is not None:
                yield service, config

    @cached_property
    def pods(self) -> tuple[Pods, ...]:
        """Return the pods of every object that makes some."""
        found = [group.pods for service in self.services for group in service.groups]
        for one in self.objects:
            spec, namespace = mapping(one.get("spec")), str(mapping(one.get("metadata")).get("namespace", ""))
            if one["kind"] == "Pod":
                found.append(Pods(f"{name_of(one)}: spec", spec, _labels(one), namespace))
            if one["kind"] in TEMPLATED:
                template = mapping(spec.get("template"))
                at = f"{name_of(one)}: spec.template.spec"
                found.append(Pods(at, mapping(template.get("spec")), _labels(template), namespace))
        return tuple(found)

    def find(self, kind: str, name: str) -> Object | None:
        """Return an object by kind and name; None if it is not among those rendered."""
        for one in self.objects:
            if one["kind"] == kind and one["metadata"].get("name") == name:
                return one
        return None


def render(source: Path) -> str:
    """Render a folder with kustomize, or read a file that is rendered. Raises RenderError."""
    try:
        if source.is_file():
            return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RenderError(f"cannot read {source}: {error}") from None
    if not source.is_dir():
        raise RenderError(f"there is no {source}; name an overlay's folder, a rendered file, or - for standard input")
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(source)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(source)]
    else:
        raise RenderError(
            f"rendering the folder {source} needs kubectl or kustomize, and neither is installed: install kubectl "
            "(kubernetes.io/docs/tasks/tools), or render it elsewhere and give the file"
        )
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RenderError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def read(text: str, fields: Mapping[str, Fields], model: ModelShape | None = None) -> RenderedManifests:
    """Read rendered YAML. Raises RenderError where it holds no Kubernetes objects."""
    try:
        found = [one for one in yaml.load_all(text, FastLoader) if one is not None]
    except yaml.YAMLError as error:
        raise RenderError(f"this is not YAML: {error}") from None
    objects: list[Object] = []
    for number, one in enumerate(found, start=1):
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise RenderError(f"document {number} is no Kubernetes object: it has no kind")
        objects += one["items"] if one["kind"] == "List" else [one]
    if not objects:
        raise RenderError("there is nothing in it")
    for one in objects:
        if not mapping(one.get("metadata")).get("name"):
            raise RenderError(f"a {one['kind']} has no metadata.name")
        if one["kind"] == "Kustomization":
            raise RenderError("this is a Kustomization, which is not rendered yet: give its folder")
    return RenderedManifests(tuple(objects), fields, model)


def with_model(rendered: RenderedManifests, name: str | None = None) -> RenderedManifests:
    """Add the sizes of a model, else of the one that the first RayService serves, where they can be found here.

    Raises ModelShapeError where a named model's cannot.
    """
    if name is not None:
        return replace(rendered, model=_shape(name))
    config = rendered.services[0].known_config if rendered.services else None
    try:
        return replace(rendered, model=None if config is None else _shape(config.model.path))
    except ModelShapeError:  # a rule tells that memory was not checked
        return rendered


def _shape(name: str) -> ModelShape:
    path = config_file(name)
    return ModelShape(path=path, **figures(path))


def name_of(one: Object) -> str:
    """Return kind and name, as kubectl writes them."""
    return f"{one['kind']}/{one['metadata'].get('name', '')}"


def quantity(text: object) -> float | None:
    """Read `16Gi`, `500m`, `129e6` or `2`; None for what is no quantity, or is below zero, as no resource may be."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, unit, power = match.groups()
    return min(LARGEST, float(f"{number}e{power or _TENS.get(unit, 0)}") * _BINARY.get(unit, 1))


def mapping(value: object) -> Object:
    """Return a mapping as it is, and an empty one for what is none: types may be wrong."""
    return value if isinstance(value, dict) else {}


def _labels(template: Object) -> Mapping[str, str]:
    return mapping(mapping(template.get("metadata")).get("labels"))
