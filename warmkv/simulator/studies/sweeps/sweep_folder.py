"""A sweep's folder: `meta.json`, a file for every finished point, and the reports made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmkv.faults import UserError
from warmkv.terminal import json_text

FORMAT = 1


class SweepError(UserError):
    """A sweep that cannot be done as asked; the message says what to write instead."""


class SweepFolder:
    """Where a sweep is written. Points are known by a digest of what they set, so that a grid can be extended."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Make the folder, or continue in it.

        `meta` is what must be the same for points to belong together. Raises SweepError if the folder holds anything
        else, OSError as the disk does.
        """
        self.path, self.points = path, path / "points"
        known = path / "meta.json"
        self.meta: dict[str, Any] = json.loads(json_text({"format": FORMAT, **meta}))
        if known.exists():
            try:
                before = json.loads(known.read_text(encoding="utf-8"))
            except ValueError:
                raise SweepError(f"{known} is damaged; choose another --out") from None
            if changed := changes(before, self.meta):
                told = "; ".join(f"{name}: {old} there, {new} here" for name, (old, new) in changed.items())
                raise SweepError(
                    f"{path} holds a sweep of something else ({told}); "
                    "give the same again to continue it, or choose another --out"
                )
        elif path.exists() and any(path.iterdir()):
            raise SweepError(f"{path} is not empty and holds no sweep; choose another --out")
        self.points.mkdir(parents=True, exist_ok=True)
        if not known.exists():
            self.write("meta.json", json_text(self.meta) + "\n")

    def load(self, key: str) -> dict[str, Any] | None:
        """Load a finished point; None if it is missing or damaged."""
        try:
            found = json.loads((self.points / f"{key}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("figures"), dict) else None

    def store(self, key: str, point: Mapping[str, Any]) -> None:
        """Keep a finished point; it is there whole or not at all."""
        self.write(f"points/{key}.json", json_text(point) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file; it is there whole or not at all."""
        target = self.path / name
        scratch = target.with_name(f".{target.name}.new")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)


def flat(tree: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    """Flatten a tree to dotted paths; an empty mapping is a value."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{lead}{key}"
        out |= flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return out


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences of two trees: by path the value in each, None where it has none."""
    a, b = flat(old), flat(new)
    return {path: (a.get(path), b.get(path)) for path in {**a, **b} if a.get(path) != b.get(path)}
