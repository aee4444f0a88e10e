"""YAML in which no mapping has a key twice: of two, as a merge leaves them, the first would be dropped silently."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError

# As safe, ten times as fast where PyYAML came with libyaml, for what is long: rendered manifests hold whole dashboards.
FastLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"


class StrictLoader(yaml.SafeLoader):
    """Raise ConstructorError, a YAMLError, at a key that its mapping has already."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping; what it merges from others by `<<` it may have itself."""
        first: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):  # which is refused below
                continue
            if key in first:
                fault = f"{key!r} is there twice, first in line {first[key]}"
                raise ConstructorError(None, None, fault, key_node.start_mark)
            first[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Read a document of plain values. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=StrictLoader)
