"""Sources of the configuration for pydantic-settings: a YAML document, the environment, `--set` flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

from warmkv.config.base import ConfigError
from warmkv.config.strict_yaml import StrictLoader
from warmkv.config.values import Place, discard, put, read_value

ENV_PREFIX, ENV_DELIMITER = "WARMKV_", "__"


class Tree(BaseSettings):
    """The values of all sources as a tree of plain values, which `Config` validates. The first source wins."""

    model_config = SettingsConfigDict(extra="allow")


class TreeSource(InitSettingsSource):
    """A tree of plain values. What a source above it assigns is taken out, so that a mapping is replaced, not merged.

    Raises ConfigError where it has a plain value and a source above it assigns a key within.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        origin: Callable[[Place], str | None],
        assigned: Iterable[str] = (),
        above: Sequence[TreeSource] = (),
    ) -> None:
        self.origin, self._assigned = origin, assigned
        for source in above:
            for dotted in source._assigned:
                discard(tree, dotted)
        super().__init__(Tree, init_kwargs=tree)


def merge(sources: Sequence[TreeSource]) -> dict[str, Any]:
    """Return the values of all sources as one tree."""
    return Tree(_build_sources=(tuple(sources), {})).model_extra or {}


def flags_source(flags: Sequence[str]) -> TreeSource:
    """Read `a.b=value` flags. Raises ConfigError."""
    assigned = []
    for flag in flags:
        dotted, equals, text = flag.partition("=")
        if not equals:
            raise ConfigError(f"--set {flag}: write it as section.key=value, as in engine.max_slots=8")
        assigned.append((dotted.strip(), text, f"--set {dotted.strip()}"))
    return _assignments(assigned)


def environment_source(environ: Mapping[str, str], above: Sequence[TreeSource]) -> TreeSource:
    """Read the variables that name a section, `WARMKV_SECTION__KEY`. Raises ConfigError."""
    assigned = [
        (name.removeprefix(ENV_PREFIX).lower().replace(ENV_DELIMITER, "."), text, name)
        for name, text in sorted(environ.items())
        if name.startswith(ENV_PREFIX) and ENV_DELIMITER in name
    ]
    return _assignments(assigned, above)


def _assignments(assigned: Sequence[tuple[str, str, str]], above: Sequence[TreeSource] = ()) -> TreeSource:
    tree: dict[str, Any] = {}
    for dotted, text, _ in assigned:
        put(tree, dotted, read_value(dotted, text))

    def origin(place: Place) -> str | None:
        for dotted, _, name in reversed(assigned):
            if all(key == str(part) for key, part in zip(dotted.split("."), place, strict=False)):
                return name
        return None

    return TreeSource(tree, origin, [dotted for dotted, *_ in assigned], above)


def document_source(path: Path, above: Sequence[TreeSource]) -> TreeSource:
    """Read a YAML document. Raises ConfigError if it cannot be read, or is no mapping of sections."""
    try:
        loader = StrictLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        tree = loader.construct_document(root) if root else {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")

    def origin(place: Place) -> str | None:
        line, node = None, root
        for part in place:
            if isinstance(node, yaml.MappingNode):
                found = [pair for pair in node.value if pair[0].value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                found = [(item, item) for item in node.value[part : part + 1]]
            else:
                found = []
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line + 1
        return f"{path}, line {line}" if line else None

    return TreeSource(tree, origin, above=above)
