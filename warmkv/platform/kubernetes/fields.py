"""The fields that each kind of Kubernetes object has: from the operators' CRDs in a folder, else from a table.

The API server drops a field that it does not know, or refuses the object; either way a misspelt one does nothing.
"""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from warmkv.faults import UserError

Fields: TypeAlias = "Mapping[str, Fields] | None"
"""The fields below a place, by name, and what lies below each; `*` stands for any name. None: anything may stand
there. Lists have the fields of their items."""

ANY_NAME = "*"
TABLE = "known_fields.json"
OBJECT = ("apiVersion", "kind", "metadata")  # of every kind; what metadata has is not looked at


class SchemaError(UserError):
    """A folder or file that holds no CRDs."""


def known() -> dict[str, Fields]:
    """Return the fields of the kinds in the package's table: `kinds` by the number of their node among `nodes`."""
    table = json.loads(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    nodes: list[dict[str, Fields]] = []
    for node in table["nodes"]:  # those below come before those above
        nodes.append({name: None if number is None else nodes[number] for name, number in node.items()})
    return {kind: nodes[number] for kind, number in table["kinds"].items()}


def table_of(kinds: Mapping[str, Fields]) -> dict[str, Any]:
    """Return what `known` reads: equal nodes are written once, since a RayService alone has six templates of pods."""
    numbers: dict[str, int] = {}
    nodes: list[dict[str, int | None]] = []

    def number_of(fields: Fields) -> int | None:
        if fields is None:
            return None
        node = {name: number_of(below) for name, below in sorted(fields.items())}
        key = json.dumps(node)
        if key not in numbers:
            numbers[key] = len(nodes)
            nodes.append(node)
        return numbers[key]

    return {"kinds": {kind: number_of(fields) for kind, fields in sorted(kinds.items())}, "nodes": nodes}


def read_crds(folder: Path) -> dict[str, Fields]:
    """Read the newest served version of every CRD in the `*.yaml` and `*.yaml.gz` of a folder. Raises SchemaError."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml"), *folder.glob("*.yaml.gz")])
    found: dict[str, Fields] = {}
    for file in files:
        try:
            text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            documents = list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        except (OSError, EOFError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SchemaError(f"cannot read {file}: {error}") from None
        for document in documents:
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                versions = [one for one in spec["versions"] if one.get("served", True)]
                stored = next((one for one in versions if one.get("storage")), versions[0])
                fields = fields_of(stored["schema"]["openAPIV3Schema"])
                found[spec["names"]["kind"]] = {**(fields or {}), **dict.fromkeys(OBJECT)}
    if not found:
        raise SchemaError(f"{folder} holds no CustomResourceDefinition in a *.yaml or *.yaml.gz")
    return found


def fields_of(schema: Mapping[str, Any]) -> Fields:
    """Return the fields of an OpenAPI schema without references."""
    if "items" in schema:
        return fields_of(schema["items"])
    if properties := schema.get("properties"):
        return {name: fields_of(below) for name, below in properties.items()}
    below = schema.get("additionalProperties")
    named = fields_of(below) if isinstance(below, dict) else None
    return None if named is None else {ANY_NAME: named}


def unknown(value: object, fields: Fields, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place of every field that is not known, and the nearest one that is, or ``."""
    if fields is None:
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            name = item.get("name", item.get("groupName", number)) if isinstance(item, dict) else number
            yield from unknown(item, fields, f"{at}[{name}]")
    if isinstance(value, dict):
        for name, below in value.items():
            place = f"{at}.{name}" if at else str(name)
            if name in fields or ANY_NAME in fields:
                yield from unknown(below, fields.get(name, fields.get(ANY_NAME)), place)
            else:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
                yield place, near[0] if near else ""
