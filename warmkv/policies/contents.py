"""What a replica's tiers hold, as plain values: a running replica tells it, a simulated one begins with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from warmkv.policies.entry import LOST, Entry
from warmkv.policies.retention import TierIndex
from warmkv.policies.tiers import Tiers


class HeldBlock(NamedTuple):
    """A stored block, tail or column sums. Times are Unix time, lives seconds."""

    key: bytes
    parent: bytes  # key of the block before it; empty at the beginning of a prompt
    plain: int  # bytes uncompressed
    tokens: int
    tenant: str
    ttl: float
    expires_at: float
    mark_ttl: float
    mark_expires_at: float
    reads: int
    used_at: float  # nan if unknown, as `since`
    since: float  # when it came to this tier


@dataclass(frozen=True, slots=True)
class Contents:
    """What one replica held at a time: blocks by tier, the most recently used first, so parents before children."""

    at: float  # Unix time
    tiers: Mapping[str, Sequence[HeldBlock]]
    group: str = ""  # of replicas (`cluster.groups`)

    def stored_by(self, time: float) -> Contents:
        """Return it without what came after a time."""
        tiers = {name: [held for held in blocks if not held.since > time] for name, blocks in self.tiers.items()}
        return Contents(self.at, tiers, self.group)


def contents_of(tiers: Tiers, most: int, now: float, wall: float) -> Contents:
    """Return at most `most` blocks of all tiers together, by recency, the fastest tier first.

    The entries' times are those of a clock that shows `now` at the Unix time `wall`.
    """
    shift, found = wall - now, dict[str, Sequence[HeldBlock]]()
    for tier, index in zip(tiers.tiers, tiers.indexes, strict=True):
        found[tier.name] = [_held(entry, shift) for entry in islice(_recent(index), most)]
        most -= len(found[tier.name])
    return Contents(wall, found)


def restore(tiers: Tiers, contents: Contents, now: float, wall: float) -> None:
    """Insert contents into empty tiers, each as much as fits; tiers that are not there any more are left out.

    The tiers' clock shows `now` at the Unix time `wall`.
    """
    for tier, index in zip(tiers.tiers, tiers.indexes, strict=True):
        index.restore_all((_entry(held, now - wall), held.parent or None) for held in contents.tiers.get(tier.name, ()))


def _recent(index: TierIndex) -> Iterator[Entry]:
    """Yield entries, the most recently used first, but none before its parent."""
    seen: set[bytes] = set()
    for key in reversed([*index]):
        entry, path = index.entry(key), list[Entry]()
        while entry is not None and entry.key not in seen:
            path.append(entry)
            entry = entry.parent
        seen.update(entry.key for entry in path)
        yield from (entry for entry in reversed(path) if entry.expires_at != LOST)


def _held(entry: Entry, shift: float) -> HeldBlock:
    parent = entry.parent.key if entry.parent is not None else b""
    return HeldBlock(
        entry.key, parent, entry.plain, entry.tokens, entry.tenant,
        entry.ttl, entry.expires_at + shift, entry.mark_ttl, entry.mark_expires_at + shift,
        entry.reads, entry.used_at + shift, entry.since + shift,
    )  # fmt: skip


def _entry(held: HeldBlock, shift: float) -> Entry:
    return Entry(
        held.key, None, held.plain, 0, held.tokens, 0, held.tenant,
        held.ttl, held.expires_at + shift, held.mark_ttl, held.mark_expires_at + shift,
        held.reads, held.used_at + shift, held.since + shift,
    )  # fmt: skip
