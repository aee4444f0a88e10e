"""What can be wrong with rendered manifests: one function a rule, over the objects, in the list `RULES`.

A rule yields findings. A new one is a function here, its name in `RULES`, and a test that breaks a good overlay. Those
that hold settings against other objects are in `settings_rules.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from warmkv.config import ClusterConfig, Config, ConfigError, place_in
from warmkv.gpus import CATALOGUE, Gpu
from warmkv.platform.drain import CONNECTION_SECONDS, END_SECONDS, IDLE_SECONDS, seconds_after_upgrade, seconds_to_drain
from warmkv.platform.kubernetes import fields, memory, packing
from warmkv.platform.kubernetes.file_rules import disk_tier, whole_gib
from warmkv.platform.kubernetes.findings import Rule, RuleFinding, Told
from warmkv.platform.kubernetes.memory import GPU_PRODUCT, PRODUCTS
from warmkv.platform.kubernetes.references import Reference, keys_of, references_of
from warmkv.platform.kubernetes.rendered import (
    GPU,
    OBJECT_STORE,
    OBJECT_STORE_SHARE,
    Group,
    RenderedManifests,
    RenderedService,
    name_of,
    quantity,
)
from warmkv.platform.kubernetes.settings_rules import OPERATORS_LABELS, SETTINGS_RULES
from warmkv.platform.listening import check_listening, is_loopback
from warmkv.platform.tenants import SALT_ENV
from warmkv.policies.memory_plan import MemoryPlanError, amount

DEFAULT_GRACE = 30  # seconds, where a pod says nothing
DEFAULT_DELETION_DELAY = 60  # seconds, of KubeRay


def check(rendered: RenderedManifests) -> list[RuleFinding]:
    """Return what all rules find, errors first. The others must be able to read what they judge: types come before."""
    if mistaken := list(_found(wrong_types, rendered)):
        todo = "mend the types, and check again"
        rest = RuleFinding(wrong_types.__name__, "all objects", "nothing else was checked yet", todo, "note")
        return [*mistaken, rest]
    found = [finding for rule in RULES for finding in _found(rule, rendered)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _found(rule: Rule, rendered: RenderedManifests) -> Iterator[RuleFinding]:
    return (RuleFinding(rule.__name__, *told) for told in rule(rendered))


def _kinds(rendered: RenderedManifests) -> Iterator[tuple[RenderedService, Config]]:
    """Yield the configuration of each group of replicas (`cluster.groups`): each is judged as if it were alone."""
    for service, config in rendered.configured:
        for group in config.groups().values():
            yield service, group


# --- fields, and what the document says


def unknown_fields(rendered: RenderedManifests) -> Told:
    """Find fields that a kind does not have, and say which kinds no schema was given for."""
    for one in rendered.objects:
        for place, what, todo in fields.faults(one, rendered.fields.get(one["kind"])):
            if what == fields.UNKNOWN:
                yield f"{name_of(one)}: {place}", what, todo
    for kind in sorted({one["kind"] for one in rendered.objects} - set(rendered.fields)):
        todo = "give a folder with its CustomResourceDefinition: --crds FOLDER"
        yield kind, "its fields were not checked: no schema of it is known", todo, "note"


def wrong_types(rendered: RenderedManifests) -> Told:
    """Find values of another type than their field, as a number in quotes."""
    for one in rendered.objects:
        for place, what, todo in fields.faults(one, rendered.fields.get(one["kind"])):
            if what != fields.UNKNOWN:
                yield f"{name_of(one)}: {place}", what, todo


def quantities(rendered: RenderedManifests) -> Told:
    """Find amounts of resources that Kubernetes cannot read."""
    for pods in rendered.pods:
        for where, box in pods.containers():
            for bound, named in (box.get("resources") or {}).items():
                for resource, text in named.items() if isinstance(named, dict) else ():
                    if quantity(text) is None:
                        yield f"{where}.resources.{bound}.{resource}", f"{text!r} is no quantity", "write it as in 16Gi"


def serve_document(rendered: RenderedManifests) -> Told:
    """Find a RayService whose Serve document warmkv could not start from."""
    if not rendered.services:
        yield "all objects", "there is no RayService, so nothing would serve", "render an overlay, not a part of one"
    for service in rendered.services:
        try:
            _ = service.config
        except ConfigError as error:
            todo = "change warmkv.yaml beside the kustomization, then `warmkv k8s render -c warmkv.yaml`"
            for line in str(error).splitlines():
                yield f"{service.where}: spec.serveConfigV2", line, todo


# --- references


def references(rendered: RenderedManifests) -> Told:
    """Find Secrets, ConfigMaps and others that pods name and that nothing here brings."""
    seen = set()
    for pods in rendered.pods:
        for ref in references_of(pods):
            brought = rendered.find(ref.kind, ref.name)
            if ref.optional:
                continue
            if brought is not None:
                if ref.key and ref.key not in (keys := keys_of(brought)):
                    what = f"{ref.kind}/{ref.name} has no key {ref.key}"
                    yield ref.where, what, f"there are {', '.join(keys) or 'none'}"
            elif (ref.kind, ref.name) not in seen:
                seen.add((ref.kind, ref.name))
                yield _missing(ref, pods.namespace)


def _missing(ref: Reference, namespace: str) -> tuple[str, str, str, Literal["error", "note"]]:
    """Tell what is not among the objects. Secrets are made apart from manifests; so may a claim or a class be."""
    inside = f" -n {namespace}" if namespace else ""
    if ref.kind == "Secret":
        source = f"--from-literal={ref.key}=..." if ref.key else "--from-file=..."
        todo = f"if it is not there yet: kubectl{inside} create secret generic {ref.name} {source}"
        return ref.where, f"Secret {ref.name} must be in the cluster before the pods start", todo, "note"
    if ref.kind in ("PersistentVolumeClaim", "PriorityClass"):
        todo = f"if it is not there yet, add it; `kubectl{inside} get {ref.kind.lower()} {ref.name}` tells"
        return ref.where, f"{ref.kind} {ref.name} must be in the cluster, and is not among these objects", todo, "note"
    todo = "add it to the resources of the kustomization, or mend the name"
    return ref.where, f"there is no {ref.kind} {ref.name}", todo, "error"


def selectors(rendered: RenderedManifests) -> Told:
    """Find budgets, monitors, policies and services that select no pod."""
    for one in rendered.objects:
        spec = one.get("spec") or {}
        chosen = spec.get("podSelector") if one["kind"] == "NetworkPolicy" else spec.get("selector")
        if one["kind"] == "Service":
            labels: Mapping[str, Any] = chosen or {}
        elif one["kind"] in ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
            labels = (chosen or {}).get("matchLabels") or {}
        else:
            continue
        own = {key: value for key, value in labels.items() if not key.startswith(OPERATORS_LABELS)}
        if own and not any(own.items() <= pods.labels.items() for pods in rendered.pods):
            wanted = ", ".join(f"{key}={value}" for key, value in own.items())
            yield name_of(one), f"it selects no pod: none has {wanted}", "use the labels of the pods' template"


def images(rendered: RenderedManifests) -> Told:
    """Find images whose content may change from one start to the next."""
    for pods in rendered.pods:
        for where, box in pods.containers():
            image = str(box.get("image", ""))
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" in image or (tag and tag != "latest"):
                continue
            what = f"the image {image} is whatever is newest when a pod starts" if image else "no image is named"
            todo = "name a version or a digest under images: in the kustomization (newTag, digest)"
            yield f"{where}.image", what, todo


def engine_images(rendered: RenderedManifests) -> Told:
    """Find replicas in an image that is built without their engine, by the tags of the Dockerfile's targets."""
    for service, config in rendered.configured:
        for group in service.workers if (needed := config.image_target) else ():
            image = str(group.box.get("image", ""))
            target = re.search(r":[^/@]*-(cpu|cuda)(?![a-z0-9])", image)
            if target and needed not in target.string[target.start() :]:
                what = f"the engine needs {needed}, and the image {image} is one without it (--target {target[1]})"
                todo = (
                    f"build k8s/Dockerfile with --target {needed}, and name that tag under images: in the kustomization"
                )
                yield f"{group.where}.image", what, todo


