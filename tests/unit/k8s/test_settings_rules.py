"""`warmkv k8s check` finds settings that do not go with what is around them, in `production` made wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.unit.k8s.manifests import Manifests, overlay
from tests.unit.k8s.test_rules import GONE, at, head, one, service, setting, without, worker
from warmkv.platform.kubernetes import fields
from warmkv.platform.kubernetes.findings import RuleFinding
from warmkv.platform.kubernetes.rendered import read
from warmkv.platform.kubernetes.rules import check
from warmkv.platform.kubernetes.settings_rules import SETTINGS_RULES

Break = Callable[[Manifests], None]
NAMES = {rule.__name__ for rule in SETTINGS_RULES}
MAP, ROUTE, BUDGET = ("ConfigMap", "warmkv-config"), ("HTTPRoute", "warmkv"), ("PodDisruptionBudget", "warmkv-replicas")
BOX, PORT = "containers 0", "serveService spec ports 0"


def told(manifests: Manifests) -> list[RuleFinding]:
    found = check(read(json.dumps({"kind": "List", "items": manifests.objects}), fields.known()))
    return [finding for finding in found if finding.rule in NAMES]


def edited(path: str, value: Any = GONE) -> Break:
    """Change a setting in the settings file only."""

    def change(manifests: Manifests) -> None:
        data = manifests.named(*MAP)["data"]
        settings = yaml.safe_load(data["warmkv.yaml"])
        at(path, value)(settings)
        data["warmkv.yaml"] = yaml.safe_dump(settings)

    return change


def rendered(path: str, value: Any) -> Break:
    """Change a setting in both, as `warmkv k8s render` does."""
    return both(edited(path, value), setting(path, value))


def both(*changes: Break) -> Break:
    def change(manifests: Manifests) -> None:
        for one_change in changes:
            one_change(manifests)

    return change


def proxy_port(manifests: Manifests) -> None:
    document = manifests.document
    document["http_options"]["port"] = 8000
    manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(document)


def not_autoscaled(manifests: Manifests) -> None:
    at("enableInTreeAutoscaling")(manifests.cluster)
    for group in manifests.workers:
        group["replicas"] = 1


def prefixed(prefix: str) -> Break:
    """Set a prefix in the settings, in probes and in the route."""

    def change(manifests: Manifests) -> None:
        rendered("gateway route_prefix", prefix)(manifests)
        for group in manifests.workers:
            command = group["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
            command[2] = command[2].replace("/readyz", f"{prefix}/readyz")
        routed(f"{prefix}/v1")(manifests)

    return change


def routed(path: str, kind: str = "PathPrefix") -> Break:
    return one(*ROUTE, "spec rules 0 matches 0 path", {"type": kind, "value": path})


def of_redis(unavailable: int) -> Break:
    """Make the budget one of Redis' pods, which a StatefulSet counts."""
    chosen = {"maxUnavailable": unavailable, "selector": {"matchLabels": {"app.kubernetes.io/component": "redis"}}}
    return one(*BUDGET, "spec", chosen)


def add_log_volume(read_only: bool) -> Break:
    return add_volume("logs", "/var/log/warmkv", {"emptyDir": {}}, read_only)


def add_volume(name: str, path: str, kind: dict[str, Any], read_only: bool = False, init: bool = False) -> Break:
    """Mount a volume in all pods, and in their init containers."""

    def change(manifests: Manifests) -> None:
        for group in [manifests.cluster["headGroupSpec"], *manifests.workers]:
            spec = group["template"]["spec"]
            spec["volumes"].append({"name": name, **kind})
            for box in [*spec["containers"][:1], *(spec.get("initContainers", ()) if init else ())]:
                box["volumeMounts"].append({"name": name, "mountPath": path, "readOnly": read_only})

    return change


