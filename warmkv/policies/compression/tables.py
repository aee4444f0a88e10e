"""The tables of methods and storages in docs/policies.md, made from what these declare."""

from __future__ import annotations

import re
from collections.abc import Iterable

from warmkv.knobs import Knob
from warmkv.policies.compression.method import Method
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policy_spec import METHODS, STORAGES

Rows = Iterable[tuple[str, ...]]
HEAD_DIM, DTYPE_BYTES = 128, 2  # of the bytes in the docs: a head of 128 numbers in bfloat16


def decoding(method: type[Method]) -> str:
    """Describe what a method does while decoding: its decode rule, and whether there is a choice."""
    return method.decoding or method.decode + (", nothing else" if len(method.decode_rules) == 1 else "")


def defaults(knobs: Iterable[Knob]) -> dict[str, str]:
    """Return the default of each knob as users write it."""
    return {knob.name: _plain(knob.default) for knob in knobs}


def alias(storage: StorageFormat) -> str:
    """Return the policy that is the full cache in a storage, as users write it, or nothing."""
    alike = [other.bits for other in STORAGES.values() if other.alias == storage.alias]
    return storage.alias + (f":bits={storage.bits}" if storage.alias and storage.bits < max(alike) else "")


def fill(page: str) -> str:
    """Write each table between its mark, such as `<!-- methods -->`, and the end mark that follows."""
    own = [method for method in METHODS.values() if method.__module__.startswith("warmkv.")]
    methods = (
        (
            f"[{method.name}](policies/{method.name}.md)",
            method.keeps,
            decoding(method),
            method.differs,
            ", ".join(f"`{name}` {value}" for name, value in defaults(method.knobs).items()),
        )
        for method in own
    )
    sources = ((method.name, method.source, method.deviates) for method in own)
    heads = ("method", "keeps", "while decoding", "what differs by", "knobs and defaults")
    page = _replace(page, "methods", heads, methods)
    page = _replace(page, "sources", ("method", "source", "what differs"), sources)
    return _fill_storages(page)


def _fill_storages(page: str) -> str:
    plain = STORAGES["model"].entry_bytes(HEAD_DIM, DTYPE_BYTES)
    sizes = {
        storage: storage.entry_bytes(HEAD_DIM, DTYPE_BYTES)
        for storage in STORAGES.values()
        if type(storage).__module__.startswith("warmkv.")
    }
    own = sorted(sizes, key=lambda storage: (-sizes[storage], storage.name))
    storages = (
        (
            f"`{storage.name}`",
            f"[`{alias(storage)}`](policies/{storage.alias}.md)" if storage.alias else "`full`",
            storage.formula,
            f"{sizes[storage]:g}",
            f"1/{plain / sizes[storage]:.2g}" if sizes[storage] < plain else "1",
            _packed_by(storage),
        )
        for storage in own
    )
    sources = {s.alias: (s.alias, s.source, s.deviates) for s in own if s.alias}
    heads = ("storage", "as a policy", "bytes of an entry, d = head_dim", f"d = {HEAD_DIM}", "of model", "packed by")
    page = _replace(page, "storages", heads, storages)
    return _replace(page, "storage-sources", ("storage", "source", "what differs"), sources.values())


def _packed_by(storage: StorageFormat) -> str:
    if storage.group == 1:
        return ""
    alone = f", {storage.alias_residual} as `{storage.alias}`" if storage.alias_residual else ""
    return f"{storage.group}; `residual` {storage.residual}{alone}"


def _replace(page: str, mark: str, head: tuple[str, ...], rows: Rows) -> str:
    title, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, *rows))
    table = "\n".join([title, "|" + "---|" * len(head), *body])
    return re.sub(rf"(?s)(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda found: found[1] + table + found[2], page)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
