"""Token counts of one answer, split as they are billed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `written` is by TTL name; input + read + all written = prompt tokens."""

    input: int = 0
    read: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    output: int = 0

    @property
    def total_written(self) -> int:
        return sum(self.written.values())

    @property
    def prompt(self) -> int:
        return self.input + self.read + self.total_written
