"""Rules for the files and folders that settings name: what a pod has mounted there, and whether it can be written.

As in `rules.py`, which lists them, each is a function over the manifests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from warmkv.config import Config, place_in
from warmkv.platform.document import NOT_ON_THE_HEAD
from warmkv.platform.kubernetes.findings import Told
from warmkv.platform.kubernetes.rendered import Group, Object, RenderedManifests, mapping, quantity
from warmkv.policies.memory_plan import GIB, amount

WITHOUT_FOLDER = ("/dev", "/proc")  # as /dev/stdout: there on a read-only root, too
READ_ONLY_VOLUMES = ("configMap", "secret", "projected", "downwardAPI")
EMPTY_VOLUMES = ("emptyDir", "ephemeral")  # when their pod starts


def written_files(rendered: RenderedManifests) -> Told:
    """Find an access log, or a folder of versions, that pods cannot write: nothing writable is mounted there."""
    for service, config in rendered.configured:
        settings = {"gateway.access_log": config.gateway.access_log, "control.path": config.control.path}
        for setting, path in settings.items():
            for group in service.groups:
                if path is None or (setting == "gateway.access_log" and not _has_gateways(group)):
                    continue
                if why := _unwritable(group, path):
                    todo = f"mount a volume there, in every group, or set {setting} to a path on one that is mounted"
                    yield group.where, f"{setting} is {path}, and {why}", todo


def kept_versions(rendered: RenderedManifests) -> Told:
    """Find, as a note, a live configuration that the next cluster of an upgrade will not have."""
    for service, config in rendered.configured:
        folder, todo = config.control.path, "set control.path to a folder on a volume that all pods share"
        if folder is None:
            if service.cluster.get("gcsFaultToleranceOptions"):
                what = (
                    "versions of the live configuration are kept in Redis for this Ray cluster alone (control.path is "
                    "not set): an upgrade's new cluster begins without them"
                )
                yield f"{service.where}: spec.serveConfigV2, control.path", what, todo, "note"
            continue
        for group in service.groups:
            mount = group.mount(str(folder)) or {}
            if any(kind in (group.volume(mount) or {}) for kind in EMPTY_VOLUMES):
                what = f"control.path is {folder}, and what is mounted there, {mount.get('name')}, goes with its pod"
                yield group.where, what, todo, "note"


def _has_gateways(group: Group) -> bool:
    return not group.head or any(
        str(mapping(group.spec.get("labels")).get(key)) != value.removeprefix("!")
        for key, value in NOT_ON_THE_HEAD.items()
    )


def _unwritable(group: Group, path: Path) -> str:
    """Say why the container that runs Ray cannot write to a path; `` where it can."""
    if any(PurePosixPath(path).is_relative_to(folder) for folder in WITHOUT_FOLDER):
        return ""
    mount = group.mount(str(path))
    if mount is None:
        is_read_only = mapping(group.box.get("securityContext")).get("readOnlyRootFilesystem") is True
        return "nothing is mounted there, and the root file system is read-only" if is_read_only else ""
    volume = group.volume(mount) or {}
    if mount.get("readOnly") is True or any(kind in volume for kind in READ_ONLY_VOLUMES):
        return f"what is mounted there, {mount.get('name')}, is read-only"
    return ""


def tenants_mount(rendered: RenderedManifests) -> Told:
    """Find a tenants file that is mounted by `subPath`: a changed Secret never reaches such a file."""
    for service, config in rendered.configured:
        if (file := config.gateway.tenants_file) is None:
            continue
        for group in service.groups:
            mount = group.mount(str(file)) or {}
            if "subPath" in mount or "subPathExpr" in mount:
                what = f"{file} (gateway.tenants_file) is mounted by subPath: pods would never see a changed Secret"
                todo = f"mount the whole volume at {file.parent}, without subPath"
                yield f"{group.where}.volumeMounts[{mount.get('name')}]", what, todo


def disk_tier(rendered: RenderedManifests) -> Told:
    """Find a disk tier whose folder is not mounted, or has no room for it."""
    for service, config in rendered.configured:
        for name, kind in config.groups().items():
            disk = kind.prefix_cache.disk
            if disk.path is None or not kind.prefix_cache.enabled or (name and disk == config.prefix_cache.disk):
                continue
            for group in service.workers:
                replicas = group.replicas_on_a_pod(kind)
                if not replicas:
                    continue
                mount = group.mount(str(disk.path))
                volume = mount and group.volume(mount)
                if volume is None:
                    todo = "mount a volume there, as the component disk-cache does"
                    setting = place_in(name, "prefix_cache.disk.path")
                    yield group.where, f"nothing is mounted at {setting}, {disk.path}", todo
                    continue
                size = quantity(_size(volume))
                if size is not None and size < (needed := replicas * int(disk.memory_bytes)):
                    where = f"{group.pods.where}.volumes[{volume['name']}]"
                    what = (
                        f"the volume {volume['name']} has {amount(int(size))}, and the disk tier takes {amount(needed)}"
                    )
                    yield where, what, f"make it {whole_gib(needed)}Gi or more"


def _size(volume: Object) -> str:
    """Return the size that a volume of its pod's own is asked for with; `` where there is none."""
    claim = ((volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}).get("spec") or {}
    asked = ((claim.get("resources") or {}).get("requests") or {}).get("storage", "")
    return str((volume.get("emptyDir") or {}).get("sizeLimit", asked))


def whole_gib(size: float) -> int:
    """Round bytes up to GiB."""
    return -(-int(size) // GIB)


def read_files(rendered: RenderedManifests) -> Told:
    """Find packs, and an evaluation, that pods do not have; as a note, those that only their image could bring."""
    for service, config in rendered.configured:
        for setting, path, kind, lost in _read(config):
            for group in service.groups:
                if kind is not None and not group.replicas_on_a_pod(kind):
                    continue
                mount = group.mount(str(path))
                if mount is None:
                    todo = "mount a volume that has it there, in every group of pods, or build it into the image"
                    what = f"{setting} has {path}, where nothing is mounted: unless the image has it, {lost}"
                    yield group.where, what, todo, "note"
                elif _stays_empty(group, mount):
                    what = f"{setting} has {path}, and what is mounted there, {mount.get('name')}, begins empty: {lost}"
                    yield group.where, what, "mount a volume that has it, or let an init container put it there"


def _read(config: Config) -> Iterator[tuple[str, Path, Config | None, str]]:
    """Yield what is read: setting, path, the replicas that read it (None: any pod may), and what comes without it."""
    for name, kind in config.groups().items():
        if not name or kind.prefix_cache.packs != config.prefix_cache.packs:
            for path in kind.prefix_cache.packs:
                yield place_in(name, "prefix_cache.packs"), path, kind, "no replica starts"
    if config.control.whatif is not None and (table := config.control.whatif.quality) is not None:
        yield "control.whatif.quality", table, None, "what policies do to answers is not known"


def _stays_empty(group: Group, mount: Object) -> bool:
    """Return True for a new volume that no other container of the pod fills."""
    volume = group.volume(mount) or {}
    others = (box for _, box in group.pods.containers() if box is not group.box)
    is_filled = any(m.get("name") == mount.get("name") for box in others for m in box.get("volumeMounts") or ())
    return any(kind in volume for kind in EMPTY_VOLUMES) and not is_filled
