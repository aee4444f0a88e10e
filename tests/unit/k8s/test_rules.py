"""The overlays keep the rules of production, and every rule sees what it is there for taken away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.k8s import network_rules, rules
from tests.unit.k8s.manifests import OVERLAYS, Manifests, combined, overlay
from tests.unit.k8s.rules import Rule

GONE = object()


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name in OVERLAYS for rule in rules.RULES[name]])
def test_overlays_keep_the_rules(name: str, rule: Rule) -> None:
    assert list(rule(overlay(name))) == []


def at(path: str, value: Any = GONE) -> Callable[[Any], None]:
    """Set what lies at a path of keys and numbers, or take it away."""

    def change(tree: Any) -> None:
        *above, last = (int(part) if part.isdigit() else part for part in path.split())
        for part in above:
            tree = tree[part]
        if value is GONE:
            del tree[last]
        else:
            tree[last] = value

    return change


def worker(path: str, value: Any = GONE) -> Callable[[Manifests], None]:
    return lambda manifests: at(path, value)(manifests.workers[-1]["template"]["spec"])


def head(path: str, value: Any = GONE) -> Callable[[Manifests], None]:
    return lambda manifests: at(path, value)(manifests.cluster["headGroupSpec"]["template"]["spec"])


def cluster(path: str, value: Any = GONE) -> Callable[[Manifests], None]:
    return lambda manifests: at(path, value)(manifests.cluster)


def service(path: str, value: Any = GONE) -> Callable[[Manifests], None]:
    return lambda manifests: at(path, value)(manifests.service["spec"])


def one(kind: str, name: str, path: str, value: Any = GONE) -> Callable[[Manifests], None]:
    return lambda manifests: at(path, value)(manifests.named(kind, name))


def without(kind: str, name: str) -> Callable[[Manifests], None]:
    return lambda manifests: manifests.objects.remove(manifests.named(kind, name))


def setting(path: str, value: Any) -> Callable[[Manifests], None]:
    """Change a setting in the document."""

    def change(manifests: Manifests) -> None:
        document = manifests.document
        at(path, value)(document["applications"][0]["args"])
        manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(document)

    return change


def also(name: str, **fields: Any) -> Callable[[Manifests], None]:
    """Add an object."""
    return lambda manifests: manifests.objects.append({"kind": name, "metadata": {"name": "another"}, **fields})


BOX, ROUTE = "containers 0", ("HTTPRoute", "warmkv")
BREAKS: list[tuple[Rule, Callable[[Manifests], None]]] = [
    (rules.runs_without_root, worker("securityContext runAsNonRoot")),
    (rules.runs_without_root, head("securityContext runAsUser", 0)),
    (rules.runs_without_root, worker(f"{BOX} securityContext runAsUser", 0)),
    (rules.runs_without_root, one("StatefulSet", "warmkv-redis", "spec template spec securityContext")),
    (rules.has_a_seccomp_profile, worker("securityContext seccompProfile")),
    (rules.has_a_seccomp_profile, head("securityContext seccompProfile type", "Unconfined")),
    (rules.has_no_privileges, worker(f"{BOX} securityContext capabilities")),
    (rules.has_no_privileges, worker(f"{BOX} securityContext capabilities add", ["NET_ADMIN"])),
    (rules.has_no_privileges, head("initContainers 0 securityContext allowPrivilegeEscalation")),
    (rules.has_no_privileges, cluster("autoscalerOptions securityContext")),
    (rules.writes_where_it_is_named_only, worker(f"{BOX} securityContext readOnlyRootFilesystem")),
    (rules.writes_where_it_is_named_only, worker(f"{BOX} volumeMounts 2")),
    (rules.writes_where_it_is_named_only, cluster("autoscalerOptions volumeMounts")),
    (rules.writes_where_it_is_named_only, head("volumes 2 emptyDir sizeLimit")),
    (rules.keeps_to_its_account, worker("serviceAccountName", "default")),
    (rules.keeps_to_its_account, worker("automountServiceAccountToken", True)),
    (rules.keeps_to_its_account, head("automountServiceAccountToken", False)),
    (rules.keeps_to_its_account, one("ServiceAccount", "warmkv-replica", "automountServiceAccountToken")),
    (rules.is_bounded, worker(f"{BOX} resources limits memory")),
    (rules.is_bounded, worker(f"{BOX} resources requests memory", "1Gi")),
    (rules.is_bounded, cluster("autoscalerOptions resources")),
    (rules.memory_holds_the_plan, worker(f"{BOX} resources limits memory", "32Gi")),
    (rules.memory_holds_the_plan, setting("prefix_cache host memory_bytes", "80GiB")),
    (rules.memory_holds_the_plan, worker("volumes 3 emptyDir sizeLimit", "64Mi")),
    (rules.disk_holds_the_tier, setting("prefix_cache disk memory_bytes", "250GiB")),
    (rules.disk_holds_the_tier, setting("prefix_cache disk path", "/elsewhere")),
    (rules.disk_holds_the_tier, setting("prefix_cache disk", {})),
    (rules.is_probed, worker(f"{BOX} startupProbe")),
    (rules.is_probed, head(f"{BOX} livenessProbe httpGet port", "elsewhere")),
    (rules.is_probed, one("StatefulSet", "warmkv-redis", f"spec template spec {BOX} readinessProbe")),
    (rules.is_ready_while_it_serves, worker(f"{BOX} readinessProbe exec command", ["true"])),
    (rules.is_ready_while_it_serves, worker(f"{BOX} readinessProbe periodSeconds", 5)),
    (rules.is_ready_while_it_serves, service("excludeHeadPodFromServeSvc", False)),
    (rules.is_ready_while_it_serves, cluster("headGroupSpec labels")),
    (rules.ports_are_those_of_the_settings, setting("gateway port", 9000)),
    (rules.ports_are_those_of_the_settings, setting("gateway host", "127.0.0.1")),
    (rules.ports_are_those_of_the_settings, one(*ROUTE, "spec rules 0 backendRefs 0 port", 80)),
    (rules.a_route_waits_for_the_end_of_an_answer, one(*ROUTE, "spec rules 0 timeouts")),
    (rules.a_route_waits_for_the_end_of_an_answer, setting("gateway request_timeout_seconds", 1200)),
    (rules.evictions_leave_a_replica, without("PodDisruptionBudget", "warmkv-replicas")),
    (rules.evictions_leave_a_replica, one("PodDisruptionBudget", "warmkv-replicas", "spec minAvailable", 0)),
    (rules.evictions_leave_a_replica, one("PodDisruptionBudget", "warmkv-replicas", "spec minAvailable", "50%")),
    (rules.evictions_leave_a_replica, one("PodDisruptionBudget", "warmkv-replicas", "spec minAvailable", 4)),
    (rules.evictions_leave_a_replica, cluster("gcsFaultToleranceOptions")),
    (rules.is_spread, worker("topologySpreadConstraints")),
    (rules.is_spread, worker("topologySpreadConstraints 0 labelSelector matchLabels", {"app": "another"})),
    (rules.drains_before_it_ends, worker(f"{BOX} lifecycle")),
    (rules.drains_before_it_ends, worker("terminationGracePeriodSeconds")),
    (rules.drains_before_it_ends, setting("cluster drain_seconds", 600)),
    (rules.drains_before_it_ends, service("rayClusterDeletionDelaySeconds")),
    (rules.drains_before_it_ends, service("rayClusterDeletionDelaySeconds", 600)),
    (rules.ray_asks_for_a_token, cluster("authOptions")),
    (rules.tenants_are_known, setting("gateway allow_open", True)),
    (rules.tenants_are_known, worker(f"{BOX} volumeMounts 0")),
    (rules.tenants_are_known, head(f"{BOX} volumeMounts 0 subPath", "tenants.yaml")),
    (rules.tenants_are_known, worker("volumes 0 secret optional", True)),
    (rules.secrets_are_referred_to, also("Secret")),
    (rules.secrets_are_referred_to, worker(f"{BOX} env 0", {"name": "WARMKV_SALT", "value": "salt"})),
    (rules.secrets_are_referred_to, head(f"{BOX} env 0")),
    (rules.secrets_are_referred_to, cluster("gcsFaultToleranceOptions redisPassword", {"value": "password"})),
    (rules.keeps_its_share, worker("priorityClassName")),
    (rules.keeps_its_share, without("PriorityClass", "warmkv-serving")),
    (rules.keeps_its_share, without("ResourceQuota", "warmkv")),
    (rules.keeps_its_share, without("LimitRange", "warmkv")),
    (rules.keeps_its_share, lambda manifests: at("maxReplicas", 5)(manifests.workers[0])),
    (network_rules.traffic_is_listed, without("NetworkPolicy", "warmkv-deny")),
    (network_rules.traffic_is_listed, one("NetworkPolicy", "warmkv-clients", "spec ingress 0 from")),
    (network_rules.a_gateway_is_let_through, without("NetworkPolicy", "warmkv-gateway")),
    (network_rules.a_gateway_is_let_through, one("NetworkPolicy", "warmkv-gateway", "spec egress 0")),
    (network_rules.a_gateway_is_let_through, one("NetworkPolicy", "warmkv-gateway", "spec egress 1")),
    (network_rules.a_gateway_is_let_through, one("NetworkPolicy", "warmkv-clients", "spec ingress 0 from 1")),
    (network_rules.a_gateway_is_let_through, one("Gateway", "warmkv", "spec listeners 0 port", 8443)),
    (rules.versions_are_pinned, worker(f"{BOX} image", "warmkv:latest")),
    (rules.versions_are_pinned, head("initContainers 0 image", "warmkv")),
    (rules.versions_are_pinned, setting("model revision", "main")),
    (rules.workers_have_room, setting("cluster autoscaling max_replicas", 9)),
    (rules.workers_have_room, setting("cluster cpus_per_replica", 9)),
    (rules.workers_have_room, cluster("enableInTreeAutoscaling")),
    (rules.workers_have_room, cluster("headGroupSpec rayStartParams num-cpus")),
    (rules.workers_get_the_processor, worker(f"{BOX} env 5")),
    (rules.logs_are_bounded, worker(f"{BOX} env 6")),
    (rules.logs_are_bounded, head(f"{BOX} env 7 value", "536870912")),
    (rules.logs_are_bounded, worker(f"{BOX} env 8")),
    (rules.logs_are_bounded, cluster("autoscalerOptions env 1")),
    (
        rules.upgrades_step_by_step_only_with_what_it_needs,
        service("upgradeStrategy", {"type": "NewClusterWithIncrementalUpgrade"}),
    ),
]


@pytest.mark.parametrize(("rule", "broken"), BREAKS, ids=[f"{n}-{rule.__name__}" for n, (rule, _) in enumerate(BREAKS)])
def test_what_breaks_a_rule_is_seen(rule: Rule, broken: Callable[[Manifests], None]) -> None:
    manifests = overlay("production").copy()
    assert list(rule(manifests)) == []
    broken(manifests)
    assert list(rule(manifests))


def test_an_upgrade_step_by_step_takes_pods_as_it_needs_them(tmp_path: Path) -> None:
    manifests = combined(tmp_path, ["gpu", "autoscaling", "incremental-upgrade"])
    rule = rules.upgrades_step_by_step_only_with_what_it_needs
    assert list(rule(manifests)) == []
    manifests.workers[0]["minReplicas"] = 1
    assert list(rule(manifests)) == ["both clusters keep pods that have nothing to do"]


def test_every_rule_is_broken_once() -> None:
    assert {rule for rule, _ in BREAKS} == set(rules.RULES["production"])
