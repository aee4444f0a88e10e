"""Ray nodes as KubeRay starts them from the rendered manifests: options, environment, volumes, a read-only root.

A pod is a network namespace with a mount namespace of its own, in which nothing may be written but where the manifest
mounts a volume, by root without any capability. Needs the right to make both.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.faults.nodes import Cluster, Node
from tests.polling import PATIENCE, until

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
HERE = ("PATH", "LANG", "OMP_NUM_THREADS")  # variables of this machine that a pod has from its image

# $1 is the folder of the pod, with a file `volumes`: a folder, where it is mounted, rw or ro; and a file `image`: this
# checkout and its Python, which a pod has from its image, and where in a volume they go that hides them. The command
# follows.
# Folders that are not on this machine get their mount points by an overlay, so that the machine stays as it is.
IN_POD = """
set -e
pod=$1; shift
for top in etc var; do
  mkdir -p "$pod/$top/upper" "$pod/$top/work"
  mount -t overlay overlay -o "lowerdir=/$top,upperdir=$pod/$top/upper,workdir=$pod/$top/work" "/$top"
done
while read -r folder place mode; do mkdir -p "$place"; done <"$pod/volumes"
while read -r folder place; do
  mkdir -p "$place"
  mount --bind "$folder" "$place"
  mount -o remount,bind,ro "$place"
done <"$pod/image"
mount --rbind / /
mount -o remount,bind,ro /
cd /
for top in etc var; do mount -o remount,ro "/$top"; done
while read -r folder place mode; do
  mount --rbind "$folder" "$place"
  mount -o "remount,bind,$mode" "$place"
done <"$pod/volumes"
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


@dataclass
class PodCluster(Cluster):
    """A Ray cluster of pods, with their groups as rendered; `secrets` are those of the cluster, by name and key."""

    groups: dict[str, Any] = field(default_factory=dict)
    known: dict[str, dict[str, str]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token = secrets.token_hex(32)  # KubeRay makes it

    def start_pod(self, name: str, group: str, **options: str) -> None:
        """Start a node from its group, the head first; `options` of `ray start` come on top of the group's."""
        spec = self.groups[group]["template"]["spec"]
        box = spec["containers"][0]
        assert self.network
        node = self.nodes[name] = Node(f"{name}-{secrets.token_hex(8)}", self.network.join(name))
        start = [f"--address={self.gcs}"] if name != "head" else ["--head", f"--port={self.port}"]
        chosen = {**self.groups[group]["rayStartParams"], "metrics-export-port": "8080", "num-gpus": "0", **options}
        if labels := self.groups[group].get("labels"):
            chosen["labels"] = ",".join(f"{label}={value}" for label, value in labels.items())
        start += [f"--{option}" if value == "true" else f"--{option}={value}" for option, value in chosen.items()]
        command = [str(Path(sys.executable).with_name("ray")), "start", *start, f"--node-ip-address={node.address}"]
        self._start(
            [*self.within(name), *command],
            node,
            lambda: self._answers(node),
            self.variables(box),
            lambda: self._make_volumes(name, spec, box),
        )

    def within(self, name: str) -> list[str]:
        assert self.network
        return [*self.network.within(name), "unshare", "--mount", "bash", "-c", IN_POD, "pod", str(self.folder / name)]

    def deploy(self, document: dict[str, Any]) -> None:
        """Give the head a document, as KubeRay does."""
        (answer,) = until(lambda: self._of_dashboard(requests.put, json=document), "the head's dashboard answers")
        assert answer.ok, answer.text

    def status(self) -> dict[str, Any]:
        """What Serve says of its applications, to KubeRay, by their names; empty while it does not answer."""
        return {
            name: application
            for answer in self._of_dashboard(requests.get)
            if answer.ok
            for name, application in answer.json().get("applications", {}).items()
        }

    def _of_dashboard(self, ask: Callable[..., requests.Response], **options: Any) -> list[requests.Response]:
        """Return the answer of the head's dashboard; none while it does not listen yet."""
        url = f"http://{self.nodes['head'].address}:8265/api/serve/applications/"
        try:
            return [ask(url, headers=self._headers, timeout=PATIENCE, **options)]
        except requests.ConnectionError:
            return []

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def _answers(self, node: Node) -> bool:
        """Whether the probe of the pod's agent is answered, as its startupProbe asks."""
        try:
            return requests.get(
                f"http://{node.address}:52365/api/local_raylet_healthz", headers=self._headers, timeout=PATIENCE
            ).ok
        except requests.RequestException:
            return False

    def variables(self, box: dict[str, Any]) -> dict[str, str]:
        """Return variables of a container: those of the image, of the manifest, and what KubeRay adds."""
        found = {name: os.environ[name] for name in HERE if name in os.environ} | self.settings
        found |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "RAY_AUTH_MODE": "token"}
        found["RAY_AUTH_TOKEN"] = self.token
        for entry in box["env"]:
            if "value" in entry:
                found[entry["name"]] = entry["value"]
                continue
            wanted = entry["valueFrom"]["secretKeyRef"]
            if wanted["name"] in self.known or not wanted.get("optional"):
                found[entry["name"]] = self.known[wanted["name"]][wanted["key"]]
        return found

    def _make_volumes(self, name: str, spec: dict[str, Any], box: dict[str, Any]) -> None:
        pod = self.folder / name
        shutil.rmtree(pod, ignore_errors=True)  # of a pod before it, in whose place it comes
        pod.mkdir()
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        lines, image = [], []
        for mount in box["volumeMounts"]:
            folder, volume = pod / "of" / mount["name"], volumes[mount["name"]]
            folder.mkdir(parents=True)
            files = self.known.get(volume.get("secret", {}).get("secretName"), {})
            files = files or self.config_maps.get(volume.get("configMap", {}).get("name"), {})
            for file, text in files.items():
                (folder / file).write_text(text)
            lines.append(f"{folder} {mount['mountPath']} {'ro' if mount.get('readOnly') else 'rw'}\n")
            hidden = [of for of in IMAGE if of.is_relative_to(mount["mountPath"])]
            image += [f"{of} {folder / of.relative_to(mount['mountPath'])}\n" for of in hidden]
        lines.sort(key=lambda line: " /tmp " in line)  # the last: the folders of the others are in ours
        (pod / "volumes").write_text("".join(lines))
        (pod / "image").write_text("".join(image))