LOG = rendered("gateway access_log", "/var/log/warmkv/access.jsonl")
PACKS = rendered("prefix_cache packs", ["/packs/handbook"])
WORKER = "workerGroupSpecs[l40s].template.spec.containers[ray-worker]"
PROBE = "wget -q -O /dev/null http://localhost:9000/readyz"
READY = "http://localhost:8400/readyz"
BROKEN: dict[str, tuple[Break, str, str, str, str]] = {
    "another value": (
        edited("cluster drain_seconds", 300),
        "settings_file",
        "ConfigMap/warmkv-config: data.warmkv.yaml",
        "cluster.drain_seconds is 300, there 120",
        "k8s render",
    ),
    "one that is set": (
        edited("engine", {"max_slots": 7}),
        "settings_file",
        "ConfigMap/",
        "engine.max_slots is 7, there",
        "k8s render",
    ),
    "one that is gone": (
        edited("cluster autoscaling"),
        "settings_file",
        "ConfigMap/",
        "cluster.autoscaling is another",
        "k8s render",
    ),
    "only in the document": (
        setting("cluster gateways", 2),
        "settings_file",
        "ConfigMap/",
        "cluster.gateways is 4, there 2",
        "k8s render",
    ),
    "a misspelt one": (
        edited("cluster drain_second", 300),
        "settings_file",
        "ConfigMap/",
        "did you mean 'drain_seconds'",
        "mend it",
    ),
    "no settings": (one(*MAP, "data", {"warmkv.yaml": "- a"}), "settings_file", "ConfigMap/", "expected a mapping", ""),
    "no YAML": (one(*MAP, "data", {"warmkv.yaml": "a: ["}), "settings_file", "ConfigMap/", "not YAML", ""),
    "the port of the gateway": (
        rendered("gateway port", 9000),
        "ports",
        "http_options.port",
        "port 8400 (http_options.port)",
        "k8s render",
    ),
    "the proxy's": (proxy_port, "ports", "http_options.port", "gateways listen on 8400 (gateway.port)", "k8s render"),
    "a container's": (
        worker(f"{BOX} ports 1 containerPort", 9000),
        "ports",
        f"{WORKER}.ports[serve]",
        "the port is 9000",
        "8400",
    ),
    "a probe's": (
        worker(f"{BOX} readinessProbe exec command 2", PROBE),
        "ports",
        f"{WORKER}.readinessProbe",
        "port 9000",
        "8400",
    ),
    "a probe's by name": (
        worker(f"{BOX} livenessProbe httpGet", {"path": "/healthz", "port": "metrics"}),
        "ports",
        f"{WORKER}.livenessProbe",
        "it asks port 8080",
        "let it ask port 8400",
    ),
    "the service's": (
        service(f"{PORT} targetPort", 9000),
        "ports",
        "serveService.spec.ports[serve]",
        "leads to port 9000",
        "serve",
    ),
    "the service's by name": (
        service(f"{PORT} targetPort", "http"),
        "ports",
        "serveService.spec.ports[serve]",
        "is called http",
        "serve",
    ),
    "the route's": (
        one(*ROUTE, "spec rules 0 backendRefs 0 port", 80),
        "ports",
        "HTTPRoute/warmkv: spec.rules[0]",
        "port 80",
        "8400",
    ),
    "a probe without the prefix": (
        both(prefixed("/llm"), worker(f"{BOX} readinessProbe exec command 2", f"wget {READY}")),
        "paths",
        f"{WORKER}.readinessProbe",
        "it asks for /readyz, and gateways have /llm/readyz (gateway.route_prefix)",
        "let it ask for /llm/readyz",
    ),
    "a route without the prefix": (
        both(prefixed("/llm"), routed("/v1")),
        "paths",
        "HTTPRoute/warmkv: spec.rules[0].matches[0].path",
        "it leads /v1 to gateways, which have /llm/v1",
        "set it to /llm/v1",
    ),
    "a prefix of the route alone": (
        routed("/llm/v1"),
        "paths",
        "HTTPRoute/warmkv: spec.rules[0].matches[0].path",
        "it leads /llm/v1 to gateways, which have /v1",
        "set it to /v1",
    ),
    "a slow answer": (
        rendered("gateway request_timeout_seconds", 1200),
        "route_timeouts",
        "HTTPRoute/warmkv: spec.rules[0].timeouts.request",
        "after 660s, and an answer may take 1200",
        "1260s",
    ),
    "a fast route": (
        one(*ROUTE, "spec rules 0 timeouts", {"request": "1h", "backendRequest": "1m30s"}),
        "route_timeouts",
        "timeouts.backendRequest",
        "after 1m30s",
        "660s or more",
    ),
    "a log in the image": (LOG, "written_files", WORKER, "root file system is read-only", "mount a volume there"),
    "a log on a read-only volume": (
        both(LOG, add_log_volume(True)),
        "written_files",
        WORKER,
        "mounted there, logs, is read-only",
        "gateway.access_log",
    ),
    "a log among Secrets": (
        rendered("gateway access_log", "/etc/warmkv/tenants/access.jsonl"),
        "written_files",
        WORKER,
        "tenants, is read",
        "",
    ),
    "versions in the image": (
        rendered("control", {"path": "/var/lib/warmkv"}),
        "written_files",
        WORKER,
        "control.path is /var/lib/warmkv",
        "mount",
    ),
    "packs on an empty volume": (
        both(PACKS, add_volume("packs", "/packs", {"emptyDir": {}})),
        "read_files",
        WORKER,
        "prefix_cache.packs has /packs/handbook, and what is mounted there, packs, begins empty: no replica starts",
        "an init container",
    ),
    "an evaluation on an empty volume": (
        both(
            rendered("control whatif", {"quality": "/eval/results.parquet"}),
            add_volume("eval", "/eval", {"emptyDir": {}}),
        ),
        "read_files",
        "headGroupSpec",
        "control.whatif.quality has /eval/results.parquet",
        "mount a volume",
    ),
    "a subPath": (
        head(f"{BOX} volumeMounts 0 subPath", "tenants.yaml"),
        "tenants_mount",
        "containers[ray-head].volumeMounts[tenants]",
        "by subPath",
        "mount the whole volume at /etc/warmkv/tenants",
    ),
    "no hook": (worker(f"{BOX} lifecycle"), "drain_hook", f"{WORKER}.lifecycle", "may take 120 s", "warmkv k8s drain"),
    "a budget": (
        one(*BUDGET, "spec minAvailable", 4),
        "budgets",
        "spec.minAvailable",
        "4 pods must stay",
        "set it to 3",
    ),
    "a budget in percent": (
        one(*BUDGET, "spec minAvailable", "50%"),
        "budgets",
        "spec.minAvailable",
        "50% cannot be counted: a RayCluster does not tell",
        "whole number",
    ),
    "a budget of one group": (
        one(*BUDGET, "spec selector matchLabels", {"ray.io/group": "l40s"}),
        "budgets",
        "spec.min",
        "no more than 2",
        "1",
    ),
    "fewer pods": (
        not_autoscaled,
        "budgets",
        "spec.minAvailable",
        "3 pods must stay, and there may be no more than 2",
        "",
    ),
    "a budget of those that may go": (
        both(one(*BUDGET, "spec minAvailable"), one(*BUDGET, "spec maxUnavailable", 1)),
        "budgets",
        "spec.maxUnavailable",
        "every eviction is refused",
        "set minAvailable to a whole number",
    ),
    "no pod may go": (
        of_redis(0),
        "budgets",
        "spec.maxUnavailable",
        "none of its pods may ever be evicted",
        "minAvailable",
    ),
}


