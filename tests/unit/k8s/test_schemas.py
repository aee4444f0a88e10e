"""Rendered objects against the schemas of Kubernetes and of the operators: a field that they do not know is refused."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.k8s.manifests import COMPONENTS, OVERLAYS, ROOT, Manifests, Object, combined, overlay
from warmkv.config.strict_yaml import FastLoader

KUBERNETES = ("1.29", "1.32")
CORE = {
    "ConfigMap",
    "LimitRange",
    "Namespace",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "PriorityClass",
    "ResourceQuota",
    "Service",
    "ServiceAccount",
    "StatefulSet",
}
CRDS = {
    "RayService": "ray.io_rayservices",
    "RayCluster": "ray.io_rayclusters",
    "PodMonitor": "monitoring.coreos.com_podmonitors",
    "ServiceMonitor": "monitoring.coreos.com_servicemonitors",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules",
}
FOLDER = ROOT.parent / "shared" / "crds"

# Of the Gateway API no schema is at hand: the fields of version 1 that are used here, each under its parent's name.
GATEWAY_API = {
    "Gateway": {
        "spec": {"gatewayClassName", "listeners"},
        "listeners": {"name", "hostname", "port", "protocol", "tls", "allowedRoutes"},
        "tls": {"mode", "certificateRefs"},
        "certificateRefs": {"name"},
        "allowedRoutes": {"namespaces"},
        "namespaces": {"from"},
    },
    "HTTPRoute": {
        "spec": {"parentRefs", "hostnames", "rules"},
        "parentRefs": {"name", "sectionName"},
        "rules": {"matches", "filters", "timeouts", "backendRefs"},
        "matches": {"path"},
        "path": {"type", "value"},
        "filters": {"type", "requestRedirect"},
        "requestRedirect": {"scheme", "statusCode"},
        "timeouts": {"request"},
        "backendRefs": {"name", "port"},
    },
}


def check_core(item: Object) -> None:
    """Validate an object of Kubernetes itself in every version that is named. Raises ValidationError."""
    library = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for version in KUBERNETES:
        library.validate(item, version, strict=True)


@functools.cache
def crd(kind: str) -> Callable[[Object], None]:
    """Return what validates an object of an operator. Skips the test where its schema is not there."""
    from jsonschema import Draft7Validator

    path = FOLDER / f"{CRDS[kind]}.yaml.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {FOLDER}: the fields of {kind} are not checked")
    definition = yaml.load(gzip.decompress(path.read_bytes()), FastLoader)
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1"]
    validator = Draft7Validator(closed(schema))

    def check(item: Object) -> None:
        faults = [f"{'.'.join(map(str, fault.path))}: {fault.message}" for fault in validator.iter_errors(item)]
        assert faults == []

    return check


def closed(schema: Any, name: str = "") -> Any:
    """Forbid what a schema does not list, as the API server drops it; metadata is Kubernetes' own."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value, key) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {key: closed(value, key) for key, value in schema["properties"].items()}
        if name != "metadata" and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    return made


def check_gateway_api(item: Object) -> None:
    known = GATEWAY_API[item["kind"]]

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            assert set(value) <= known[name], (item["kind"], name)
            for key, below in value.items():
                walk(key, below)
        for below in value if isinstance(value, list) else ():
            walk(name, below)

    walk("spec", item["spec"])


def check_all(manifests: Manifests) -> None:
    """Validate every object, and the pods and the cluster that KubeRay makes of a RayService."""
    for item in manifests.objects:
        if item["kind"] in CORE:
            check_core(item)
        elif item["kind"] in GATEWAY_API:
            check_gateway_api(item)
        else:
            crd(item["kind"])(item)
    for name, template in manifests.templates.items():
        check_core({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name, **template["metadata"]}})
    metadata = {"name": "warmkv", "namespace": "warmkv"}
    crd("RayCluster")(
        {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": manifests.cluster}
    )
    for item in manifests.objects:
        assert item["kind"] in ("Namespace", "PriorityClass") or item["metadata"]["namespace"] == "warmkv", item["kind"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_are_valid(name: str) -> None:
    check_all(overlay(name))


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_goes_with_the_base_alone(component: str, tmp_path: Path) -> None:
    check_all(combined(tmp_path, [component]))


def combinations() -> Sequence[tuple[str, ...]]:
    """Return those that the docs name: `base` + `gpu` + ..."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    return [tuple(re.findall(r"`([\w-]+)`", found)) for found in re.findall(r"`base`((?:\s+\+\s+`[\w-]+`)+)", text)]


@pytest.mark.parametrize("components", combinations(), ids="+".join)
def test_combinations_that_the_docs_name_are_valid(components: tuple[str, ...], tmp_path: Path) -> None:
    check_all(combined(tmp_path, components))


def test_the_docs_name_every_component() -> None:
    named = {component for combination in combinations() for component in combination}
    assert named == set(COMPONENTS)


def test_the_docs_scale_a_running_cluster_by_fields_that_it_has() -> None:
    """Check the commands of "Scale" against the status of a RayService, and the group of a RayCluster."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    commands = text.partition("\n## Scale\n")[2].partition("\n## ")[0]
    (status,) = re.findall(r"jsonpath='\{\.status\.([\w.]+)\}'", commands)
    service = copy.deepcopy(overlay("single-gpu").service)
    outer, inner = status.split(".")
    crd("RayService")({**service, "status": {outer: {inner: "warmkv-abcde"}}})
    (patch,) = re.findall(r"-p='(\[.*?\])'", commands, re.DOTALL)
    paths = {change["path"] for change in json.loads(patch)}
    assert paths == {f"/spec/workerGroupSpecs/0/{key}" for key in ("minReplicas", "replicas", "maxReplicas")}
    assert paths <= {f"/spec/workerGroupSpecs/0/{key}" for key in overlay("single-gpu").workers[0]}


def test_a_field_that_is_not_known_is_refused() -> None:
    manifests = overlay("production").copy()
    pod = manifests.workers[0]["template"]
    pod["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        check_core({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "pod"}})
    with pytest.raises(AssertionError, match="readynessProbe"):
        crd("RayService")(manifests.service)
    del pod["spec"]["containers"][0]["readynessProbe"]
    manifests.cluster["gcsFaultTolerance"] = {}
    with pytest.raises(AssertionError, match="gcsFaultTolerance"):
        crd("RayService")(manifests.service)
    monitor = manifests.kind("PodMonitor")[0]
    monitor["spec"]["podMetricEndpoints"] = []
    with pytest.raises(AssertionError, match="podMetricEndpoints"):
        crd("PodMonitor")(monitor)
    route = manifests.named("HTTPRoute", "warmkv")
    route["spec"]["rules"][0]["timeout"] = {}
    with pytest.raises(AssertionError, match="rules"):
        check_gateway_api(route)
