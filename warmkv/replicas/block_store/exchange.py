"""Blocks on their way from one replica's store to another's: as numpy arrays and plain values, checked on arrival.

A block arrives as its donor keeps it, with what is left of its lives there, so it is found and billed as it would be
on the donor. Whatever is not exactly what it should be is left out, and computed instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.policies.prefix_tree.nodes import Node
from warmkv.policies.prefix_tree.tree import Path
from warmkv.policies.transfer import pieces
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
    store: BlockStore, keys: Sequence[bytes], first: int, tails: Sequence[bytes], most: int, *, sums: bool = False
) -> tuple[list[StoredBlock], bool]:
    """Return a prompt's consecutive blocks in memory from number `first` on, then the tails behind them.

    At most `most` bytes of blocks, but at least one; the second value tells if there are more. With `sums`, the chain
    ends at the last stored column sums, which come along.
    """
    path = store.tree.find(keys)
    chain = _in_memory(store, path)
    ends = list(itertools.accumulate(node.length for node in path))
    found = [node for key in tails if (node := store.tree.starting(key)) is not None]
    beside = [(node, stored) for node in found for stored in _in_memory(store, [node])]
    if sums:
        behind = [(end, node) for end, node in zip(ends, path, strict=True) if end <= len(chain)]
        behind += [(ends[path.index(node.parent)] if node.parent in path else 0, node) for node, _ in beside]
        summed = [
            (end, node.sums, stored) for end, node in behind if node.sums for stored in _in_memory(store, [node.sums])
        ]
        if not summed:
            return [], False
        chain = chain[: max(end for end, _, _ in summed)]
        beside += [(node, stored) for _, node, stored in summed]
    wanted = chain[first:]
    piece = next(pieces((packed.nbytes for _, packed in wanted), most), range(0))
    more = piece.stop < len(wanted)
    lent = wanted[: piece.stop] if more else wanted + [stored for _, stored in beside]
    return [_with_header(store, *stored) for stored in lent], more


def take(store: BlockStore, blocks: Sequence[StoredBlock]) -> int:
    """Store another replica's blocks, each behind its predecessor, within all limits; return how many are held now.

    Blocks whose predecessor is not in memory here are skipped.
    """
    store.expire()
    now, arrived = store.clock(), {bytes.fromhex(header.key): packed for header, packed in blocks}
    for run in _runs([disk.block(header, now, 0.0) for header, _ in blocks]):
        parent = store.tree.ending(run[0].parent) if store.holds(run[0].parent) else None
        before = parent.end if parent is not None else 0
        if (run[0].parent and not _is_in_memory(store, parent)) or run[0].end != before + run[0].tokens:
            continue
        store.tree.adopt(parent, run, now)
        store.apply(store.tree.changes(), lambda tier, block: arrived.get(block.key) or store.find(block.key))
    return sum(store.holds(key) for key in arrived)


def hottest(store: BlockStore, most: int) -> tuple[list[tuple[bytes, ...]], dict[bytes, StoredBlock]]:
    """Return chains in memory, the last to be evicted first, and their blocks, at most `most` bytes together.

    The last chain may be cut short.
    """
    chains: list[tuple[bytes, ...]] = []
    found: dict[bytes, StoredBlock] = {}
    store.expire()
    for path, held in (end for tier in _memory(store) for end in store.tree.by_worth(tier)):
        blocks = sum(node.length for node in path[:-1]) + held
        chain = _in_memory(store, path)[:blocks]
        keys = tuple(block.key for block, _ in chain)
        for at, (block, packed) in enumerate(chain):
            if block.key not in found:
                most -= packed.nbytes
                if most < 0:
                    return [*chains, keys[:at]] if at else chains, found
                found[block.key] = _with_header(store, block, packed)
        if chain:
            chains.append(keys)
    return chains, found


def _memory(store: BlockStore) -> list[int]:
    """Return the tiers in memory."""
    return [tier for tier, place in enumerate(store.places) if place.folder is None]


def _with_header(store: BlockStore, block: HeldBlock, packed: Packed) -> StoredBlock:
    return disk.header(block, packed.storage, store.clock(), 0.0), packed


def _in_memory(store: BlockStore, path: Path) -> list[tuple[HeldBlock, Packed]]:
    """Return the leading blocks of nodes that are in memory and have not expired.

    Of a long prompt these are looked at for every piece that is lent or taken.
    """
    found, now = [], store.clock()
    for block in store.tree.held(path, _memory(store)):
        packed = store.find(block.key)
        if packed is None or block.expires_at <= now:
            break
        found.append((block, packed))
    return found


def _is_in_memory(store: BlockStore, node: Node | None) -> bool:
    """Return True if a node and all before it are in memory."""
    path = node.path() if node is not None else []
    return bool(path) and len(_in_memory(store, path)) == sum(each.length for each in path)


def _runs(blocks: Sequence[HeldBlock]) -> Iterator[list[HeldBlock]]:
    """Yield runs of blocks, each of which follows the one before it."""
    run: list[HeldBlock] = []
    for block in blocks:
        if run and (block.parent != run[-1].key or block.end != run[-1].end + block.tokens):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
