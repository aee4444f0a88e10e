"""What production means: one function a rule, that yields what breaks it. `test_rules.py` breaks each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from tests.unit.k8s.manifests import Manifests, Object, amount
from tests.unit.k8s.network_rules import a_gateway_is_let_through, traffic_is_listed
from warmkv.platform.document import NOT_ON_THE_HEAD
from warmkv.platform.drain import CONNECTION_SECONDS, IDLE_SECONDS, seconds_to_drain
from warmkv.platform.tenants import SALT_ENV
from warmkv.policies.memory_plan import NODE_BYTES, PROCESS_BYTES

Rule = Callable[[Manifests], Iterator[str]]

WEIGHT_BYTES = {
    "tiny": 15e6,
    "Qwen/Qwen3-0.6B": 1.51e9,
    "Qwen/Qwen3-8B": 16.4e9,
    "Qwen/Qwen2.5-72B-Instruct": 145.4e9,
}
"""Of the models that the overlays serve, in the dtype of their files."""

LONGEST_PROMPT_BYTES = {"Qwen/Qwen3-8B": 40_960 * 147_456}
"""KV of the longest prompt, in bfloat16: as much is on its way to lower tiers at most."""

LEAVING_SECONDS = 10
"""Time for Ray to end when all have left its node."""

LONG_RUNNING = ("startupProbe", "readinessProbe", "livenessProbe")


def runs_without_root(manifests: Manifests) -> Iterator[str]:
    for name, template in manifests.templates.items():
        context = template["spec"].get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{name} may run as root"
    for name, box in manifests.containers():
        if {"runAsUser", "runAsNonRoot", "privileged"} & set(box.get("securityContext", {})):
            yield f"{name} overrides its pod's user"


def has_a_seccomp_profile(manifests: Manifests) -> Iterator[str]:
    for name, template in manifests.templates.items():
        if template["spec"].get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name} has no seccomp profile"


def has_no_privileges(manifests: Manifests) -> Iterator[str]:
    for name, box in manifests.containers():
        context = box.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name} may gain privileges"
        if context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name} keeps capabilities"


def writes_where_it_is_named_only(manifests: Manifests) -> Iterator[str]:
    """Check that the root is read-only, and what programs write to lies on a volume of bounded size."""
    for name, box in manifests.containers():
        if box.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{name} may write anywhere"
        written = {m["mountPath"] for m in box.get("volumeMounts", ()) if not m.get("readOnly")}
        needed = {entry["value"] for entry in box.get("env", ()) if entry["name"] in ("HOME", "HF_HOME")}
        needed |= {"/tmp", "/dev/shm"} if box.get("name", "").startswith("ray-") else set()
        for path in needed:
            if not any(str(parent) in written for parent in (PurePosixPath(path), *PurePosixPath(path).parents)):
                yield f"{name} cannot write to {path}"
    for name, template in manifests.templates.items():
        for volume in template["spec"].get("volumes", ()):
            if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
                yield f"{name}: the volume {volume['name']} may fill the node"


def keeps_to_its_account(manifests: Manifests) -> Iterator[str]:
    """Check that each pod has an account of its own, and its token only where it calls the API server."""
    accounts = {account["metadata"]["name"]: account for account in manifests.kind("ServiceAccount")}
    for name, template in manifests.templates.items():
        spec = template["spec"]
        if spec.get("serviceAccountName") not in accounts:
            yield f"{name} runs under an account that is not here"
        scales = name == "head" and manifests.cluster.get("enableInTreeAutoscaling", False)
        if spec.get("automountServiceAccountToken") is not scales:
            yield f"{name} has {'no' if scales else 'a'} token of the API server"
    for name, account in accounts.items():
        if account.get("automountServiceAccountToken") is not False:
            yield f"the account {name} gives its token to every pod"


def is_bounded(manifests: Manifests) -> Iterator[str]:
    for name, box in manifests.containers():
        requests, limits = (box.get("resources", {}).get(bound, {}) for bound in ("requests", "limits"))
        if not {"cpu", "memory"} <= requests.keys() & limits.keys():
            yield f"{name} has no requests or limits"
        elif requests["memory"] != limits["memory"]:
            yield f"{name} may be evicted for memory that it was promised: Ray sizes itself by the limit"


def memory_holds_the_plan(manifests: Manifests) -> Iterator[str]:
    """Check the host memory of a worker: Ray, a gateway, the object store, and a replica by the engine's estimates.

    On a GPU weights pass through it, once; what is kept beside them comes later. On a CPU they stay.
    """
    config = manifests.config
    cache = config.prefix_cache
    weights = WEIGHT_BYTES[config.model.path]
    kept = int(cache.host.memory_bytes) + (LONGEST_PROMPT_BYTES[config.model.path] if cache.host.memory_bytes else 0)
    kept += int(config.engine.parked_bytes) if config.engine.preempt_seconds is not None else 0
    for group in manifests.workers:
        for box in group["template"]["spec"]["containers"]:
            limits = box["resources"]["limits"]
            store = float(group["rayStartParams"].get("object-store-memory", 0.3 * amount(limits["memory"])))
            shared = [
                v for v in group["template"]["spec"]["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"
            ]
            if store > sum(amount(v["emptyDir"]["sizeLimit"]) for v in shared):
                yield f"{group['groupName']}: /dev/shm is smaller than Ray's object store"
            on_gpu = "nvidia.com/gpu" in limits
            needed = NODE_BYTES + PROCESS_BYTES + store + (max(weights, kept) if on_gpu else weights + kept)
            if needed > amount(limits["memory"]):
                yield f"{group['groupName']} needs {needed / 2**30:.1f} GiB, its limit is {limits['memory']}"


def disk_holds_the_tier(manifests: Manifests) -> Iterator[str]:
    disk = manifests.config.prefix_cache.disk
    for group in manifests.workers:
        spec = group["template"]["spec"]
        mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
        volumes = {v["name"]: v for v in spec["volumes"]}
        if disk.path is None:
            if any("ephemeral" in volume for volume in volumes.values()):
                yield f"{group['groupName']} has a disk that prefix_cache.disk does not use"
        elif str(disk.path) not in mounts:
            yield f"{group['groupName']} has no volume at {disk.path} (prefix_cache.disk.path)"
        else:
            claim = volumes[mounts[str(disk.path)]]["ephemeral"]["volumeClaimTemplate"]["spec"]
            if amount(claim["resources"]["requests"]["storage"]) <= int(disk.memory_bytes):
                yield f"{group['groupName']}: the volume is smaller than prefix_cache.disk.memory_bytes"


def is_probed(manifests: Manifests) -> Iterator[str]:
    for name, box in manifests.containers(init=False):
        ports = {port["name"] for port in box["ports"]}
        for probe in LONG_RUNNING:
            if not box.get(probe, {}).get("failureThreshold"):
                yield f"{name} has no {probe}"
            elif "httpGet" in box[probe] and box[probe]["httpGet"]["port"] not in ports:
                yield f"{name}: {probe} asks a port that is not there"


def is_ready_while_it_serves(manifests: Manifests) -> Iterator[str]:
    """Check that a worker pod is in the service while its way to a replica is open; the head does not wait for what it
    starts.
    """
    config = manifests.config
    prefix = config.gateway.route_prefix.rstrip("/")
    ready = [(str(config.gateway.port), path) for path in ("/-/healthz", f"{prefix}/readyz")]
    for name, group in manifests.groups.items():
        box = group["template"]["spec"]["containers"][0]
        command = " ".join(box.get("readinessProbe", {}).get("exec", {}).get("command", ()))
        if re.findall(r"http://localhost:(\d+)(/\S+)", command) != ([] if name == "head" else ready):
            yield f"{name} is ready at the wrong time"
        if name != "head" and box["readinessProbe"].get("periodSeconds", 10) > 1:
            yield f"{name} may be in the service and not known as ready for seconds after an upgrade"
    if manifests.service["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "the head is in the service"
    ((label, without),) = NOT_ON_THE_HEAD.items()
    if manifests.cluster["headGroupSpec"].get("labels", {}).get(label) != without.removeprefix("!"):
        yield "gateways may run on the head, which is not in the service"


def ports_are_those_of_the_settings(manifests: Manifests) -> Iterator[str]:
    gateway = manifests.config.gateway
    if gateway.host != "0.0.0.0":
        yield "the pod's address is not served"
    (port,) = manifests.service["spec"]["serveService"]["spec"]["ports"]
    if port != {"name": "serve", "port": gateway.port, "targetPort": "serve"}:
        yield "the service for clients has another port"
    for name, group in manifests.groups.items():
        ports = {p["name"]: p["containerPort"] for p in group["template"]["spec"]["containers"][0]["ports"]}
        if ports.get("serve") != gateway.port:
            yield f"{name} has another port"
    for route in manifests.kind("HTTPRoute"):
        for backend in (b for rule in route["spec"]["rules"] for b in rule.get("backendRefs", ())):
            if backend != {"name": manifests.service["spec"]["serveService"]["metadata"]["name"], "port": gateway.port}:
                yield f"the route {route['metadata']['name']} leads to {backend}"


def a_route_waits_for_the_end_of_an_answer(manifests: Manifests) -> Iterator[str]:
    for route in manifests.kind("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            seconds = rule.get("timeouts", {}).get("request", "0s").removesuffix("s")
            if "backendRefs" in rule and float(seconds) <= manifests.config.gateway.request_timeout_seconds:
                yield f"the route {route['metadata']['name']} ends answers that go on"


def evictions_leave_a_replica(manifests: Manifests) -> Iterator[str]:
    """Check that a budget for pods of a custom resource can only be a whole number that must stay."""
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in manifests.kind("PodDisruptionBudget")}
    stay = {name: spec.get("minAvailable") for name, spec in budgets.items()}
    for name, pods in stay.items():
        if type(pods) is not int or pods < 1:
            yield f"{name} lets all pods go"
            return
    least = sum(group["minReplicas"] for group in manifests.workers)
    if "warmkv-replicas" not in stay:
        yield "worker pods have no budget"
    elif 1 < least <= stay["warmkv-replicas"]:
        yield "no node with a worker pod can be drained"
    if ("warmkv-head" in stay) == ("gcsFaultToleranceOptions" in manifests.cluster):
        yield "the head may not go without its state, nor stay for ever with it"


def is_spread(manifests: Manifests) -> Iterator[str]:
    for group in manifests.workers:
        template = group["template"]
        spread = template["spec"].get("topologySpreadConstraints", [])
        if {one["topologyKey"] for one in spread} != {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}:
            yield f"{group['groupName']} may lie on one node or in one zone"
        for one in spread:
            if not one["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
                yield f"{group['groupName']} is spread from others' pods"


def drains_before_it_ends(manifests: Manifests) -> Iterator[str]:
    """Check that the hook comes before SIGTERM and there is time for all that the settings grant."""
    needed = seconds_to_drain(manifests.config) + LEAVING_SECONDS
    hook = ["warmkv", "k8s", "drain", "--config", "/etc/warmkv/config/warmkv.yaml"]
    for group in manifests.workers:
        spec = group["template"]["spec"]
        box = spec["containers"][0]
        if box.get("lifecycle") != {"preStop": {"exec": {"command": hook}}}:
            yield f"{group['groupName']} is not drained"
        if not any(mount["mountPath"] == "/etc/warmkv/config" for mount in box["volumeMounts"]):
            yield f"{group['groupName']} does not know the settings by which it is drained"
        grace = spec.get("terminationGracePeriodSeconds", 30)
        if grace < needed:
            yield f"{group['groupName']} is killed after {grace} s, while it may drain for {needed:g}"
    longest = CONNECTION_SECONDS + IDLE_SECONDS + manifests.config.gateway.request_timeout_seconds
    if manifests.service["spec"].get("rayClusterDeletionDelaySeconds", 60) < longest:
        yield "after an upgrade the old cluster goes before its streams have ended"


def ray_asks_for_a_token(manifests: Manifests) -> Iterator[str]:
    if manifests.cluster.get("authOptions") != {"mode": "token"}:
        yield "who reaches Ray's ports may run code"


def tenants_are_known(manifests: Manifests) -> Iterator[str]:
    """Check that every pod mounts the Secret as a folder: a gateway may run in any; a subPath is never updated."""
    gateway = manifests.config.gateway
    if gateway.allow_open or gateway.is_open or gateway.tenants_file is None:
        yield "everybody is a tenant"
        return
    for name, group in manifests.groups.items():
        spec = group["template"]["spec"]
        volumes = {v["name"]: v.get("secret", {}) for v in spec["volumes"]}
        mounts = [
            m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == str(gateway.tenants_file.parent)
        ]
        for mount in mounts:
            secret = volumes[mount["name"]]
            if secret.get("secretName") != "warmkv-tenants" or secret.get("optional") or "subPath" in mount:
                yield f"{name} has its tenants from elsewhere"
        if len(mounts) != 1:
            yield f"{name} has no tenants"


def secrets_are_referred_to(manifests: Manifests) -> Iterator[str]:
    if manifests.kind("Secret"):
        yield "a secret in the repository is no secret"
    for name, box in manifests.containers():
        for entry in box.get("env", ()):
            secret = re.search("SALT|TOKEN|AUTH|KEY|SECRET|PASSWORD", entry["name"])
            if secret and set(entry.get("valueFrom", {})) != {"secretKeyRef"}:
                yield f"{name}: {entry['name']} stands there for all to read"
    for name, group in manifests.groups.items():
        env = {entry["name"]: entry for entry in group["template"]["spec"]["containers"][0]["env"]}
        salt = env.get(SALT_ENV, {}).get("valueFrom", {}).get("secretKeyRef")
        if salt != {"name": "warmkv-salt", "key": "salt"}:
            yield f"{name} has no salt, or another one than the rest"
    options = manifests.cluster.get("gcsFaultToleranceOptions", {})
    if options and set(options.get("redisPassword", {}).get("valueFrom", {})) != {"secretKeyRef"}:
        yield "the password of Redis stands there for all to read"


def keeps_its_share(manifests: Manifests) -> Iterator[str]:
    """Check the quota for two clusters, as during an upgrade; a priority that exists."""
    classes = {one["metadata"]["name"] for one in manifests.kind("PriorityClass")}
    for name, group in manifests.groups.items():
        if group["template"]["spec"].get("priorityClassName") not in classes:
            yield f"{name} gives way to any pod"
    quotas = manifests.kind("ResourceQuota")
    if not quotas:
        yield "the namespace has no quota"
    if not manifests.kind("LimitRange"):
        yield "a pod that says nothing of itself is refused by the quota"
    for quota in quotas:
        hard = quota["spec"]["hard"]
        for resource, needed in _of_two_clusters(manifests).items():
            if needed > amount(hard.get(resource, 0)):
                yield f"the quota of {resource} is below the {needed:g} of two clusters"


def _of_two_clusters(manifests: Manifests) -> dict[str, float]:
    needed = {"pods": 0.0}
    for name, template in manifests.templates.items():
        group: Any = manifests.groups.get(name)
        pods = 1 if group is None else 2 * group.get("maxReplicas", 1)
        needed["pods"] += pods
        boxes: list[Object] = list(template["spec"]["containers"])
        if name == "head" and "autoscalerOptions" in manifests.cluster:
            boxes.append(manifests.cluster["autoscalerOptions"])
        for box in boxes:
            for bound, resource in (
                ("requests", "cpu"),
                ("limits", "cpu"),
                ("requests", "memory"),
                ("limits", "memory"),
                ("requests", "nvidia.com/gpu"),
            ):
                key = f"{bound}.{resource}"
                needed[key] = needed.get(key, 0.0) + pods * amount(box["resources"][bound].get(resource, 0))
    return needed


def versions_are_pinned(manifests: Manifests) -> Iterator[str]:
    for name, box in manifests.containers():
        if "image" not in box:  # the autoscaler has the head's
            continue
        tag = box["image"].rpartition("@sha256:")[2] if "@sha256:" in box["image"] else box["image"].rpartition(":")[2]
        if not re.fullmatch(r"\d+\.\d+\.\d+[\w.-]*|[0-9a-f]{64}", tag):
            yield f"{name}: {box['image']} may be another image tomorrow"
    model = manifests.config.model
    if model.path != "tiny" and not re.fullmatch("[0-9a-f]{40}", model.revision or ""):
        yield f"{model.path} may be another model tomorrow"


def workers_have_room(manifests: Manifests) -> Iterator[str]:
    """Check for as many replicas as there may be, each with its CPUs and GPUs; none on the head."""
    cluster = manifests.config.cluster
    cpus = gpus = 0.0
    for group in manifests.workers:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{group['groupName']}: replicas are not between their limits"
        most = group["maxReplicas" if manifests.cluster.get("enableInTreeAutoscaling") else "replicas"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus += most * amount(limits["cpu"])
        gpus += most * amount(limits.get("nvidia.com/gpu", 0))
    if cpus < cluster.most_replicas * cluster.cpus_per_replica:
        yield f"{cluster.most_replicas} replicas need more CPUs than {cpus:g}"
    if gpus < cluster.most_replicas * cluster.gpus_per_replica:
        yield f"{cluster.most_replicas} replicas need more GPUs than {gpus:g}"
    if (cluster.autoscaling is not None) != manifests.cluster.get("enableInTreeAutoscaling", False):
        yield "Serve and Ray do not scale together"
    if manifests.cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "replicas may run on the head"


def workers_get_the_processor(manifests: Manifests) -> Iterator[str]:
    """Check the variables: Ray starts workers at niceness 15 and Serve waits for hung replicas unless they are set."""
    wanted = {"RAY_worker_niceness": "0", "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
    for name, group in manifests.groups.items():
        env = {entry["name"]: entry.get("value") for entry in group["template"]["spec"]["containers"][0]["env"]}
        if not wanted.items() <= env.items():
            yield f"{name} leaves replicas the time that others leave"


def logs_are_bounded(manifests: Manifests) -> Iterator[str]:
    """Check that ten files that Ray rotates fit in /tmp together, and that Serve writes no line twice."""
    boxes = {name: group["template"]["spec"]["containers"][0] for name, group in manifests.groups.items()}
    if "autoscalerOptions" in manifests.cluster:
        boxes["autoscaler"] = manifests.cluster["autoscalerOptions"]
    for name, box in boxes.items():
        env = {entry["name"]: entry.get("value") for entry in box["env"]}
        volumes = manifests.groups.get(name, manifests.groups["head"])["template"]["spec"]["volumes"]
        (room,) = (amount(volume["emptyDir"]["sizeLimit"]) for volume in volumes if volume["name"] == "tmp")
        most, old = (env.get(f"RAY_ROTATION_{what}") for what in ("MAX_BYTES", "BACKUP_COUNT"))
        if most is None or old is None or 10 * int(most) * (1 + int(old)) > room:
            yield f"{name} is evicted when its logs have filled /tmp"
        if name != "autoscaler" and env.get("RAY_SERVE_LOG_TO_STDERR") != "0":
            yield f"{name} writes Serve's lines twice"


def upgrades_step_by_step_only_with_what_it_needs(manifests: Manifests) -> Iterator[str]:
    strategy = manifests.service["spec"].get("upgradeStrategy", {})
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    if manifests.cluster.get("enableInTreeAutoscaling") is not True:
        yield "KubeRay refuses an incremental upgrade without Ray's autoscaler"
    if manifests.kind("Gateway"):
        yield "there is another Gateway than KubeRay's, which knows nothing of the weights"
    if any(group["minReplicas"] for group in manifests.workers):
        yield "both clusters keep pods that have nothing to do"
    options = strategy.get("clusterUpgradeOptions", {})
    if not options.get("gatewayClassName") or not options.get("intervalSeconds"):
        yield "KubeRay cannot make its Gateway"
    if options.get("stepSizePercent", 0) > options.get("maxSurgePercent", 100):
        yield "traffic moves faster than replicas"


EVERYWHERE: tuple[Rule, ...] = (
    runs_without_root,
    has_a_seccomp_profile,
    has_no_privileges,
    writes_where_it_is_named_only,
    keeps_to_its_account,
    is_bounded,
    memory_holds_the_plan,
    disk_holds_the_tier,
    is_probed,
    is_ready_while_it_serves,
    ports_are_those_of_the_settings,
    a_route_waits_for_the_end_of_an_answer,
    evictions_leave_a_replica,
    is_spread,
    drains_before_it_ends,
    ray_asks_for_a_token,
    secrets_are_referred_to,
    versions_are_pinned,
    workers_have_room,
    workers_get_the_processor,
    logs_are_bounded,
    upgrades_step_by_step_only_with_what_it_needs,
)
FOR_TENANTS: tuple[Rule, ...] = (tenants_are_known,)
IN_PRODUCTION: tuple[Rule, ...] = (keeps_its_share, traffic_is_listed, a_gateway_is_let_through)
RULES = {
    "demo": EVERYWHERE,
    "single-gpu": EVERYWHERE + FOR_TENANTS,
    "vllm": EVERYWHERE + FOR_TENANTS,
    "production": EVERYWHERE + FOR_TENANTS + IN_PRODUCTION,
}
