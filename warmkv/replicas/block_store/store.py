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
from warmkv.policies.entry import Entry
from warmkv.policies.prefix_cache import Lifetimes, PrefixCache, Span, spans
from warmkv.policies.tiers import Copied, Left, Step, Stored, Tiers, tiers_of
from warmkv.prefixes.record import Candidate, Mark
from warmkv.replicas.block_store import disk, packs
from warmkv.replicas.block_store.disk import Folder
from warmkv.replicas.block_store.formats import Packed, pack, unpack
from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.io_threads import IOThreads, Jobs, Threads
from warmkv.replicas.block_store.moves import Moves
from warmkv.replicas.block_store.published import PublishedBlocks
from warmkv.replicas.block_store.reads import FileReads, WarmPrefix, copy_left
from warmkv.replicas.block_store.residency import Residency
from warmkv.replicas.block_store.tiers import TierStorage

LEFT = ("demoted", "evicted", "expired", "dropped")
"""Why blocks leave a tier: a lower one has them; to make room, for good; their TTL ran out; an operator's order."""

WAIT_SECONDS = 5.0  # longest time a request waits for its files; then its prompt is computed instead


class BlockStore:
    """Blocks of one replica. Not thread-safe: the engine's thread owns it.

    `publish(stored, evicted, tier)` is told of every full block that leaves the replica, then of those that come to a
    tier, the fastest that has them now. `wake` is called from another thread when a read or a move is done: `settle`.
    Raises FolderError, PackError or OSError where the disk's folder or a pack cannot be used.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        identity: Identity,
        device: torch.device,
        clock: Callable[[], float],
        publish: Callable[[Sequence[bytes], Sequence[bytes], str], None] = lambda stored, evicted, tier: None,
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
        self._jobs = Jobs(io_threads or Threads(), wake)
        self._reads = FileReads(self._jobs, self._damaged)
        self._packed_keys: set[bytes] = set()  # of packs: never dropped
        self.lost_blocks = 0  # that were damaged on disk, or could not be moved down
        tiers = tiers_of(config, identity.shape) if config.enabled else []
        self.left = {(tier.name, why): 0 for tier in tiers for why in LEFT}  # blocks and tails so far; keys are fixed
        self.residency = Residency()
        self._cache = PrefixCache(tiers, identity.shape.token_bytes, Lifetimes.of(config), config.tenant_share)
        self.places = [TierStorage(tier, self._device_of(tier.name), self._dtype) for tier in tiers]
        for place in self.places:
            place.pinned = place.tier.name == "host" and device.type == "cuda"
            if place.tier.name == "disk":
                assert config.disk.path is not None
                place.folder = disk.claim(config.disk.path, identity, place.tier.storage)
                self.lost_blocks += disk.restore(place.folder, self._cache.tiers.indexes[-1], clock(), wall_clock())
        indexes, limit = self._cache.tiers.indexes, int(config.moving_bytes)
        self._moves = Moves(self.places, indexes, limit, self._jobs, self._not_moved, clock, wall_clock)
        for path in config.packs if config.enabled else ():
            self._packed_keys |= packs.load(path, identity, self.places, self._cache.tiers.indexes)
        self._published = PublishedBlocks(self._cache.tiers, self.block_size, publish)

    def _device_of(self, tier: str) -> torch.device:
        return self._device if tier == "device" else torch.device("cpu")

    def __len__(self) -> int:
        """Return blocks and tails in all tiers; what is in two counts twice."""
        return sum(len(tier_index) for tier_index in self._cache.tiers.indexes)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the device."""
        return self.tier_bytes.get("device", 0)

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Return the bytes in each tier."""
        return {
            t.name: tier_index.bytes
            for t, tier_index in zip(self._cache.tiers.tiers, self._cache.tiers.indexes, strict=True)
        }

    @property
    def tier_limits(self) -> dict[str, int]:
        """Return the bytes that each tier may take."""
        return {tier.name: tier.capacity for tier in self._cache.tiers.tiers}

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
        return sum(tier_index.pinned_bytes for tier_index in self._cache.tiers.indexes)

    @property
    def moving(self) -> int:
        """Return the blocks on their way to a lower tier."""
        return len(self._moves)

    def full_blocks(self) -> dict[str, list[bytes]]:
        """Return keys of the full blocks by the fastest tier that has them, for a snapshot."""
        return self._published.by_tier()

    def contents(self, most: int) -> Contents:
        """Return what at most `most` blocks are, of all tiers together, by recency."""
        return contents_of(self._cache.tiers, most, self.clock(), self._wall_clock())

    @property
    def tiers(self) -> Tiers:
        """Return the rules that it carries out."""
        return self._cache.tiers

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return leading blocks in memory, and in any tier. Any thread may ask; the answer may be a step old."""
        return self._published.leading(hashes)

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
        now, cache = self.clock(), self._cache
        match = cache.match(hashes, reads, self.block_size, now)
        self.residency.reused(match.used_at, now)
        warm = WarmPrefix(match, match.tokens if most is None else min(most, match.tokens), since=now)
        if sums:
            warm.reused, warm.sums = cache.match_sums(match, self.block_size, warm.reused, now)
        for key in self._keys_to_attach(warm):
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
        if warm.left is None:
            self._reads.stop_waiting(warm)
            parts = self._parts(warm)
            if warm.sums and (
                warm.sums not in warm.read or sum(span.end - span.start for span, _, _ in parts) < warm.reused
            ):
                parts, warm.sums = [], b""  # they hold for exactly this prefix
            warm.left, warm.tiers = deque(parts), {}
        if not copy_left(warm, keys, values, self._dtype, most):
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

        def computed(tier: int, key: bytes, span: Span | None) -> Packed:
            assert span is not None
            if span.sums:
                return Packed("model", 0, (sums[span.end],))
            at = slice(span.start, span.end)
            block = torch.stack([keys[:, :, at], values[:, :, at]])
            return pack(block, span.end - span.start, self.places[tier].tier.storage if tier == 0 else "model")

        match, now, size = warm.match if warm is not None else None, self.clock(), self.block_size
        self.apply(self._cache.store(hashes, marks, size, now, tenant, match, begun, lifetimes), computed)
        if sums:
            position, first = next(iter(sums.items()))
            token_bytes = first.nbytes // position
            steps = self._cache.store_sums(hashes, marks, list(sums), token_bytes, size, now, tenant, lifetimes)
            self.apply(steps, computed)
        return self._cache.highest_mark(marks, self.clock())

    # --- beside the requests

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        if self.enabled:
            self.apply((step, None) for step in self._cache.tiers.expire(self.clock()))

    def drop(self, tenant: str) -> int:
        """Forget a tenant's entries, packs aside; the bytes freed in all tiers. Takes time in the number of entries."""
        if not self.enabled:
            return 0
        tiers, before = self._cache.tiers, sum(self.tier_bytes.values())
        keys = {key for tier_index in tiers.indexes for key in tier_index.keys_of(tenant)} - self._packed_keys
        self.apply((step, None) for step in tiers.drop(list(keys)))
        return before - sum(self.tier_bytes.values())

    def settle(self) -> None:
        """Take note of reads and moves that are done."""
        self._jobs.settle()

    def close(self) -> None:
        """Finish what is on its way and let the folder go to another process."""
        self._jobs.close()
        for place in self.places:
            if place.folder is not None:
                place.folder.release()

    def export(self, chain: Sequence[bytes], folder: Folder) -> dict[bytes, int]:
        """Write a chain from memory into a pack's folder, to live for good; the bytes by key. Raises PackError."""
        written = {}
        for key in chain:
            packed, entry = self.find(key), self._cache.tiers.indexes[0].entry(key)
            if packed is None or entry is None:
                raise packs.PackError("memory does not suffice for the pack: raise prefix_cache.memory_bytes")
            held = packed.map(lambda part: part.cpu())
            folder.write(held, disk.lasting_header(entry, packed.storage, marked=entry.mark_expires_at > self.clock()))
            written[key] = held.nbytes
        return written

    # --- steps

    def apply(
        self,
        steps: Iterable[tuple[Step, Span | None]],
        made: Callable[[int, bytes, Span | None], Packed | None] = lambda tier, key, span: None,
    ) -> None:
        """Do what the rules say, step by step; if keeping a block fails, the index promises none that is not there.

        `made(tier, key, span)` is asked for what is to be kept.
        """
        changed: list[bytes] = []
        failure: Exception | None = None
        for step, span in steps:
            changed.append(step.key)
            match step:
                case Stored(key, tier):
                    packed = None
                    try:
                        if failure is None and (packed := made(tier, key, span)) is not None:
                            self._put(key, tier, packed)
                    except Exception as error:  # out of memory, say
                        failure = error
                    if failure is not None or packed is None:
                        self._lose(key, tier)
                case Copied(key, source, tier):
                    packed = self.places[source].find(key)
                    if packed is not None:
                        self._moves.begin(key, tier, packed)
                    else:
                        self._lose(key, tier)
                case Left(key, tier, expired, entry):
                    self._count(key, tier, entry, expired=expired)
                    self._remove(key, tier)
        self._published.tell(changed)
        if failure is not None:
            raise failure

    def _count(self, key: bytes, tier: int, entry: Entry | None, *, expired: bool) -> None:
        """Count a block that leaves a tier by why it does; of those that are dropped there is no entry."""
        name, below = self.places[tier].tier.name, self._cache.tiers.indexes[tier + 1 :]
        if entry is None:
            self.left[name, "dropped"] += 1
            return
        why = "expired" if expired else "demoted" if any(key in tier_index for tier_index in below) else "evicted"
        self.left[name, why] += 1
        self.residency.left(entry, name, self.clock(), evicted=not expired)

    def _put(self, key: bytes, tier: int, packed: Packed) -> None:
        if tier == 0:
            place = self.places[tier]
            place.blocks[key] = packed if place.takes_as_it_is(packed) else place.converted(packed)
        else:
            self._moves.begin(key, tier, packed)
            if not self._moves.leave_alone(key, tier, packed):
                self._lose(key, tier)

    def _remove(self, key: bytes, tier: int) -> None:
        place = self.places[tier]
        packed = place.find(key)
        place.blocks.pop(key, None)
        self._moves.give_up(key, tier)
        below = tier + 1
        if packed is not None and below < len(self.places) and not self._moves.leave_alone(key, below, packed):
            self._lose(key, below)
        if place.folder is not None:
            self._jobs.submit("write", partial(place.folder.delete, key), lambda result: None)

    def _lose(self, key: bytes, tier: int) -> None:
        """Mark a block missing in a tier."""
        self.lost_blocks += 1
        self._cache.tiers.indexes[tier].lose(key)

    def _not_moved(self, key: bytes, tier: int) -> None:
        """Take note of a block that could not be brought into a tier."""
        self._lose(key, tier)
        self._published.tell([key])

    def _damaged(self, key: bytes) -> None:
        """Take note of a file that cannot be read."""
        tier = next(at for at, place in enumerate(self.places) if place.folder is not None)
        self._lose(key, tier)
        self._remove(key, tier)
        self._published.tell([key])

    # --- what to attach

    def _keys_to_attach(self, warm: WarmPrefix) -> list[bytes]:
        chain = spans(warm.match.chain, warm.match.tokens, self.block_size)
        keys = [span.key for span in chain if span.start < warm.reused]
        return [*keys, warm.sums] if warm.sums else keys

    def find(self, key: bytes) -> Packed | None:
        """Return an entry that can be read without a file."""
        return next((packed for place in self.places if (packed := place.find(key)) is not None), None)

    def _parts(self, warm: WarmPrefix) -> list[tuple[Span, Packed, str]]:
        """Return the blocks to attach with their tiers, up to the first that is missing."""
        found = []
        for span in spans(warm.match.chain, warm.match.tokens, self.block_size):
            if span.start >= warm.reused:
                break
            at = next((place for place in self.places if place.find(span.key) is not None), None)
            packed = at.find(span.key) if at is not None else warm.read.get(span.key)
            if packed is None:
                break
            name = at.tier.name if at is not None else "disk"
            found.append((Span(span.key, span.start, min(span.end, warm.reused)), packed, name))
        return found
