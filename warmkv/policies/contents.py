"""What a replica's tiers hold, as plain values: a running replica tells it, a simulated one begins with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.policies.prefix_tree.radix import RadixTree


@dataclass(frozen=True, slots=True)
class Contents:
    """What one replica held at a time: blocks by tier, the most recently used first, so parents before children.

    Times of blocks are Unix time.
    """

    at: float  # Unix time
    tiers: Mapping[str, Sequence[HeldBlock]]
    group: str = ""  # of replicas (`cluster.groups`)

    def stored_by(self, time: float) -> Contents:
        """Return it without what came after a time."""
        tiers = {name: [held for held in blocks if not held.since > time] for name, blocks in self.tiers.items()}
        return Contents(self.at, tiers, self.group)


def contents_of(tree: RadixTree, most: int, now: float, wall: float) -> Contents:
    """Return at most `most` blocks of all tiers together, by recency, the fastest tier first.

    The tree's clock shows `now` at the Unix time `wall`.
    """
    found = dict[str, Sequence[HeldBlock]]()
    for at, tier in enumerate(tree.tiers):
        blocks = (block.at(wall - now) for run in tree.recent(at) for block in run.blocks())
        found[tier.name] = [*islice(blocks, most)]
        most -= len(found[tier.name])
    return Contents(wall, found)
