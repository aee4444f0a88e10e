"""Every rule: a good overlay broken in one place, and the sentence that tells."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.platform.kubernetes.good import Overlay
from warmkv.platform.kubernetes import fields, rules
from warmkv.platform.kubernetes.findings import RuleFinding
from warmkv.platform.kubernetes.rendered import RenderedManifests, read, render, with_model
from warmkv.platform.kubernetes.rules import RULES, check
from warmkv.platform.kubernetes.settings_rules import SETTINGS_RULES

ROOT = Path(__file__).parents[4]
KINDS = fields.known()


def rendered(overlay: Overlay) -> RenderedManifests:
    return with_model(read(overlay.text, KINDS))


def told(overlay: Overlay) -> list[RuleFinding]:
    return check(rendered(overlay))


def misspell(good: Overlay) -> None:
    good.box["readynessProbe"] = {"periodSeconds": 5}


def misspell_deep(good: Overlay) -> None:
    good.pod["volumes"][1]["emptyDir"]["sizeLimits"] = "1Gi"


def misspell_ray(good: Overlay) -> None:
    good.service["spec"]["serveConfig"] = "x"


def misspell_budget(good: Overlay) -> None:
    good.objects[3]["spec"]["maxUnavaliable"] = 1


def quoted_number(good: Overlay) -> None:
    good.pod["terminationGracePeriodSeconds"] = "60"


def no_list(good: Overlay) -> None:
    good.pod["containers"] = good.box


def bare_number(good: Overlay) -> None:
    good.worker["rayStartParams"]["num-cpus"] = 4


def unknown_kind(good: Overlay) -> None:
    good.objects.append({"apiVersion": "x/v1", "kind": "HTTPRoute", "metadata": {"name": "a"}, "spec": {"x": 1}})


def no_quantity(good: Overlay) -> None:
    good.head["resources"]["limits"]["memory"] = "4 gigabytes"


def no_document(good: Overlay) -> None:
    good.service["spec"]["serveConfigV2"] = " "


def wrong_document(good: Overlay) -> None:
    good.settings["cluster"]["replica"] = 2


def foreign_document(good: Overlay) -> None:
    good.document["applications"][0]["import_path"] = "other:app"


def no_service(good: Overlay) -> None:
    del good.objects[-2:]


def missing_config_map(good: Overlay) -> None:
    good.head["envFrom"][0]["configMapRef"]["name"] = "extras"


def missing_key(good: Overlay) -> None:
    good.box["env"][0]["valueFrom"]["secretKeyRef"]["key"] = "pepper"


def missing_secret(good: Overlay) -> None:
    del good.objects[0]


def missing_claim(good: Overlay) -> None:
    good.pod["volumes"].append({"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}})


def missing_account(good: Overlay) -> None:
    good.pod["serviceAccountName"] = "warmkv"


def nothing_selected(good: Overlay) -> None:
    good.objects[3]["spec"]["selector"]["matchLabels"]["part"] = "replicas"


def latest(good: Overlay) -> None:
    good.box["image"] = "registry.example.com:5000/warmkv:latest"


def no_tag(good: Overlay) -> None:
    good.box["image"] = "registry.example.com:5000/warmkv"


def vllm_without_it(good: Overlay) -> None:
    vllm(good, "registry.example.com:5000/warmkv:0.1.0-cuda")


def vllm(good: Overlay, image: str) -> None:
    good.settings["engine"] = {"kind": "vllm"}
    del good.settings["prefix_cache"]
    good.box["image"] = image


def no_gpu(good: Overlay) -> None:
    del good.limits["nvidia.com/gpu"]


def idle_gpu(good: Overlay) -> None:
    good.settings["cluster"]["gpus_per_replica"] = 0


def crossed_sizes(good: Overlay) -> None:
    good.worker["minReplicas"] = 3


def too_many(good: Overlay) -> None:
    good.settings["cluster"]["replicas"] = 3


def too_many_scaled(good: Overlay) -> None:
    good.settings["cluster"]["autoscaling"] = {"max_replicas": 4}
    good.service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = True
    good.worker["maxReplicas"] = 3


def too_few_cpus(good: Overlay) -> None:
    good.settings["cluster"]["cpus_per_replica"] = 6


def too_many_with_a_group(good: Overlay) -> None:
    """Two pods have room for each kind alone."""
    good.settings["cluster"] |= {"replicas": 1, "groups": {"small": {"cluster": {"replicas": 2}}}}


def a_group_of_large_replicas(good: Overlay) -> None:
    groups = {"large": {"cluster": {"cpus_per_replica": 8}}}
    good.settings["cluster"] |= {"replicas": 1, "groups": groups}


def group_without_gpu(good: Overlay) -> None:
    without(good, {"gpus": {"cluster": {"gpus_per_replica": 1}}})


def without(good: Overlay, groups: dict[str, Any]) -> None:
    """Take the GPUs away, and add groups of replicas."""
    del good.limits["nvidia.com/gpu"]
    good.settings["cluster"] = {"replicas": 2, "groups": groups}


def host_tier_too_large(good: Overlay) -> None:
    good.settings["prefix_cache"]["host"]["memory_bytes"] = "20GiB"


def object_store_by_default(good: Overlay) -> None:
    """Leave room for the base's object store, and not for Ray's own."""
    good.settings["prefix_cache"]["host"]["memory_bytes"] = "11GiB"
    del good.worker["rayStartParams"]["object-store-memory"]


def no_limit(good: Overlay) -> None:
    del good.limits["memory"]


def slots_beyond_the_gpu(good: Overlay) -> None:
    good.settings["engine"] = {"kv_bytes": "90GiB"}


def slots_beyond_the_pod(good: Overlay) -> None:
    good.settings["cluster"]["gpus_per_replica"] = 0
    del good.limits["nvidia.com/gpu"]
    good.settings["engine"] = {"kv_bytes": "20GiB"}


def unknown_model(good: Overlay) -> None:
    good.settings["model"]["path"] = "nobody/knows-it"


def disk_not_mounted(good: Overlay) -> None:
    good.box["volumeMounts"].pop()


def disk_too_small(good: Overlay) -> None:
    good.pod["volumes"][1]["emptyDir"]["sizeLimit"] = "4Gi"


def disk_of_a_group_not_mounted(good: Overlay) -> None:
    disk = {"path": "/zz", "memory_bytes": "8GiB"}
    groups = {"v": {"prefix_cache": {"disk": disk}}, "same": {"engine": {"max_slots": 4}}}
    good.settings["cluster"] |= {"replicas": 1, "groups": groups}
    good.worker["replicas"] = good.worker["maxReplicas"] = 4


def killed_early(good: Overlay) -> None:
    good.settings["cluster"]["drain_seconds"] = 54


def killed_while_others_start(good: Overlay) -> None:
    good.pod["terminationGracePeriodSeconds"] = 60


def killed_while_ray_ends(good: Overlay) -> None:
    """As docs/kubernetes.md says: 600, a third of it, 30 and 10."""
    good.settings["cluster"]["drain_seconds"] = 600
    good.pod["terminationGracePeriodSeconds"] = 839


def deleted_early(good: Overlay) -> None:
    good.service["spec"]["rayClusterDeletionDelaySeconds"] = 600


def deleted_during_long_answers(good: Overlay) -> None:
    good.settings["gateway"]["request_timeout_seconds"] = 900


def killed_by_default(good: Overlay) -> None:
    del good.pod["terminationGracePeriodSeconds"]


def no_tenants(good: Overlay) -> None:
    del good.settings["gateway"]["tenants_file"]


def everybody(good: Overlay) -> None:
    good.settings["gateway"] = {"host": "0.0.0.0", "allow_open": True}


def nobody(good: Overlay) -> None:
    del good.settings["gateway"]["host"]


def tenants_not_mounted(good: Overlay) -> None:
    good.box["volumeMounts"].pop(0)


def no_salt(good: Overlay) -> None:
    good.box["env"] = []


def plain_salt(good: Overlay) -> None:
    good.box["env"] = [{"name": "WARMKV_SALT", "value": "pepper"}]


POD = "RayService/warmkv: spec.rayClusterConfig.workerGroupSpecs[h100].template.spec"
BOX = f"{POD}.containers[ray-worker]"
HEAD = "RayService/warmkv: spec.rayClusterConfig.headGroupSpec.template.spec.containers[ray-head]"
GROUPS = "RayService/warmkv: spec.rayClusterConfig.workerGroupSpecs"

BROKEN: list[tuple[Callable[[Overlay], None], str, str, str, str]] = [
    (misspell, "unknown_fields", f"{BOX}.readynessProbe", "no such field", "write readinessProbe"),
    (misspell_deep, "unknown_fields", "emptyDir.sizeLimits", "no such field", "write sizeLimit"),
    (misspell_ray, "unknown_fields", "RayService/warmkv: spec.serveConfig", "no such field", "write serveConfigV2"),
    (misspell_budget, "unknown_fields", "PodDisruptionBudget/warmkv", "no such field", "write maxUnavailable"),
    (quoted_number, "wrong_types", f"{POD}.terminationGracePeriodSeconds", "'60' has the wrong type", "the quotes"),
    (no_list, "wrong_types", f"{POD}.containers", "wrong type", "write a list"),
    (bare_number, "wrong_types", "rayStartParams.num-cpus", "4 has the wrong type", 'write "4"'),
    (unknown_kind, "unknown_fields", "HTTPRoute", "were not checked", "--crds"),
    (no_quantity, "quantities", f"{HEAD}.resources.limits.memory", "'4 gigabytes' is no quantity", "16Gi"),
    (no_document, "serve_document", "RayService/warmkv: spec.serveConfigV2", "there is none", "k8s render"),
    (wrong_document, "serve_document", "serveConfigV2", "cluster.replica: unknown key; did you mean 'replicas'", ""),
    (foreign_document, "serve_document", "serveConfigV2", "import_path", ""),
    (no_service, "serve_document", "all objects", "no RayService", "overlay"),
    (missing_config_map, "references", f"{HEAD}.envFrom[0]", "there is no ConfigMap extras", "resources"),
    (missing_key, "references", f"{BOX}.env[WARMKV_SALT]", "Secret/warmkv-salt has no key pepper", "salt"),
    (
        missing_secret,
        "references",
        "env[WARMKV_SALT]",
        "Secret warmkv-salt must be in the cluster",
        "kubectl -n warmkv create secret generic warmkv-salt --from-literal=salt=",
    ),
    (missing_claim, "references", f"{POD}.volumes[weights]", "PersistentVolumeClaim weights", "kubectl -n warmkv get"),
    (missing_account, "references", f"{POD}.serviceAccountName", "there is no ServiceAccount warmkv", ""),
    (nothing_selected, "selectors", "PodDisruptionBudget/warmkv", "no pod: none has app=warmkv, part=replicas", ""),
    (latest, "images", f"{BOX}.image", "warmkv:latest is whatever is newest", "newTag"),
    (no_tag, "images", f"{BOX}.image", "whatever is newest", "newTag"),
    (vllm_without_it, "engine_images", f"{BOX}.image", "warmkv:0.1.0-cuda is one without", "--target vllm"),
    (no_gpu, "gpu_workers", GROUPS, "asks for 1 GPU (cluster.gpus_per_replica), and no worker group has one", "limit"),
    (idle_gpu, "gpu_workers", BOX, "replicas ask for none", "gpus_per_replica to 1"),
    (crossed_sizes, "group_sizes", f"{GROUPS}[h100]", "minReplicas, replicas and maxReplicas are 3, 2 and 2", ""),
    (too_many, "replicas_fit", GROUPS, "3 replicas are asked for (cluster.replicas 3, each", "raise replicas"),
    (too_many_scaled, "replicas_fit", GROUPS, "1 GPU), and the pods have room for 3 (", "raise maxReplicas"),
    (too_few_cpus, "replicas_fit", GROUPS, "room for 0 (head 0, h100 0)", "CPUs"),
    (
        too_many_with_a_group,
        "replicas_fit",
        GROUPS,
        "3 replicas are asked for (cluster.replicas 1, each with 1 CPU and 1 GPU; "
        "cluster.groups.small.cluster.replicas 2, each with 1 CPU and 1 GPU), and the pods have room for 2 "
        "(head 0, h100 2), none for 1 of cluster.groups.small.cluster.replicas",
        "raise replicas",
    ),
    (
        a_group_of_large_replicas,
        "replicas_fit",
        GROUPS,
        "room for 1 (head 0, h100 1), none for 1 of cluster.groups.large.cluster.replicas",
        "CPUs",
    ),
    (group_without_gpu, "gpu_workers", GROUPS, "1 GPU (cluster.groups.gpus.cluster.gpus_per_replica)", "set cluster.g"),
    (host_tier_too_large, "memory_fits", f"{BOX}.resources.limits.memory", "host tier 20.00 GiB", "raise it to 23Gi"),
    (object_store_by_default, "memory_fits", f"{BOX}.res", "needs 18.06 GiB", "to 19Gi or more, or set object-s"),
    (no_limit, "memory_fits", f"{BOX}.resources.limits.memory", "no limit", "16Gi"),
    (slots_beyond_the_gpu, "memory_fits", f"{POD}.nodeSelector", "does not fit its share of an H100-SXM", "lower"),
    (slots_beyond_the_pod, "memory_fits", f"{BOX}.resources.limits.memory", "does not fit", "raise it to"),
    (unknown_model, "memory_fits", "RayService/warmkv", "sizes of nobody/knows-it are not known", "--model"),
    (disk_not_mounted, "disk_tier", BOX, "nothing is mounted at prefix_cache.disk.path, /var/warmkv/blocks", "mount"),
    (disk_too_small, "disk_tier", f"{POD}.volumes[blocks]", "has 4.00 GiB, and the disk tier takes 8.00 GiB", "8Gi"),
    (disk_of_a_group_not_mounted, "disk_tier", BOX, "cluster.groups.v.prefix_cache.disk.path, /zz", "mount a volume"),
    (killed_early, "grace_periods", f"{POD}.termination", "killed after 90 s, and may take 112", "112"),
    (killed_while_others_start, "grace_periods", f"{POD}.termination", "60 s, and may take 80", "80"),
    (killed_while_ray_ends, "grace_periods", f"{POD}.termination", "839 s, and may take 840", "set it to 840 or more"),
    (deleted_early, "grace_periods", "spec.rayClusterDeletionDelay", "after 600 s, and cuts off what", "to 780"),
    (deleted_during_long_answers, "grace_periods", "spec.rayClusterDeletionDelay", "an answer may take 900", "to 1080"),
    (killed_by_default, "grace_periods", f"{POD}.termination", "killed after 30 s, and may take 80", "80"),
    (no_tenants, "tenants", "gateway", "no tenants are configured", "tenants_file"),
    (everybody, "tenants", "gateway.allow_open", "every key is accepted", "tenants_file"),
    (nobody, "tenants", "gateway.host", "reached from within the pod only", "0.0.0.0"),
    (tenants_not_mounted, "tenants", BOX, "nothing is mounted there", "mount the Secret"),
    (no_salt, "salt", f"{BOX}.env", "WARMKV_SALT is not set", "Secret"),
    (plain_salt, "salt", f"{BOX}.env[WARMKV_SALT]", "stands in the manifest", "secretKeyRef"),
]  # fmt: skip
NOTES = (unknown_kind, missing_secret, missing_claim, unknown_model, everybody)


def test_the_good_overlay_passes() -> None:
    assert told(Overlay()) == []


@pytest.mark.parametrize(
    ("break_it", "rule", "where", "what", "todo"), BROKEN, ids=[case[0].__name__ for case in BROKEN]
)
def test_what_is_broken_is_told(
    break_it: Callable[[Overlay], None], rule: str, where: str, what: str, todo: str
) -> None:
    overlay = Overlay()
    break_it(overlay)
    found = told(overlay)
    assert {finding.rule for finding in found} == {rule}, found
    first = found[0]
    assert where in first.where
    assert what in first.what
    assert todo in first.todo
    assert first.level == ("note" if break_it in NOTES else "error")


def test_every_rule_is_broken_once() -> None:
    """Those of `settings_rules.py` are in tests/unit/k8s."""
    assert {rule.__name__ for rule in RULES if rule not in SETTINGS_RULES} == {case[1] for case in BROKEN}


@pytest.mark.parametrize(
    "tag", ["0.1.0-vllm", "0.1.0-cuda-vllm", "0.1.0", "0.1.0-cudagraphs", "0.1.0@sha256:" + "0" * 64]
)
def test_other_images_may_have_vllm(tag: str) -> None:
    overlay = Overlay()
    vllm(overlay, f"team-cuda/warmkv:{tag}")
    assert told(overlay) == []


def test_what_takes_the_place_of_a_limit_is_read() -> None:
    """Ray's own parameters win over limits, requests stand in for them, and ports are no tags."""
    overlay = Overlay()
    overlay.worker["rayStartParams"] = {"num-cpus": "1", "num-gpus": "1"}
    overlay.box["resources"] = {"requests": {"cpu": "500m", "memory": "16Gi"}}
    assert told(overlay) == []
    overlay.settings["cluster"]["gpus_per_replica"] = 0.4
    overlay.settings["cluster"]["replicas"] = 4
    overlay.settings["cluster"]["cpus_per_replica"] = 0.5
    overlay.service["spec"]["serveConfigV2"] = ""
    assert [finding.rule for finding in told(overlay)] == []