# --- room


def gpu_workers(rendered: RenderedManifests) -> Told:
    """Find replicas that ask for GPUs where no worker group has any, and the reverse."""
    for service, config in rendered.configured:
        asked = {name: kind.cluster.gpus_per_replica for name, kind in config.groups().items()}
        with_gpu = [group for group in service.workers if group.gpus]
        for name, gpus in asked.items():
            if gpus and not with_gpu:
                setting = place_in(name, "cluster.gpus_per_replica")
                yield (
                    f"{service.where}: spec.rayClusterConfig.workerGroupSpecs",
                    f"a replica asks for {gpus:g} GPU ({setting}), and no worker group has one",
                    f"give a worker group a limit for {GPU}, or set {setting} to 0",
                )
        for group in with_gpu:
            if not any(asked.values()):
                what = f"the group has {group.gpus:g} GPU a pod, and replicas ask for none, so they would stay unused"
                yield group.where, what, "set cluster.gpus_per_replica to 1 in warmkv.yaml, and render again"


def group_sizes(rendered: RenderedManifests) -> Told:
    """Find worker groups whose numbers contradict each other."""
    for service in rendered.services:
        for group in service.workers:
            sizes = [group.spec.get(key) for key in ("minReplicas", "replicas", "maxReplicas")]
            known = [size for size in sizes if size is not None]
            if known != sorted(known):
                where = group.pods.where.removesuffix(".template.spec")
                what = "minReplicas, replicas and maxReplicas are {}, {} and {}".format(*sizes)
                yield where, what, "none may be less than the one before it"


