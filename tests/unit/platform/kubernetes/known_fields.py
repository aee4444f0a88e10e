"""Writes the package's table of known fields, from the operators' CRDs and the schemas of the core kinds.

`.venv/bin/python -m tests.unit.platform.kubernetes.known_fields FOLDER` with the folder of the CRDs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from warmkv.platform.kubernetes.fields import OBJECT, TABLE, Fields, fields_of, read_crds, table_of

KUBERNETES = "1.32"
CORE = [
    "configmap-v1",
    "cronjob-batch-v1",
    "daemonset-apps-v1",
    "deployment-apps-v1",
    "horizontalpodautoscaler-autoscaling-v2",
    "ingress-networking-v1",
    "job-batch-v1",
    "limitrange-v1",
    "namespace-v1",
    "networkpolicy-networking-v1",
    "persistentvolume-v1",
    "persistentvolumeclaim-v1",
    "pod-v1",
    "poddisruptionbudget-policy-v1",
    "priorityclass-scheduling-v1",
    "replicaset-apps-v1",
    "resourcequota-v1",
    "role-rbac-v1",
    "rolebinding-rbac-v1",
    "clusterrole-rbac-v1",
    "clusterrolebinding-rbac-v1",
    "secret-v1",
    "service-v1",
    "serviceaccount-v1",
    "statefulset-apps-v1",
    "storageclass-storage-v1",
]
PATH = Path(__file__).parents[4] / "warmkv/platform/kubernetes" / TABLE


def core_kinds() -> dict[str, Fields]:
    """Return the kinds of Kubernetes itself; their schemas refer to definitions in one file."""
    import kubernetes_validate

    root = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    (folder,) = root.glob(f"v{KUBERNETES}.*-local")
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]

    def whole(schema: Any, above: tuple[str, ...] = ()) -> Any:
        """Put what is referred to in its place, but for what would contain itself."""
        if isinstance(schema, list):
            return [whole(item, above) for item in schema]
        if not isinstance(schema, dict):
            return schema
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name:
            return {} if name in above else whole(definitions[name], (*above, name))
        return {key: whole(value, above) for key, value in schema.items()}

    found = {}
    for name in CORE:
        schema = json.loads((folder / f"{name}.json").read_text())
        fields = fields_of(whole(schema))
        assert isinstance(fields, dict)
        (kind,) = schema["properties"]["kind"]["enum"]
        found[kind] = {**fields, **dict.fromkeys(OBJECT)}
        found[kind].pop("status", None)  # nobody writes it into a manifest
    return found


def table(crds: Path) -> str:
    """Return the whole table as text: a node a line, so that a diff can be read."""
    kinds = {**core_kinds(), **read_crds(crds)}
    found = table_of(kinds)
    nodes = ",\n".join(json.dumps(node, separators=(",", ":")) for node in found["nodes"])
    return f'{{"kinds": {json.dumps(found["kinds"])},\n"nodes": [\n{nodes}\n]}}\n'


if __name__ == "__main__":
    PATH.write_text(table(Path(sys.argv[1])))
