"""The rendered manifests: one document with the code, valid kinds, matching labels, bounded resources, no secrets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.polling import PATIENCE
from warmkv.cli import app
from warmkv.config import Config, ConfigError, load
from warmkv.platform import manifest
from warmkv.platform.document import serve_document
from warmkv.platform.tenants import SALT_ENV

ROOT = Path(__file__).parents[3]
FOLDERS = ("base", "overlays/demo")
KUBERNETES = "1.32"

# The fields of KubeRay 1.7 that are used here, level by level: a misspelt one would be dropped by the API server.
RAY_SERVICE = {"serveConfigV2", "rayClusterConfig", "excludeHeadPodFromServeSvc"}
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_GROUP = {"rayStartParams", "template"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return ROOT / "k8s" / str(request.param)


@pytest.fixture(scope="module")
def rendered(folder: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return load(folder / "warmkv.yaml", environ={})


def kind(rendered: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [resource for resource in rendered if resource["kind"] == name]


def ray_service(rendered: list[dict[str, Any]]) -> dict[str, Any]:
    (service,) = kind(rendered, "RayService")
    return service


def groups(rendered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Head and worker groups by name."""
    cluster = ray_service(rendered)["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}


def containers(rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [box for group in groups(rendered).values() for box in group["template"]["spec"]["containers"]]


# --- the document -----------------------------------------------------------------------------------------------


def test_document_is_what_the_code_starts(rendered: list[dict[str, Any]], config: Config) -> None:
    assert yaml.safe_load(ray_service(rendered)["spec"]["serveConfigV2"]) == serve_document(config)


def test_committed_patch_is_a_fresh_render(folder: Path) -> None:
    text = (folder / "serve-config.yaml").read_text()
    assert text == manifest.manifest(folder / "warmkv.yaml"), "run `make manifests`"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models
def test_serve_accepts_the_document(rendered: list[dict[str, Any]]) -> None:
    from ray.serve.schema import ServeDeploySchema

    document = yaml.safe_load(ray_service(rendered)["spec"]["serveConfigV2"])
    assert ServeDeploySchema.model_validate(document).applications[0].name == "warmkv"
    document["applications"][0]["import_path"] = "not a path"
    with pytest.raises(ValueError, match="import_path"):
        ServeDeploySchema.model_validate(document)


def test_workers_have_room_for_the_replicas(rendered: list[dict[str, Any]], config: Config) -> None:
    cpus = gpus = 0.0
    for name, group in groups(rendered).items():
        if name == "head":
            assert group["rayStartParams"]["num-cpus"] == "0"
            continue
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        for box in group["template"]["spec"]["containers"]:
            cpus += group["maxReplicas"] * float(box["resources"]["limits"]["cpu"])
            gpus += group["maxReplicas"] * float(box["resources"]["limits"].get("nvidia.com/gpu", 0))
        leaving = config.cluster.drain_seconds + config.cluster.handover_seconds
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > leaving
    assert cpus >= config.cluster.most_replicas * config.cluster.cpus_per_replica
    assert gpus >= config.cluster.most_replicas * config.cluster.gpus_per_replica


def test_demo_needs_no_gpu_and_no_download() -> None:
    config = load(ROOT / "k8s/overlays/demo/warmkv.yaml", environ={})
    assert config.model.path == "tiny"
    assert config.cluster.gpus_per_replica == 0
    assert config.cluster.replicas == 2


# --- the kinds --------------------------------------------------------------------------------------------------


def test_core_kinds_are_valid(rendered: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **group["template"]["metadata"]}}
        | {"spec": group["template"]["spec"]}
        for name, group in groups(rendered).items()
    ]
    core = [resource for resource in rendered if resource["kind"] in ("Namespace", "PodDisruptionBudget")]
    assert len(core) == 2
    for resource in core + pods:
        validate(resource, KUBERNETES, strict=True)
    pods[0]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        validate(pods[0], KUBERNETES, strict=True)


def test_ray_service_has_only_known_fields(rendered: list[dict[str, Any]]) -> None:
    service = ray_service(rendered)
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) <= RAY_SERVICE
    assert set(service["spec"]["rayClusterConfig"]) <= RAY_CLUSTER
    for name, group in groups(rendered).items():
        assert set(group) <= (HEAD_GROUP if name == "head" else WORKER_GROUP), name
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), name