def replicas_fit(rendered: RenderedManifests) -> Told:
    """Find more replicas, of all kinds together, than the pods hold."""
    for service, config in rendered.configured:
        has_gpus = any(group.gpus for group in service.groups)
        kinds = {
            name: kind for name, kind in config.groups().items() if has_gpus or not kind.cluster.gpus_per_replica
        }  # of the others gpu_workers tells
        packed = packing.pack(service, kinds)
        if not packed.left:
            continue
        asked = "; ".join(_asked(name, kind.cluster) for name, kind in kinds.items())
        rooms = ", ".join(f"{group.name} {packed.placed[group.name]}" for group in service.groups)
        lacking = " and ".join(
            f"{count} of {_number(name, kinds[name].cluster)}" for name, count in packed.left.items()
        )
        scales = any(group.autoscaled for group in service.groups)
        yield (
            f"{service.where}: spec.rayClusterConfig.workerGroupSpecs",
            f"{sum(kind.cluster.most_replicas for kind in kinds.values())} replicas are asked for ({asked}), and the "
            f"pods have room for {packed.placed.total()} ({rooms}), none for {lacking}",
            f"raise {'maxReplicas' if scales else 'replicas'} of a worker group, or the CPUs and GPUs of its pods",
        )


def _asked(name: str, cluster: ClusterConfig) -> str:
    gpus = f" and {cluster.gpus_per_replica:g} GPU" if cluster.gpus_per_replica else ""
    return f"{_number(name, cluster)} {cluster.most_replicas}, each with {cluster.cpus_per_replica:g} CPU{gpus}"


def _number(name: str, cluster: ClusterConfig) -> str:
    """Return the setting that says how many replicas of a kind there may be."""
    return place_in(name, "cluster.autoscaling.max_replicas" if cluster.autoscaling else "cluster.replicas")


def memory_fits(rendered: RenderedManifests) -> Told:
    """Find pods and GPUs without memory for the model, slots and tiers, by the replicas' own plan."""
    for service, config in _kinds(rendered):
        if rendered.model is None:
            todo = "give its config.json, or a folder that has it: --model FILE"
            yield service.where, f"memory was not checked: the sizes of {config.model.path} are not known", todo, "note"
            continue
        for group in service.groups:
            replicas, limit = group.replicas_on_a_pod(config), group.limit("memory")
            if not replicas or not group.most_pods:
                continue
            at = f"{group.where}.resources.limits.memory"
            if limit is None:
                if group.written("memory") is None:  # of what cannot be read `quantities` tells
                    yield at, "there is no limit, so a replica may take the node's memory", "set one, as in 16Gi"
            elif config.cluster.gpus_per_replica:
                store = group.object_store(limit)
                lines = memory.host_lines(config, rendered.model, replicas, store)
                if (needed := sum(line.bytes for line in lines)) > limit:
                    parts = ", ".join(f"{line.name} {amount(line.bytes)}" for line in lines)
                    what = f"the pod may take {amount(int(limit))} of host memory, and needs {amount(needed)}: {parts}"
                    yield at, what, _raised(group, needed - store)
            else:
                store = group.object_store(limit)
                planned = memory.plan_in_pod(config, rendered.model, int(limit), replicas, store)
                try:
                    planned.check()
                except MemoryPlanError as error:
                    todo = f"{_raised(group, planned.needed * replicas)}, or lower the sizes that are set"
                    yield at, str(error).splitlines()[0] + f" ({planned.summary})", todo
            yield from _on_gpu(group, config, rendered)


def _raised(group: Group, needed: float) -> str:
    """Say which limit of memory leaves so much beside Ray's object store."""
    todo = f"raise it to {whole_gib(group.limit_for(needed))}Gi or more"
    if OBJECT_STORE in (group.spec.get("rayStartParams") or {}):
        return todo
    return f"{todo}, or set {OBJECT_STORE} in rayStartParams: without it Ray takes {OBJECT_STORE_SHARE:.0%} of the pod"


