"""The tables of compression methods in docs/policies.md, made from what the methods declare."""

from __future__ import annotations

import re
from collections.abc import Iterable

from warmkv.knobs import Knob
from warmkv.policies.compression.method import Method
from warmkv.policy_spec import METHODS

Rows = Iterable[tuple[str, ...]]


def decoding(method: type[Method]) -> str:
    """Describe what a method does while decoding: its decode rule, and whether there is a choice."""
    return method.decoding or method.decode + (", nothing else" if len(method.decode_rules) == 1 else "")


def defaults(knobs: Iterable[Knob]) -> dict[str, str]:
    """Return the default of each knob as users write it."""
    return {knob.name: _plain(knob.default) for knob in knobs}


def fill(page: str) -> str:
    """Write the tables between `<!-- methods -->` or `<!-- sources -->` and the end mark that follows it."""
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
    return _replace(page, "sources", ("method", "source", "what differs"), sources)


def _replace(page: str, mark: str, head: tuple[str, ...], rows: Rows) -> str:
    title, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, *rows))
    table = "\n".join([title, "|" + "---|" * len(head), *body])
    return re.sub(rf"(?s)(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda found: found[1] + table + found[2], page)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