@pytest.mark.parametrize(("broken", "rule", "where", "what", "todo"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_told(broken: Break, rule: str, where: str, what: str, todo: str) -> None:
    manifests = overlay("production").copy()
    assert told(manifests) == []
    broken(manifests)
    found = told(manifests)
    assert found
    assert {(finding.rule, finding.level) for finding in found} == {(rule, "error")}
    assert any(where in one.where and what in one.what and todo in one.todo for one in found), found


FINE: dict[str, Break] = {
    "settings in both": rendered("cluster drain_seconds", 100),
    "the same in other words": edited("prefix_cache host memory_bytes", 32 << 30),
    "no settings file": without(*MAP),
    "a service port of its own": both(service(f"{PORT} port", 80), one(*ROUTE, "spec rules 0 backendRefs 0 port", 80)),
    "a prefix everywhere": prefixed("/llm"),
    "a prefix that Ray has, too": prefixed("/api"),
    "a route that rewrites": both(
        prefixed("/llm"),
        routed("/v1"),
        one(*ROUTE, "spec rules 0 filters", [{"type": "URLRewrite", "urlRewrite": {"path": {}}}]),
    ),
    "a route of everything": one(*ROUTE, "spec rules 0 matches 0", {}),
    "a route above the prefix": both(prefixed("/llm"), routed("/llm/")),
    "a route of one API": routed("/v1/messages", "Exact"),
    "a route by an expression": routed("/v[1]/.*", "RegularExpression"),
    "a route without a limit": one(*ROUTE, "spec rules 0 timeouts", {"request": "0s"}),
    "another service's route": both(
        one(*ROUTE, "spec rules 0 backendRefs 0 name", "other"), one(*ROUTE, "spec rules 0 timeouts request", "1s")
    ),
    "a log on a volume": both(LOG, add_log_volume(False)),
    "a log on standard output": rendered("gateway access_log", "/dev/stdout"),
    "packs on a volume that has them": both(
        PACKS, add_volume("packs", "/packs", {"persistentVolumeClaim": {"claimName": "packs"}})
    ),
    "packs that an init container fetches": both(PACKS, add_volume("packs", "/packs", {"emptyDir": {}}, init=True)),
    "a budget that is met": one(*BUDGET, "spec minAvailable", 2),
    "a budget of those that may go, of a StatefulSet": of_redis(1),
    "a budget by expressions": one(
        *BUDGET, "spec selector", {"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}
    ),
}


@pytest.mark.parametrize("change", FINE.values(), ids=FINE)
def test_what_is_fine_is_not_told(change: Break) -> None:
    manifests = overlay("production").copy()
    change(manifests)
    assert told(manifests) == []


def test_what_only_the_image_can_bring_is_a_note() -> None:
    """Packs concern the pods in which their replicas can run, an evaluation all."""
    manifests = overlay("production").copy()
    rendered("cluster groups", {"small": {"prefix_cache": {"packs": ["/packs/handbook"]}}})(manifests)
    found = told(manifests)
    assert [(finding.rule, finding.level) for finding in found] == [("read_files", "note")] * 2
    assert all("workerGroupSpecs" in finding.where for finding in found)
    assert "cluster.groups.small.prefix_cache.packs has /packs/handbook, where nothing is mounted" in found[0].what
    manifests = overlay("production").copy()
    rendered("control whatif", {"quality": "/eval/results.parquet"})(manifests)
    assert [(finding.rule, finding.level) for finding in told(manifests)] == [("read_files", "note")] * 3


@pytest.mark.parametrize(
    ("change", "told_thrice", "what"),
    [
        (rendered("control", {}), False, "an upgrade's new cluster begins without them"),
        (rendered("control", {"path": "/tmp/control"}), True, "what is mounted there, tmp, goes with its pod"),
    ],
)
def test_a_live_configuration_that_an_upgrade_loses_is_a_note(change: Break, told_thrice: bool, what: str) -> None:
    manifests = overlay("production").copy()
    change(manifests)
    found = told(manifests)
    assert [(one.rule, one.level) for one in found] == [("kept_versions", "note")] * (3 if told_thrice else 1)
    assert what in found[0].what


def test_a_budget_for_a_single_pod_is_a_note() -> None:
    found = told(overlay("single-gpu"))
    assert [(finding.rule, finding.level) for finding in found] == [("budgets", "note")] * 2
    assert "keeps the only pod" in found[0].what


def test_every_rule_is_broken_once() -> None:
    """Leave out `kept_versions`: its notes have a test of their own."""
    assert {case[1] for case in BROKEN.values()} == NAMES - {"kept_versions"}


def test_the_settings_of_the_demo_are_compared() -> None:
    manifests = overlay("demo").copy()
    assert [finding for finding in told(manifests) if finding.level == "error"] == []
    edited("cluster replicas", 3)(manifests)
    (finding,) = (finding for finding in told(manifests) if finding.level == "error")
    assert "cluster.replicas is 3, there 2" in finding.what