def _on_gpu(group: Group, config: Config, rendered: RenderedManifests) -> Told:
    """Plan the memory of the GPU that the pods' node selector names, if it is in the catalogue."""
    product = (group.pods.spec.get("nodeSelector") or {}).get(GPU_PRODUCT)
    name = next((name for name, label in PRODUCTS.items() if label == product), None)
    if name is None or rendered.model is None or not config.cluster.gpus_per_replica:
        return
    planned = memory.plan_on_gpu(config, rendered.model, Gpu.model_validate(CATALOGUE[name] | {"name": name}))
    if planned.needed > planned.most:
        what = f"a replica does not fit its share of an {name}: {planned.summary}"
        todo = "choose a GPU with more memory, a smaller model, or lower engine.kv_bytes and prefix_cache.memory_bytes"
        yield f"{group.pods.where}.nodeSelector", what, todo


# --- ends and access


def grace_periods(rendered: RenderedManifests) -> Told:
    """Find worker pods that would be killed before their replicas have drained and handed their blocks over, and an
    old cluster that an upgrade deletes, head and all, before its answers have ended.
    """
    for service, config in rendered.configured:
        drain = config.cluster.drain_seconds
        delay = service.resource["spec"].get("rayClusterDeletionDelaySeconds", DEFAULT_DELETION_DELAY)
        for group in service.workers:
            grace = group.pods.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE)
            hook = (group.box.get("lifecycle") or {}).get("preStop")  # it waits for replacements to start elsewhere
            drained = seconds_to_drain(config) if hook else drain + config.cluster.handover_seconds
            needed = math.ceil(drained + END_SECONDS)
            if grace < needed:
                yield (
                    f"{group.pods.where}.terminationGracePeriodSeconds",
                    f"a pod is killed after {grace} s, and may take {needed}: cluster.drain_seconds {drain:g}, a "
                    f"third of it to hand blocks over{', 30 for others to start' if hook else ''}, {END_SECONDS:g} for "
                    "Ray to end",
                    f"set it to {needed} or more",
                )
        if delay < (needed := seconds_after_upgrade(config)):
            yield (
                f"{service.where}: spec.rayClusterDeletionDelaySeconds",
                f"an upgrade deletes the old cluster after {delay} s, and cuts off what it still answers: clients keep "
                f"connections for {CONNECTION_SECONDS + IDLE_SECONDS:g} s, and an answer may take "
                f"{config.gateway.request_timeout_seconds:g} (gateway.request_timeout_seconds)",
                f"set it to {needed} or more",
            )


def tenants(rendered: RenderedManifests) -> Told:
    """Find a service that lets nobody in, or everybody."""
    for service, config in rendered.configured:
        at, gateway = f"{service.where}: spec.serveConfigV2, gateway", config.gateway
        if is_loopback(gateway.host):
            yield f"{at}.host", f"{gateway.host} is reached from within the pod only", "set gateway.host to 0.0.0.0"
        try:
            check_listening(gateway)
        except ConfigError:
            todo = "list who may call in gateway.tenants_file (a Secret), or set gateway.allow_open for a trial"
            yield at, "no tenants are configured, and it would not start: every key would be accepted", todo
        if gateway.is_open and gateway.allow_open:
            what = "every key is accepted, from wherever the pods can be reached (gateway.allow_open)"
            yield f"{at}.allow_open", what, "list tenants in gateway.tenants_file before others can reach it", "note"
        if (file := gateway.tenants_file) is not None:
            for group in service.groups:
                if group.mount(str(file)) is None:
                    todo = "mount the Secret with the tenants there, in every pod: a gateway may run in any"
                    yield group.where, f"gateway.tenants_file is {file}, and nothing is mounted there", todo


def salt(rendered: RenderedManifests) -> Told:
    """Find pods without the secret that salts prefix hashes, or with one in plain sight."""
    for service in rendered.services:
        for group in service.groups:
            entries = [entry for entry in group.box.get("env") or () if entry.get("name") == SALT_ENV]
            sources = [*(group.box.get("envFrom") or ()), *entries]
            if not sources:
                what = f"{SALT_ENV} is not set: every pod would salt with its own, and find no other's prefixes"
                yield f"{group.where}.env", what, "take it from a Secret, as the base does"
            if any("value" in entry for entry in entries):
                what = f"{SALT_ENV} stands in the manifest, where whoever reads it can guess prefixes"
                yield f"{group.where}.env[{SALT_ENV}]", what, "take it from a Secret: valueFrom.secretKeyRef"


RULES: tuple[Rule, ...] = (
    wrong_types,
    unknown_fields,
    quantities,
    serve_document,
    references,
    selectors,
    images,
    engine_images,
    gpu_workers,
    group_sizes,
    replicas_fit,
    memory_fits,
    disk_tier,
    grace_periods,
    tenants,
    salt,
    *SETTINGS_RULES,
)
