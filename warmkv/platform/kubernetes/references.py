"""What pods name and something else must bring: Secrets, ConfigMaps, claims, accounts, priority classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warmkv.platform.kubernetes.rendered import Object, Pods

_OF_ENV = (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap"))
_OF_ENV_FROM = (("secretRef", "Secret"), ("configMapRef", "ConfigMap"))


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that pods name, and the key in it, if they name one."""

    where: str
    kind: str
    name: str
    key: str = ""
    optional: bool = False


def references_of(pods: Pods) -> Iterator[Reference]:
    """Yield everything that pods refer to by name."""
    for where, box in pods.containers():
        yield from _of_container(where, box)
    for volume in pods.spec.get("volumes") or ():
        yield from _of_volume(f"{pods.where}.volumes[{volume.get('name')}]", volume)
    for ref in pods.spec.get("imagePullSecrets") or ():
        yield Reference(f"{pods.where}.imagePullSecrets", "Secret", ref.get("name", ""))
    if (account := pods.spec.get("serviceAccountName", "default")) != "default":
        yield Reference(f"{pods.where}.serviceAccountName", "ServiceAccount", account)
    priority = pods.spec.get("priorityClassName", "")
    if priority and not priority.startswith("system-"):
        yield Reference(f"{pods.where}.priorityClassName", "PriorityClass", priority)


def keys_of(brought: Object) -> list[str]:
    """Return the keys of a Secret or ConfigMap, in order."""
    return sorted({key for part in ("data", "stringData", "binaryData") for key in brought.get(part) or ()})


def _of_container(where: str, box: Object) -> Iterator[Reference]:
    for number, entry in enumerate(box.get("env") or ()):
        at, source = f"{where}.env[{entry.get('name', number)}]", entry.get("valueFrom") or {}
        for field, kind in _OF_ENV:
            if (ref := source.get(field)) is not None:
                yield Reference(at, kind, ref.get("name", ""), ref.get("key", ""), bool(ref.get("optional")))
    for number, entry in enumerate(box.get("envFrom") or ()):
        for field, kind in _OF_ENV_FROM:
            if (ref := entry.get(field)) is not None:
                at = f"{where}.envFrom[{number}]"
                yield Reference(at, kind, ref.get("name", ""), optional=bool(ref.get("optional")))


def _of_volume(at: str, volume: Object) -> Iterator[Reference]:
    for one in [volume, *((volume.get("projected") or {}).get("sources") or ())]:
        if (ref := one.get("secret")) is not None:
            name = ref.get("secretName", ref.get("name", ""))
            yield Reference(at, "Secret", name, optional=bool(ref.get("optional")))
        if (ref := one.get("configMap")) is not None:
            yield Reference(at, "ConfigMap", ref.get("name", ""), optional=bool(ref.get("optional")))
    if (ref := volume.get("persistentVolumeClaim")) is not None:
        yield Reference(at, "PersistentVolumeClaim", ref.get("claimName", ""))
