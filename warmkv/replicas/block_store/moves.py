"""Blocks on their way to lower tiers: converted and written beside the engine, within a limit of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.replicas.block_store import disk
from warmkv.replicas.block_store.formats import Packed
from warmkv.replicas.block_store.io_threads import Jobs
from warmkv.replicas.block_store.tiers import Move, TierStorage, computed_event

log = logging.getLogger(__name__)


class Moves:
    """Move blocks into the tiers `places`. For the engine's thread.

    `limit` bounds the bytes that only a move keeps alive. `failed(key, tier)` is called for a block that could not be
    moved. The clocks set the times in files.
    """

    def __init__(
        self,
        places: Sequence[TierStorage],
        limit: int,
        jobs: Jobs,
        failed: Callable[[bytes, int], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._places, self._limit, self._jobs, self._failed = places, limit, jobs, failed
        self._clock, self._wall_clock = clock, wall_clock
        self.bytes = 0  # of blocks that only their way to a lower tier keeps

    def __len__(self) -> int:
        """Count the blocks on their way."""
        return sum(len(place.arriving) for place in self._places)

    def begin(self, block: HeldBlock, tier: int, packed: Packed) -> None:
        """Bring a block into a tier."""
        place, key = self._places[tier], block.key
        if place.takes_as_it_is(packed):
            place.blocks[key] = packed
            return
        move = place.arriving[key] = Move(packed)
        folder, computed = place.folder, computed_event(packed)
        header = disk.header(block, place.storage_of(packed), self._clock(), self._wall_clock())

        def job() -> Packed | None:
            wanted = move.packed  # the engine's thread may give it up meanwhile
            if wanted is None:
                return None
            kept = place.converted(wanted, computed)
            if folder is None:
                return kept
            folder.write(kept, header)
            return None

        self._jobs.submit("write", job, partial(self._arrived, key, tier, move))

    def keep_alive(self, key: bytes, tier: int, packed: Packed) -> bool:
        """Count a block that only its move keeps alive; return False if that exceeds the limit and ends the move."""
        move = self._places[tier].arriving.get(key)
        if move is None or move.packed is not packed or move.alone:
            return True
        if self.bytes + packed.nbytes > self._limit:
            self.give_up(key, tier)
            return False
        move.alone = True
        self.bytes += packed.nbytes
        return True

    def give_up(self, key: bytes, tier: int) -> None:
        """Abort a move, if there is one; its bytes are free as soon as no thread copies them."""
        move = self._places[tier].arriving.pop(key, None)
        if move is not None and move.packed is not None:
            if move.alone:
                self.bytes -= move.packed.nbytes
            move.packed = None

    def _arrived(self, key: bytes, tier: int, move: Move, result: Packed | Exception | None) -> None:
        place = self._places[tier]
        if place.arriving.get(key) is not move:
            return  # it has left again meanwhile
        self.give_up(key, tier)
        if isinstance(result, Exception):
            log.warning("a block could not be moved to the tier %s: %s", place.tier.name, result)
            self._failed(key, tier)
        elif result is not None:
            place.blocks[key] = result
