"""Blocks on their way from one replica's store to another's: as numpy arrays and plain values, checked on arrival.

A block arrives as its donor keeps it, with what is left of its lives there, so it is found and billed as it would be
on the donor. Whatever is not exactly what it should be is left out, and computed instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from warmkv.policies.entry import Entry
from warmkv.policies.prefix_cache import sums_key
from warmkv.replicas.block_store import disk
from warmkv.replicas.block_store.disk import Header
from warmkv.replicas.block_store.formats import Packed, pack
from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.store import BlockStore

StoredBlock = tuple[Header, Packed]


class PayloadError(ValueError):
    """A payload that is not a block of this identity and format."""


@dataclass(frozen=True, slots=True)
class BlockPayload:
    """A block on the wire. Times in the header are remaining seconds."""

    header: Header
    arrays: tuple[np.ndarray[Any, Any], ...]  # bytes of each part
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def seal(stored: StoredBlock) -> BlockPayload:
    """Pack a block for transfer. It shares the memory of a block on a CPU, and copies from a GPU."""
    header, packed = stored
    parts = [part.cpu().contiguous() for part in packed.parts]
    return BlockPayload(
        header,
        tuple(part.view(-1).view(torch.uint8).numpy() for part in parts),
        tuple(str(part.dtype).removeprefix("torch.") for part in parts),
        tuple(tuple(part.shape) for part in parts),
    )


def unseal(payload: BlockPayload, identity: Identity, formats: Sequence[str]) -> StoredBlock:
    """Unpack a transferred block into memory of its own.

    Raises PayloadError unless it is a block of this identity in one of these formats, of exactly the right size.
    """
    header = payload.header
    whole = 0 < header.tokens <= identity.block_size and header.plain == header.tokens * identity.shape.token_bytes
    if header.tokens and not (whole and header.storage in formats):
        raise PayloadError(f"{header.tokens} tokens in {header.plain} bytes as {header.storage} are no block of ours")
    for time in (header.ttl, header.expires_at, header.mark_ttl, header.mark_expires_at):
        if time is not None and not math.isfinite(time):
            raise PayloadError("its lives are no times")
    kinds = tuple(zip(payload.dtypes, payload.shapes, strict=True))
    if kinds != _kinds(header, identity):
        raise PayloadError(f"{kinds} is not what {header.tokens} tokens up to {header.end} consist of")
    parts = []
    for array, (dtype, shape) in zip(payload.arrays, kinds, strict=True):
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        if array.dtype != np.uint8 or array.shape != (size,):
            raise PayloadError(f"{array.shape} bytes are not {size}")
        own = torch.empty(size, dtype=torch.uint8)
        cast("np.ndarray[Any, Any]", own.numpy())[:] = array  # what came may be read-only and in shared memory
        parts.append(own.view(getattr(torch, dtype)).view(shape))
    return header, Packed(header.storage, header.tokens, tuple(parts))


def _kinds(header: Header, identity: Identity) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return types and shapes of the parts that a block or column sums must have."""
    shape = identity.shape
    if header.tokens:
        size = (2, shape.layers, shape.kv_heads, header.tokens, shape.head_dim)
        parts = pack(torch.zeros(size, dtype=identity.torch_dtype), header.tokens, header.storage).parts
    else:
        parts = (torch.empty(shape.layers, shape.kv_heads, header.end),)
        if header.storage != "model" or header.plain != parts[0].nbytes:
            raise PayloadError(f"{header.plain} bytes are no column sums of {header.end} tokens")
    return tuple((str(part.dtype).removeprefix("torch."), tuple(part.shape)) for part in parts)


