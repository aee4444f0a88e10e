"""The document inside the rendered manifests is the code's own; selectors, versions and dashboards fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.k8s.manifests import K8S, OVERLAYS, ROOT, Manifests, overlay
from warmkv.cli import app
from warmkv.config import Config, ConfigError, load
from warmkv.platform import manifest
from warmkv.platform.document import serve_document


@pytest.fixture(scope="module", params=OVERLAYS)
def folder(request: pytest.FixtureRequest) -> Path:
    return K8S / "overlays" / str(request.param)


@pytest.fixture(scope="module")
def rendered(folder: Path) -> Manifests:
    return overlay(folder.name)


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return load(folder / "warmkv.yaml", environ={})


# --- the document -----------------------------------------------------------------------------------------------


def test_document_is_what_the_code_starts(rendered: Manifests, config: Config) -> None:
    assert rendered.document == serve_document(config)


def test_committed_patch_is_a_fresh_render(folder: Path) -> None:
    text = (folder / "serve-config.yaml").read_text()
    assert text == manifest.manifest(folder / "warmkv.yaml"), "run `make manifests`"


def test_another_model_changes_the_pods(tmp_path: Path) -> None:
    """Start a cluster that fetches it and tokenizes for it; other settings change the document alone."""
    settings = tmp_path / "warmkv.yaml"

    def cluster(text: str) -> object:
        settings.write_text(text)
        return yaml.safe_load(manifest.manifest(settings))["spec"]["rayClusterConfig"]

    plain = cluster("model: {path: team/model}")
    assert cluster("model: {path: team/model}\ncluster: {replicas: 3}") == plain
    assert plain != cluster("model: {path: team/model, revision: abc}") != cluster("model: {path: team/other}") != plain
    head = overlay("production").cluster["headGroupSpec"]["template"]["metadata"]
    config = overlay("production").config.model
    assert head["annotations"] == {manifest.MODEL: f"{config.path}@{config.revision}"}
    assert head["labels"]


def test_pods_have_the_file_that_the_document_was_written_from(rendered: Manifests, folder: Path) -> None:
    """A changed setting does not change the name of the ConfigMap, which would replace all pods."""
    (found,) = [one for one in rendered.kind("ConfigMap") if one["metadata"]["name"] == "warmkv-config"]
    assert found["data"] == {"warmkv.yaml": (folder / "warmkv.yaml").read_text()}
    for name, group in rendered.groups.items():
        volumes = [volume.get("configMap") for volume in group["template"]["spec"]["volumes"]]
        assert {"name": "warmkv-config"} in volumes, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models
def test_serve_accepts_the_document(rendered: Manifests) -> None:
    from ray.serve.schema import ServeDeploySchema

    document = rendered.document
    assert ServeDeploySchema.model_validate(document).applications[0].name == "warmkv"
    document["applications"][0]["import_path"] = "not a path"
    with pytest.raises(ValueError, match="import_path"):
        ServeDeploySchema.model_validate(document)


def test_demo_needs_no_gpu_and_no_download() -> None:
    config = load(K8S / "overlays/demo/warmkv.yaml", environ={})
    assert config.model.path == "tiny"
    assert config.cluster.gpus_per_replica == 0
    assert config.cluster.replicas == 2
    assert (config.gateway.is_open, config.gateway.allow_open) == (True, True)
    assert overlay("demo").kind("PodMonitor") == [], "a laptop's cluster has no Prometheus operator"


# --- what fits together -----------------------------------------------------------------------------------------


def test_ray_version_is_the_pinned_one(rendered: Manifests) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert rendered.cluster["rayVersion"] == pinned[1]
    assert all(
        isinstance(value, str) for group in rendered.groups.values() for value in group["rayStartParams"].values()
    )


def test_selectors_match_pods_and_ports(rendered: Manifests) -> None:
    """Each selects pods of one kind, but for what is meant for all of the Ray cluster or of the namespace."""
    templates = list(rendered.templates.values())
    selectors = [(one["kind"], one["spec"]["selector"], one["spec"]["ports"]) for one in rendered.kind("Service")]
    for kind, ports in (("PodDisruptionBudget", ""), ("PodMonitor", "podMetricsEndpoints")):
        selectors += [
            (kind, one["spec"]["selector"]["matchLabels"], one["spec"].get(ports, [])) for one in rendered.kind(kind)
        ]
    for policy in rendered.kind("NetworkPolicy"):
        named = [port for rule in policy["spec"].get("ingress", ()) for port in rule.get("ports", ())]
        labels = policy["spec"]["podSelector"].get("matchLabels", {})
        selectors.append(("NetworkPolicy", labels, [p for p in named if isinstance(p["port"], str)]))
    for name, labels, ports in selectors:
        matched = [t for t in templates if labels.items() <= t["metadata"]["labels"].items()]
        assert matched, (name, labels)
        known = {port["name"] for t in matched for box in t["spec"]["containers"] for port in box["ports"]}
        assert {port.get("targetPort", port["port"]) for port in ports} <= known, (name, labels)


def test_monitoring_has_the_generated_dashboards_and_alerts() -> None:
    rendered = overlay("production")
    (boards,) = [one for one in rendered.kind("ConfigMap") if one["metadata"]["name"] == "warmkv-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name, text in boards["data"].items():
        assert text == (ROOT / "dashboards" / name).read_text()
        assert json.loads(text)["uid"]
    assert set(boards["data"]) == {path.name for path in (ROOT / "dashboards").glob("*.json")}
    (rule,) = rendered.kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())
    ports = {one["port"] for monitor in rendered.kind("PodMonitor") for one in monitor["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics", "as-metrics", "dash-metrics"}


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


@pytest.mark.parametrize("path", ["/models/none", "./none", "a/b/c", "two words"])
def test_fetch_says_that_a_path_is_no_model(tmp_path: Path, path: str) -> None:
    settings = tmp_path / "warmkv.yaml"
    settings.write_text(f"model: {{path: {path}}}\n")
    refused = CliRunner().invoke(app, ["k8s", "fetch", "-c", str(settings)])
    assert refused.exit_code == 1
    assert f"cannot fetch {path}: it is neither a folder nor a hub name" in refused.stderr


def test_fetch_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub model is fetched in its revision; what has no safetensors is refused, and a folder stays where it is."""
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: object) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = tmp_path / "warmkv.yaml"
    settings.write_text("model: {path: team/model, revision: abc}\n")
    run = CliRunner().invoke
    refused = run(app, ["k8s", "fetch", "-c", str(settings)])
    assert refused.exit_code == 1
    assert "no *.safetensors in team/model" in refused.stderr
    (tmp_path / "model.safetensors").touch()
    assert str(tmp_path) in run(app, ["k8s", "fetch", "-c", str(settings)]).stdout
    settings.write_text(f"model: {{path: {tmp_path}}}\n")
    assert run(app, ["k8s", "fetch", "-c", str(settings)]).exit_code == 0
    assert asked == [("team/model", "abc")] * 2