def test_kinds_of_replicas_share_pods() -> None:
    """Replicas without GPUs leave those that there are to the others, and a GPU has room for two halves."""
    overlay = Overlay()
    overlay.settings["cluster"] |= {
        "cpus_per_replica": 2,
        "groups": {
            "halves": {"cluster": {"replicas": 2, "gpus_per_replica": 0.5, "cpus_per_replica": 0.5}},
            "cpu": {"cluster": {"replicas": 1, "gpus_per_replica": 0, "cpus_per_replica": 3}},
        },
        "replicas": 1,
    }
    assert told(overlay) == []
    overlay.settings["cluster"]["groups"]["cpu"]["cluster"]["replicas"] = 2
    overlay.service["spec"]["serveConfigV2"] = ""
    (finding,) = told(overlay)
    assert "none for 1 of cluster.groups.cpu.cluster.replicas" in finding.what


def test_a_replica_without_a_gpu_is_planned_in_its_pod() -> None:
    """With the sizes that the pod has for it: two replicas share the limit."""
    overlay = Overlay()
    del overlay.limits["nvidia.com/gpu"]
    overlay.settings["cluster"]["gpus_per_replica"] = 0
    assert told(overlay) == []
    overlay.settings["engine"] = {"kv_bytes": "8GiB"}
    overlay.service["spec"]["serveConfigV2"] = ""
    (finding,) = told(overlay)
    assert finding.rule == "memory_fits"


@pytest.mark.parametrize(
    "folder",
    sorted(
        file.parent for file in (ROOT / "k8s").glob("**/kustomization.yaml") if file.parent.parent.name == "overlays"
    ),
    ids=lambda folder: folder.name,
)
def test_shipped_overlays_have_no_error(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    found = check(with_model(read(render(folder), KINDS)))
    assert [finding for finding in found if finding.level == "error"] == []
    assert all(finding.todo for finding in found)


def test_rules_are_told_apart_by_name() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(getattr(rules, rule.__name__, rule) is rule for rule in RULES)