def lend(
    store: BlockStore, keys: Sequence[bytes], tails: Sequence[bytes], most: int, *, sums: bool = False
) -> tuple[list[StoredBlock], bool]:
    """Return consecutive blocks of a chain that are in memory, up to the first that is not, and at last tails behind
    them.

    At most `most` bytes of blocks, but at least one; then there may be more, which the second value tells. With `sums`,
    no more of the chain than there are column sums for, and these as well.
    """
    present = next((at for at, key in enumerate(keys) if store.find(key) is None), len(keys))
    beside = [stored for key in tails if (stored := _find(store, key)) is not None]
    if sums:
        ends = {key: at for at, key in enumerate(keys[:present])}
        ends |= {bytes.fromhex(tail.key): ends.get(tail.parent_key or b"", -1) for tail, _ in beside}
        summed = {key: stored for key in ends if (stored := _find(store, sums_key(key))) is not None}
        present = 1 + max((ends[key] for key in summed), default=-1)
        beside += summed.values()
        if not summed:
            return [], False
    found: list[StoredBlock] = []
    total = 0
    for key in keys[:present]:
        stored = _find(store, key)
        if stored is None:
            break
        total += stored[1].nbytes
        if found and total > most:
            return found, True
        found.append(stored)
    return found + beside, False


def take(store: BlockStore, blocks: Sequence[StoredBlock]) -> int:
    """Keep blocks of another replica, each behind the one before it, within all limits; how many are held now.

    What does not follow anything that is in memory here is left out.
    """
    now, arrived = store.clock(), {bytes.fromhex(header.key): packed for header, packed in blocks}
    for run in _runs([header for header, _ in blocks]):
        parent = run[0].parent_key
        path = [] if parent is None else _path(store, parent)
        if path is None or run[0].end != (path[-1].end if path else 0) + run[0].tokens:
            continue
        chain = [*path, *(disk.entry(header, now, 0.0) for header in run)]
        steps = ((step, None) for step in store.tiers.adopt(chain, now))
        store.apply(steps, lambda tier, key, span: arrived.get(key) or store.find(key))
    return sum(key in store.tiers for key in arrived)


def hottest(store: BlockStore, most: int) -> tuple[list[tuple[bytes, ...]], dict[bytes, StoredBlock]]:
    """Return chains in memory, what would be evicted last first, and their entries, together at most `most` bytes.

    Of the chain that does not fit there is the beginning.
    """
    chains: list[tuple[bytes, ...]] = []
    found: dict[bytes, StoredBlock] = {}
    indexes = [index for place, index in zip(store.places, store.tiers.indexes, strict=True) if place.folder is None]
    for end in (end for index in indexes for end in index.by_worth()):
        chain = [entry.key for entry in end.path()]
        for held, key in enumerate(chain):
            stored = found.get(key) or _find(store, key)
            if stored is None:  # on disk alone, say: nothing can follow it
                chain = chain[:held]
                break
            if key not in found:
                most -= stored[1].nbytes
                if most < 0:
                    return [*chains, tuple(chain[:held])] if held else chains, found
                found[key] = stored
        if chain:
            chains.append(tuple(chain))
    return chains, found


def _find(store: BlockStore, key: bytes) -> StoredBlock | None:
    """Return an unexpired entry whose bytes are in memory."""
    packed, entry, now = store.find(key), _entry(store, key), store.clock()
    if packed is None or entry is None:
        return None
    return disk.header(entry, packed.storage, now, 0.0), packed


def _entry(store: BlockStore, key: bytes) -> Entry | None:
    for place, index in zip(store.places, store.tiers.indexes, strict=True):
        if place.folder is None and key in index and (entry := index.entry(key)) is not None:
            return entry if entry.expires_at > store.clock() else None
    return None


def _path(store: BlockStore, key: bytes) -> list[Entry] | None:
    """Return the chain up to an unexpired entry, if all of it is in memory."""
    entry = _entry(store, key)
    path = entry.path() if entry is not None else []
    return path if path and all(store.find(before.key) is not None for before in path) else None


def _runs(headers: Sequence[Header]) -> Iterator[list[Header]]:
    """Yield parts of which each header follows the one before it."""
    run: list[Header] = []
    for header in headers:
        if run and (header.parent != run[-1].key or header.end != run[-1].end + header.tokens):
            yield run
            run = []
        run.append(header)
    if run:
        yield run
