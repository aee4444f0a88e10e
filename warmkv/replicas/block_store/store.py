"""The blocks of one replica: carries out with tensors and files what `policies/prefix_cache.py` decides."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from warmkv.config import PrefixCacheConfig
from warmkv.policies.contents import Contents, contents_of
from warmkv.policies.prefix_cache import Lifetimes, PrefixCache
from warmkv.policies.prefix_tree.held import Change, Copied, HeldBlock, Left, Stored
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.tiers import tiers_of
from warmkv.prefixes.record import Candidate, Mark
from warmkv.replicas.block_store import disk, packs
from warmkv.replicas.block_store.formats import Packed, pack, unpack
from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.io_threads import IOThreads, Jobs, Threads
from warmkv.replicas.block_store.moves import Moves
from warmkv.replicas.block_store.presence import Presence, Publish
from warmkv.replicas.block_store.reads import FileReads, WarmPrefix, blocks_to_attach, copy_blocks, keys_to_attach
from warmkv.replicas.block_store.residency import Residency
from warmkv.replicas.block_store.tiers import TierStorage

LEFT = ("demoted", "evicted", "expired", "dropped")
"""Why blocks leave a tier: a lower one has them; to make room, for good; their TTL ran out; an operator's order, or one
before them was lost."""

WAIT_SECONDS = 5.0  # longest time a request waits for its files; then its prompt is computed instead


class BlockStore:
    """Blocks of one replica. Not thread-safe: the engine's thread owns it.

    `publish(stored, evicted, tier)` is told of every full block that leaves the replica, then of those that come to a
    tier, the fastest that has them now. `wake` is called from another thread when a read or a move is done: `settle`.
    Raises DiskTierError, PackError or OSError where the disk's folder or a pack cannot be used.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        identity: Identity,
        device: torch.device,
        clock: Callable[[], float],
        publish: Publish = lambda stored, evicted, tier: None,
        *,
        wake: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
        io_threads: IOThreads | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.enabled, self.block_size = config.enabled, config.block_size
        self.identity, self._dtype, self._device = identity, identity.torch_dtype, device
        self.clock, self._wait_seconds = clock, wait_seconds
        self._wall_clock = wall_clock
        self._jobs = Jobs(io_threads or Threads(device), wake)
        self._reads = FileReads(self._jobs, self._damaged)
        self._packed_keys: set[bytes] = set()  # of packs: never dropped
        tiers = tiers_of(config, identity.shape) if config.enabled else []
        self.lost = {tier.name: 0 for tier in tiers}  # blocks and tails so far: damaged on disk, not brought there
        self.left = {(tier.name, why): 0 for tier in tiers for why in LEFT}  # blocks and tails so far; keys are fixed
        self.residency = Residency()
        self._cache = PrefixCache(tiers, identity.shape.token_bytes, Lifetimes.of(config), config.tenant_share)
        self.places = [TierStorage(tier, self._device_of(tier.name), self._dtype) for tier in tiers]
        self._presence = Presence([tier.name for tier in tiers], self.block_size, publish)
        self._lost: list[set[bytes]] = [set() for _ in tiers]  # of each tier, to be given up
        most = config.moving_limit if len(tiers) > 1 else 0
        self._moves = Moves(self.places, most, self._jobs, self._not_moved, clock, wall_clock)
        for at, place in enumerate(self.places):
            place.pinned = place.tier.name == "host" and device.type == "cuda"
            if place.tier.name == "disk":
                assert config.disk.path is not None
                place.folder = disk.claim(config.disk.path, identity, place.tier.storage)
                self.lost[place.tier.name] += disk.restore(place.folder, self.tree, at, clock(), wall_clock())
        self._note_restored()
        for path in config.packs if config.enabled else ():
            self._packed_keys |= packs.load(path, identity, self.places, self.tree, self._presence.has, clock())
            self._note_restored()

    def _device_of(self, tier: str) -> torch.device:
        return self._device if tier == "device" else torch.device("cpu")

    def _note_restored(self) -> None:
        for change in self.tree.changes():
            self._presence.note(change)
        self._presence.settle()

    def __len__(self) -> int:
        """Return blocks and tails in all tiers; what is in two counts twice."""
        return sum(self._presence.blocks)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the device."""
        return self.tier_bytes.get("device", 0)

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Return the bytes in each tier."""
        return {place.tier.name: space.bytes for place, space in zip(self.places, self.tree.spaces, strict=True)}

    @property
    def tier_limits(self) -> dict[str, int]:
        """Return the bytes that each tier may take."""
        return {place.tier.name: place.tier.capacity for place in self.places}

    @property
    def evicted(self) -> int:
        """Return the blocks and tails that left a tier so far to make room, or were dropped."""
        return sum(self.left.values()) - self.expired

    @property
    def expired(self) -> int:
        """Return the blocks and tails that left a tier so far because their TTL had run out."""
        return sum(count for (_, why), count in self.left.items() if why == "expired")

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes in all tiers that requests are reading."""
        return sum(space.pinned for space in self.tree.spaces)

    @property
    def moving(self) -> int:
        """Return the blocks on their way to a lower tier."""
        return len(self._moves)

    def full_blocks(self) -> dict[str, list[bytes]]:
        """Return keys of the full blocks by the fastest tier that has them, for a snapshot."""
        return self._presence.by_tier()

    def contents(self, most: int) -> Contents:
        """Return what at most `most` blocks are, of all tiers together, by recency."""
        return contents_of(self.tree, most, self.clock(), self._wall_clock())

    @property
    def tree(self) -> RadixTree:
        """Return the rules that it carries out."""
        return self._cache.tree

    def in_pack(self, key: bytes) -> bool:
        """Return True for a block of a pack, which is read from the pack's files at every start."""
        return key in self._packed_keys

    def holds(self, key: bytes) -> bool:
        """Return True if some tier has a key."""
        return self._presence.fastest(key) is not None

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return leading blocks in memory, and in any tier. Any thread may ask; the answer may be a step old."""
        return self._presence.leading(hashes)

    def leaves(self, blocks: int, marks: Sequence[Mark], lifetimes: Lifetimes | None) -> int:
        """Count those of a prompt's leading blocks that are stored once it is computed."""
        return self._cache.leaves(blocks, marks, self.block_size, lifetimes)

    def find(self, key: bytes) -> Packed | None:
        """Return an entry that can be read without a file."""
        return next((packed for place in self.places if (packed := place.find(key)) is not None), None)

    # --- a request's way

    def match(
        self, hashes: Sequence[bytes], reads: Sequence[Candidate], most: int | None = None, *, sums: bool = False
    ) -> WarmPrefix:
        """Find the longest stored prefix of a prompt, pin it, and begin to read what is on disk.

        `reads` are breakpoints, highest first. At most `most` tokens will be attached; with `sums`, only as many as
        there are column sums for.
        """
        if not self.enabled:
            return WarmPrefix()
        self.expire()
        now, cache = self.clock(), self._cache
        match = cache.match(hashes, reads, self.block_size, now)
        self.residency.reused(match.used_at, now)
        warm = WarmPrefix(match, match.tokens if most is None else min(most, match.tokens), since=now)
        if sums:
            warm.reused, warm.sums = cache.match_sums(match, warm.reused, now)
        for key in keys_to_attach(warm, self.block_size):
            packed = self.find(key)
            if packed is None:
                warm.pending.add(key)
            elif key == warm.sums or not any(key in place.blocks for place in self.places):
                warm.read[key] = packed  # sums are not pinned; what is on its way to disk will soon be a file
        for key in warm.pending.copy():
            folder = next(place.folder for place in self.places if place.folder is not None)
            self._reads.begin(folder, key, warm)
        return warm

    def ready(self, warm: WarmPrefix) -> bool:
        """Return True if everything has been read, or has been waited for long enough; the others may decode until
        then.
        """
        return not warm.pending or self.clock() - warm.since >= self._wait_seconds

    def attach(
        self, warm: WarmPrefix, keys: Tensor, values: Tensor, most: float = math.inf
    ) -> tuple[int, Tensor | None] | None:
        """Copy what is warm into a prompt's workspace [layers, kv_heads, T, head_dim], about `most` bytes in a call.

        What a GPU has itself does not count. Returns None while there is more to copy; then the tokens that are there,
        fewer than expected where a file is damaged or late, and their column sums [layers, kv_heads, tokens] where
        these were asked for.
        """
        if warm.to_attach is None:
            self._reads.stop_waiting(warm)
            parts = blocks_to_attach(warm, self.block_size, self.places)
            if warm.sums and (
                warm.sums not in warm.read or sum(span.end - span.start for span, _, _ in parts) < warm.reused
            ):
                parts, warm.sums = [], b""  # they hold for exactly this prefix
            warm.to_attach, warm.tiers = deque(parts), {}
        if not copy_blocks(warm, keys, values, self._dtype, most):
            return None
        sums = unpack(warm.read[warm.sums], self._dtype).to(keys.device) if warm.sums else None
        warm.read.clear()
        warm.reused = sum(warm.tiers.values())
        return warm.reused, sums

    def on_device(self, hashes: Sequence[bytes]) -> list[Tensor]:
        """Return the leading blocks [2, layers, kv_heads, tokens, head_dim] that the device has as they were computed.

        Nobody writes to them, and whoever holds on to one may read it for as long.
        """
        blocks = self.places[0].blocks if self.places and self.places[0].tier.name == "device" else {}
        held = itertools.takewhile(lambda packed: packed is not None, map(blocks.get, hashes))
        plain = itertools.takewhile(lambda packed: packed.storage == "model", (p for p in held if p is not None))
        return [packed.parts[0] for packed in plain]

    def release(self, warm: WarmPrefix) -> None:
        """Let what a request read go; once for each `match`."""
        self._reads.stop_waiting(warm)
        warm.read.clear()
        self._cache.release(warm.match)

    def store(
        self,
        hashes: Sequence[bytes],
        marks: Sequence[Mark],
        keys: Tensor,
        values: Tensor,
        column_sums: Mapping[int, Tensor] | None = None,
        *,
        tenant: str = "",
        warm: WarmPrefix | None = None,
        begun: float | None = None,
        lifetimes: Lifetimes | None = None,
    ) -> int:
        """Keep a computed prompt: keys, values [layers, kv_heads, T, head_dim] of all its tokens, uncompressed.

        The lives of marks are counted from when the request began, `begun`; from now if that is left out.

        `column_sums` [layers, kv_heads, n] are kept for the first n tokens where their KV is. What was read of the
        prompt, `warm`, moves up to the first tier. `lifetimes` are the request's own, if it has any.

        Returns the position of the highest mark that is stored now, 0 if none is: memory may not suffice for all.
        """
        if not self.enabled:
            return 0
        sums = column_sums or {}

        def computed(tier: int, block: HeldBlock) -> Packed:
            if not block.tokens:
                return Packed("model", 0, (sums[block.end],))
            at = slice(block.end - block.tokens, block.end)
            kept = torch.stack([keys[:, :, at], values[:, :, at]])
            return pack(kept, block.tokens, self.places[tier].tier.storage if tier == 0 else "model")

        match, now, size = warm.match if warm is not None else None, self.clock(), self.block_size
        self.apply(self._cache.store(hashes, marks, size, now, tenant, match, begun, lifetimes), computed)
        if sums:
            position, first = next(iter(sums.items()))
            token_bytes = first.nbytes // position
            changes = self._cache.store_sums(hashes, marks, list(sums), token_bytes, size, now, tenant, lifetimes)
            self.apply(changes, computed)
        return self._cache.highest_mark(marks, self.clock())

    # --- beside the requests

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        if self.enabled and (expired := self._cache.expire(self.clock())):
            self.apply(expired)

    def drop(self, tenant: str) -> int:
        """Forget a tenant's entries, packs aside; the bytes freed in all tiers. Takes time in the number of entries."""
        if not self.enabled:
            return 0
        before = sum(self.tier_bytes.values())
        self.tree.drop(tenant, self._packed_keys)
        self.apply(self.tree.changes())
        return before - sum(self.tier_bytes.values())

    def settle(self) -> None:
        """Take note of reads and moves that are done."""
        self._jobs.settle()
        self._give_up_lost()

    def close(self) -> None:
        """Finish what is on its way and let the folder go to another process."""
        self._jobs.close()
        self._give_up_lost()
        for place in self.places:
            if place.folder is not None:
                place.folder.release()

    # --- changes

    def apply(
        self,
        changes: Iterable[Change],
        made: Callable[[int, HeldBlock], Packed | None] = lambda tier, block: None,
    ) -> None:
        """Do what the tree says, in order; if keeping a block fails, it promises none that is not there.

        `made(tier, block)` is asked for what is to be kept.
        """
        failure: Exception | None = None
        for change in changes:
            self._presence.note(change)
            match change:
                case Stored(run, tier):
                    for block in run.blocks():
                        packed = None
                        try:
                            if failure is None and (packed := made(tier, block)) is not None:
                                self._put(block, tier, packed)
                        except Exception as error:  # out of memory, say
                            failure = error
                        if failure is not None or packed is None:
                            self._lose(block.key, tier)
                case Copied(run, source, tier):
                    for block in run.blocks():
                        packed = self.places[source].find(block.key)
                        if packed is not None:
                            self._moves.begin(block, tier, packed)
                        else:
                            self._lose(block.key, tier)
                case Left():
                    self._has_left(change)
        self._give_up_lost()
        if failure is not None:
            raise failure

    def _has_left(self, left: Left) -> None:
        """Let the bytes of what left a tier go, and count it by why it did."""
        run, tier, why = left
        name, count = self.places[tier].tier.name, len(run.keys)
        if why == "evicted":
            demoted = sum(self._presence.is_below(key, tier) for key in run.keys)
            self.left[name, "demoted"] += demoted
            self.left[name, "evicted"] += count - demoted
        else:
            self.left[name, why] += count
        if why != "dropped":
            self.residency.removed(count, run.used_at, run.since, name, self.clock(), evicted=why == "evicted")
        for key in run.keys:
            self._remove(key, tier)

    def _put(self, block: HeldBlock, tier: int, packed: Packed) -> None:
        if tier == 0:
            place = self.places[tier]
            place.blocks[block.key] = packed if place.takes_as_it_is(packed) else place.converted(packed)
        else:
            self._moves.begin(block, tier, packed)
            if not self._moves.keep_alive(block.key, tier, packed):
                self._lose(block.key, tier)

    def _remove(self, key: bytes, tier: int) -> None:
        place = self.places[tier]
        packed = place.find(key)
        place.blocks.pop(key, None)
        self._moves.give_up(key, tier)
        below = tier + 1
        if packed is not None and below < len(self.places) and not self._moves.keep_alive(key, below, packed):
            self._lose(key, below)
        if place.folder is not None:
            self._jobs.submit("write", partial(place.folder.delete, key), lambda result: None)

    def _lose(self, key: bytes, tier: int) -> None:
        """Note that a tier has no bytes of a block: it is to be given up there, with what is behind it."""
        self.lost[self.places[tier].tier.name] += 1
        self._lost[tier].add(key)

    def _give_up_lost(self) -> None:
        """Give up what is lost, and tell routers what changed."""
        while (tier := next((tier for tier, keys in enumerate(self._lost) if keys), None)) is not None:
            keys, self._lost[tier] = self._lost[tier], set()
            self.tree.lose(keys, tier)
            for change in self.tree.changes():
                self._presence.note(change)
                if isinstance(change, Left):
                    self._has_left(change)
        self._presence.tell()

    def _not_moved(self, key: bytes, tier: int) -> None:
        """Take note of a block that could not be brought into a tier, until `settle` ends."""
        self._lose(key, tier)

    def _damaged(self, key: bytes) -> None:
        """Take note of a file that cannot be read, until `settle` ends."""
        self._lose(key, next(at for at, place in enumerate(self.places) if place.folder is not None))
