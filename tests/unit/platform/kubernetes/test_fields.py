"""Known fields: read from CRDs, written as a table, and what is not among them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml

from tests.unit.platform.kubernetes import known_fields
from warmkv.platform.kubernetes.fields import SchemaError, faults, fields_of, known, read_crds, table_of

CRDS = Path(__file__).parents[4].parent / "shared/crds"

SCHEMA = {
    "properties": {
        "spec": {
            "properties": {
                "size": {"type": "integer"},
                "boxes": {"items": {"properties": {"name": {}, "image": {}}}},
                "labels": {"additionalProperties": {"type": "string"}},
                "groups": {"additionalProperties": {"properties": {"count": {}}}},
                "port": {"x-kubernetes-int-or-string": True, "type": "string"},
                "ratio": {"type": ["number", "null"]},
                "anything": {"x-kubernetes-preserve-unknown-fields": True, "type": "object"},
            }
        }
    }
}


def crd(name: str, *versions: tuple[str, bool]) -> str:
    return yaml.safe_dump(
        {
            "kind": "CustomResourceDefinition",
            "spec": {
                "names": {"kind": name},
                "versions": [
                    {"name": at, "served": True, "storage": stored, "schema": {"openAPIV3Schema": SCHEMA}}
                    for at, stored in versions
                ],
            },
        }
    )


def test_unknown_fields_are_found_where_they_stand() -> None:
    fields = fields_of(SCHEMA)
    good = {
        "size": 1,
        "boxes": [{"name": "a", "image": "b"}],
        "labels": {"any": "x"},
        "groups": {"any": {"count": 1}},
        "anything": {"x": {"y": 1}},
    }
    assert list(faults({"spec": good}, fields)) == []
    bad = {"sise": 1, "boxes": [{"name": "a", "imge": "b"}, {"xyz": 1}], "groups": {"any": {"cuont": 1}}}
    assert [(place, todo) for place, _, todo in faults({"spec": bad}, fields)] == [
        ("spec.sise", "write size"),
        ("spec.boxes[a].imge", "write image"),
        ("spec.boxes[1].xyz", "remove it, or look up its name with `kubectl explain`"),
        ("spec.groups.any.cuont", "write count"),
    ]


def test_types_are_those_of_the_schema() -> None:
    """A number in quotes, a switch as a number, a list that is none; amounts may be either."""
    fields = fields_of(SCHEMA)
    bad = {"size": "1", "boxes": {"name": "a"}, "labels": {"any": 1, "other": True}, "groups": {"any": 3}, "port": 1}
    assert [(place, todo) for place, _, todo in faults({"spec": bad}, fields)] == [
        ("spec.size", "remove the quotes"),
        ("spec.boxes", "write a list"),
        ("spec.labels.any", 'write "1"'),
        ("spec.labels.other", 'write "true"'),
        ("spec.groups.any", "write a mapping"),
    ]
    assert [todo for *_, todo in faults({"spec": {"size": 1.5}}, fields)] == ["write an integer"]
    assert [todo for *_, todo in faults({"spec": {"size": True}}, fields)] == ["write an integer"]
    assert list(faults({"spec": {"size": None, "port": "http", "ratio": 2}}, fields)) == []


def test_a_folder_of_crds_is_read_packed_or_not(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(crd("One", ("v1", True)))
    (tmp_path / "two.yaml.gz").write_bytes(gzip.compress(crd("Two", ("v1alpha1", False), ("v1", True)).encode()))
    (tmp_path / "other.yaml").write_text("kind: ConfigMap")
    found = read_crds(tmp_path)
    assert set(found) == {"One", "Two"}
    assert found["One"] == found["Two"]
    assert found["One"] is not None
    assert {"apiVersion", "kind", "metadata", "spec"} == set(found["One"])


def test_a_folder_without_crds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="holds no CustomResourceDefinition"):
        read_crds(tmp_path)
    (tmp_path / "broken.yaml.gz").write_bytes(b"no gzip")
    with pytest.raises(SchemaError, match=r"cannot read .*broken"):
        read_crds(tmp_path)


def test_the_table_says_what_was_put_into_it() -> None:
    kinds = {"One": fields_of(SCHEMA), "Two": fields_of(SCHEMA)}
    table = table_of(kinds)
    assert table["kinds"]["One"] == table["kinds"]["Two"], "equal nodes are written once"
    assert len({json.dumps(node) for node in table["nodes"]}) == len(table["nodes"])


def test_the_table_of_the_package_is_that_of_the_operators() -> None:
    """KubeRay's and the Prometheus operator's CRDs, and Kubernetes' own schemas."""
    if not CRDS.is_dir():
        pytest.skip("no folder ../shared/crds")
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    assert known_fields.PATH.read_text() == known_fields.table(CRDS)
    read = read_crds(CRDS)
    assert {kind: known()[kind] for kind in read} == read


def test_the_table_of_the_package_is_small_and_knows_what_is_applied() -> None:
    assert known_fields.PATH.stat().st_size < 60_000
    kinds = known()
    assert {"RayService", "RayCluster", "PodMonitor", "PodDisruptionBudget", "Deployment", "NetworkPolicy"} <= set(
        kinds
    )
    document = json.loads(known_fields.PATH.read_text())
    assert all(
        not isinstance(number, int) or number < at
        for at, node in enumerate(document["nodes"])
        for number in node.values()
    )