def test_ray_version_is_the_pinned_one(rendered: list[dict[str, Any]]) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert ray_service(rendered)["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-" in (ROOT / "k8s/Dockerfile").read_text()


def test_everything_is_in_the_namespace(rendered: list[dict[str, Any]]) -> None:
    (namespace,) = kind(rendered, "Namespace")
    for resource in rendered:
        if resource is not namespace:
            assert resource["metadata"]["namespace"] == namespace["metadata"]["name"], resource["kind"]


def test_selectors_match_pods_and_ports(rendered: list[dict[str, Any]]) -> None:
    templates = [group["template"] for group in groups(rendered).values()]
    selectors = [
        (resource["kind"], resource["spec"]["selector"]["matchLabels"], resource["spec"].get("podMetricsEndpoints", []))
        for resource in kind(rendered, "PodDisruptionBudget") + kind(rendered, "PodMonitor")
    ]
    for template in templates:
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for name, labels, endpoints in selectors:
        matched = [t for t in templates if labels.items() <= t["metadata"]["labels"].items()]
        assert len(matched) == 1, name
        ports = {port["name"] for box in matched[0]["spec"]["containers"] for port in box["ports"]}
        assert {endpoint["port"] for endpoint in endpoints} <= ports, name


def test_base_is_monitored() -> None:
    resources = list(yaml.safe_load_all((ROOT / "k8s/base/podmonitor.yaml").read_text()))
    ports = {endpoint["port"] for monitor in resources for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics", "as-metrics", "dash-metrics"}


# --- pods -------------------------------------------------------------------------------------------------------


def test_every_container_has_requests_and_limits(rendered: list[dict[str, Any]]) -> None:
    for box in containers(rendered):
        resources = box["resources"]
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(resources[bound]), box["name"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], "Ray sizes itself by the limit"


def test_pods_run_without_root(rendered: list[dict[str, Any]]) -> None:
    for name, group in groups(rendered).items():
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["automountServiceAccountToken"] is False, name
        for box in spec["containers"]:
            assert box["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


def test_probes_and_ports(rendered: list[dict[str, Any]], config: Config) -> None:
    assert config.gateway.host == "0.0.0.0", "the pod's address would not be served"
    for box in containers(rendered):
        ports = {port["name"]: port["containerPort"] for port in box["ports"]}
        assert len(ports) == len(box["ports"])
        assert ports["serve"] == config.gateway.port
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert box[probe]["failureThreshold"], (box["name"], probe)
            if "httpGet" in box[probe]:
                assert box[probe]["httpGet"]["port"] in ports, (box["name"], probe)


def test_a_worker_is_ready_while_a_replica_takes_requests(rendered: list[dict[str, Any]], config: Config) -> None:
    """Through Serve's proxy of its pod, unless that one drains; the head must not wait for what it starts."""
    found = {name: group["template"]["spec"]["containers"][0] for name, group in groups(rendered).items()}
    for name, box in found.items():
        command = " ".join(box["readinessProbe"].get("exec", {}).get("command", ()))
        urls = re.findall(r"http://localhost:(\d+)(/\S+)", command)
        prefix = config.gateway.route_prefix.rstrip("/")
        ready = [(str(config.gateway.port), path) for path in ("/-/healthz", f"{prefix}/readyz")]
        assert urls == ([] if "head" in name else ready), name


def test_replicas_do_not_run_at_rays_niceness(rendered: list[dict[str, Any]]) -> None:
    for box in containers(rendered):
        assert {"name": "RAY_worker_niceness", "value": "0"} in box["env"], box["name"]


def test_salt_comes_from_a_secret(rendered: list[dict[str, Any]], config: Config) -> None:
    assert kind(rendered, "Secret") == [], "a secret in the repository is no secret"
    for box in containers(rendered):
        (salt,) = [entry for entry in box["env"] if entry["name"] == SALT_ENV]
        assert set(salt) == {"name", "valueFrom"}
        assert salt["valueFrom"]["secretKeyRef"] == {"name": "warmkv-salt", "key": "salt"}
        for entry in box["env"]:
            if re.search("SALT|TOKEN|KEY|SECRET|PASSWORD", entry["name"]):
                assert "value" not in entry, entry["name"]


def test_the_base_lets_in_whom_a_secret_lists_and_only_the_demo_is_open(
    rendered: list[dict[str, Any]], config: Config, folder: Path
) -> None:
    """The Secret is mounted as a folder in every pod: a gateway may run in any, and a subPath is never updated."""
    if folder.name == "demo":
        assert (config.gateway.is_open, config.gateway.allow_open) == (True, True)
        assert not any("volumes" in group["template"]["spec"] for group in groups(rendered).values())
        return
    assert config.gateway.allow_open is False
    path = config.gateway.tenants_file
    assert path is not None
    for group in groups(rendered).values():
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["secret"]["secretName"] == "warmkv-tenants"
        (box,) = group["template"]["spec"]["containers"]
        assert box["volumeMounts"] == [{"name": volume["name"], "mountPath": str(path.parent), "readOnly": True}]


def test_ray_asks_for_a_token(rendered: list[dict[str, Any]]) -> None:
    assert ray_service(rendered)["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


# --- rendering --------------------------------------------------------------------------------------------------


def test_render_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "warmkv.yaml"
    settings.write_text("cluster: {replicas: 3}\ngateway: {port: 9000}\n")
    monkeypatch.setenv("WARMKV_CLUSTER__REPLICAS", "7")
    target = tmp_path / "serve-config.yaml"
    assert manifest.render(settings, target) is True
    assert manifest.render(settings, target) is False
    patch = yaml.safe_load(target.read_text())
    document = yaml.safe_load(patch["spec"]["serveConfigV2"])
    assert document["applications"][0]["args"]["cluster"] == {"replicas": 3}, "the environment leaked in"
    assert document["http_options"]["port"] == 9000


def test_render_command(tmp_path: Path) -> None:
    settings = tmp_path / "warmkv.yaml"
    settings.write_text("cluster: {replicas: 3}\n")
    run = CliRunner().invoke
    assert run(app, ["k8s", "render", "-c", str(settings)]).exit_code == 0
    assert (tmp_path / "serve-config.yaml").exists()
    settings.write_text("gateway: {host: 0.0.0.0}\n")
    refused = run(app, ["k8s", "render", "-c", str(settings)])
    assert refused.exit_code == 2
    assert "gateway.allow_open" in refused.stderr
    settings.write_text("cluster: {replica: 3}\n")
    refused = run(app, ["k8s", "render", "-c", str(settings)])
    assert refused.exit_code == 2
    assert "replicas" in refused.stderr
    with pytest.raises(ConfigError):
        manifest.manifest(settings)
