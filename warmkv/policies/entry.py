"""An entry of a tier's index: a stored block or tail, its sizes, lives and readers; and what storing a chain did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LOST = -math.inf
"""`expires_at` of an entry whose bytes are gone; it stays while others need it as their parent, and is never found."""


@dataclass(slots=True, eq=False)
class Entry:
    """A stored block or partial tail."""

    key: bytes
    parent: Entry | None  # the block before it
    plain: int  # bytes uncompressed
    size: int  # bytes as this tier keeps it
    tokens: int
    end: int  # tokens from the start of the prompt to its own end
    tenant: str
    ttl: float  # seconds of life after each read
    expires_at: float
    mark_ttl: float = 0.0  # above 0 where a breakpoint was written: its own lifetime, refreshed by reads
    mark_expires_at: float = -math.inf
    reads: int = 0
    used_at: float = math.nan  # when it was stored or read last, in any tier; unknown after a restart
    since: float = math.nan  # when it came to this tier
    used: int = 0
    floor: float = 0.0  # the priority of what had been given up last when it was used
    pins: int = 0  # requests that are reading it; never evicted or expired while above 0
    children: int = 0

    def path(self) -> list[Entry]:
        """Return the chain from the first block of the prompt to this one."""
        chain, entry = [self], self.parent
        while entry is not None:
            chain.append(entry)
            entry = entry.parent
        return chain[::-1]


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """What storing a chain did: keys that are now held and were not, what gave way, and what had outlived its TTL."""

    stored: list[bytes] = field(default_factory=list)
    evicted: list[Entry] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
