"""The fields that each kind of Kubernetes object has, and their types: from the operators' CRDs, else from a table.

The API server drops a field that it does not know, or refuses the object; either way a misspelt one does nothing.
"""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Iterator, Mapping
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from warmkv.config.strict_yaml import FastLoader
from warmkv.faults import UserError

Fields: TypeAlias = "Mapping[str, Fields] | str | None"
"""What may stand at a place: fields by name, where `*` stands for any name; a list, as `[]` with what its items are; a
type's name; None for anything."""

ANY_NAME, ITEMS = "*", "[]"
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str, date),  # YAML reads some strings as dates
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
TABLE = "known_fields.json"
UNKNOWN = "there is no such field, and it would do nothing"
OBJECT = ("apiVersion", "kind", "metadata")  # of every kind; what metadata has is not looked at


class SchemaError(UserError):
    """A folder or file that holds no CRDs."""


def known() -> dict[str, Fields]:
    """Return the fields of the kinds in the package's table: `kinds` by the number of their node among `nodes`."""
    table = json.loads(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    nodes: list[dict[str, Fields]] = []
    for node in table["nodes"]:  # those below come before those above
        nodes.append({name: nodes[below] if isinstance(below, int) else below for name, below in node.items()})
    return {kind: nodes[number] for kind, number in table["kinds"].items()}


def table_of(kinds: Mapping[str, Fields]) -> dict[str, Any]:
    """Return what `known` reads: equal nodes are written once, since a RayService alone has six templates of pods."""
    numbers: dict[str, int] = {}
    nodes: list[dict[str, int | str | None]] = []

    def number_of(fields: Fields) -> int | str | None:
        if fields is None or isinstance(fields, str):
            return fields
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
            documents = list(yaml.load_all(text, FastLoader))
        except (OSError, EOFError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SchemaError(f"cannot read {file}: {error}") from None
        for document in documents:
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                versions = [one for one in spec["versions"] if one.get("served", True)]
                stored = next((one for one in versions if one.get("storage")), versions[0])
                fields = fields_of(stored["schema"]["openAPIV3Schema"])
                own = fields if isinstance(fields, Mapping) else {}
                found[spec["names"]["kind"]] = {**own, **dict.fromkeys(OBJECT)}
    if not found:
        raise SchemaError(f"{folder} holds no CustomResourceDefinition in a *.yaml or *.yaml.gz")
    return found


def fields_of(schema: Mapping[str, Any]) -> Fields:
    """Return the fields of an OpenAPI schema without references."""
    if schema.get("x-kubernetes-int-or-string"):
        return None
    if "items" in schema:
        return {ITEMS: fields_of(schema["items"])}
    if properties := schema.get("properties"):
        return {name: fields_of(below) for name, below in properties.items()}
    below = schema.get("additionalProperties")
    if isinstance(below, dict):
        return {ANY_NAME: fields_of(below)}
    kind = schema.get("type")
    named = [one for one in (kind if isinstance(kind, list) else [kind]) if one != "null"]
    return named[0] if len(named) == 1 and named[0] in TYPES else None


def faults(value: object, fields: Fields, at: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the place, what is wrong and what to do for every field that is not known or has another type."""
    if fields is None or value is None:
        return
    if isinstance(fields, str):
        if not isinstance(value, TYPES[fields]) or (isinstance(value, bool) and fields != "boolean"):
            yield at, f"{value!r} has the wrong type", _as_type(value, fields)
    elif ITEMS in fields:
        if not isinstance(value, list):
            yield at, "this has the wrong type", "write a list"
            return
        for number, item in enumerate(value):
            name = item.get("name", item.get("groupName", number)) if isinstance(item, dict) else number
            yield from faults(item, fields[ITEMS], f"{at}[{name}]")
    elif not isinstance(value, dict):
        yield at, f"{value!r} has the wrong type", "write a mapping"
    else:
        for name, below in value.items():
            place = f"{at}.{name}" if at else str(name)
            if name in fields or ANY_NAME in fields:
                yield from faults(below, fields.get(name, fields.get(ANY_NAME)), place)
            else:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
                todo = f"write {near[0]}" if near else "remove it, or look up its name with `kubectl explain`"
                yield place, UNKNOWN, todo


def _as_type(value: object, kind: str) -> str:
    if kind == "string" and isinstance(value, bool | int | float):
        return f'write "{str(value).lower()}"'
    if isinstance(value, str) and kind != "string":
        return "remove the quotes"
    return f"write an {kind}" if kind == "integer" else f"write a {kind}"
