"""Knowledge packs: folders of blocks that were computed before, and that replicas keep for good.

The format is that of the disk tier, uncompressed. A pack belongs to the tenants it was built for: block hashes are
salted by tenant, so nobody else could find its blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warmkv.faults import UserError
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.prefixes.roots import Roots
from warmkv.replicas.block_store.disk import (
    BlockFileError,
    DiskTierError,
    Folder,
    Header,
    block,
    read_manifest,
    scan_blocks,
)
from warmkv.replicas.block_store.formats import Packed
from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.tiers import TierStorage

log = logging.getLogger(__name__)


class PackError(UserError):
    """A pack that cannot be used; the message says why."""


def pack_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a pack. Raises PackError where there is none, or not a whole one."""
    try:
        manifest = read_manifest(path)
    except DiskTierError as error:
        raise PackError(f"no pack: {error}") from None
    if lacking := [name for name in ("identity", "roots", "documents", "blocks") if name not in manifest]:
        raise PackError(f"pack {path}: its manifest has no {', '.join(lacking)}; build it again")
    return manifest


def check_roots(path: Path, roots: Roots) -> None:
    """Raise PackError if no request with these roots could ever read a block of the pack."""
    if why := roots.mismatch(pack_manifest(path)["roots"]):
        raise PackError(f"pack {path}: no request could read it: {why}")


def check_files(path: Path, block_size: int) -> None:
    """Raise PackError unless all blocks are there and of this size. Without the model, and without reading tensors."""
    manifest = pack_manifest(path)
    if (size := manifest["identity"]["block_size"]) != block_size:
        raise PackError(f"pack {path}: its blocks have {size} tokens, not {block_size} (prefix_cache.block_size)")
    try:
        _headers(path, manifest)
    except DiskTierError as error:
        raise PackError(f"the pack is damaged: {error}") from None


def _headers(path: Path, manifest: Mapping[str, Any]) -> list[Header]:
    """Return the headers of all blocks. Raises DiskTierError if there are not as many as the manifest says."""
    headers = [found for found in scan_blocks(path) if isinstance(found, Header)]
    if len(headers) != manifest.get("blocks"):
        raise DiskTierError(f"{path} should have {manifest.get('blocks')} blocks, {len(headers)} can be read")
    return headers


def read(path: Path, identity: Identity) -> list[tuple[Packed, Header]]:
    """Read all blocks of a pack, each behind the one before it.

    Raises PackError unless it is whole and fits the model.
    """
    folder = Folder(path, identity, "model")
    try:
        manifest = folder.check()
        headers = sorted(_headers(path, manifest), key=lambda header: header.end)
        return [folder.read(bytes.fromhex(header.key)) for header in headers]
    except (DiskTierError, BlockFileError) as error:
        raise PackError(f"the pack does not fit or is damaged: {error}") from None


def load(
    path: Path,
    identity: Identity,
    places: Sequence[TierStorage],
    tree: RadixTree,
    has: Callable[[bytes, int], bool],
    now: float,
) -> set[bytes]:
    """Keep a pack's blocks for good, in the first tier in memory that has room for all of them; their keys.

    `has(key, tier)` tells what is there. Raises PackError if it does not fit the model or the memory.
    """
    packed = {bytes.fromhex(header.key): (kept, block(header, 0.0, 0.0)) for kept, header in read(path, identity)}
    lacking = []
    for tier, place in enumerate(places):
        if place.folder is not None:
            continue
        new = [each for _, each in packed.values() if not has(each.key, tier)]  # packs may begin alike
        needed = sum(place.tier.weigh(each.plain, each.tokens) for each in new)
        name, free = place.tier.name, place.tier.capacity - tree.spaces[tier].bytes
        if needed <= free:
            break
        setting = f"prefix_cache{'' if tier == 0 else f'.{name}'}.memory_bytes"
        lacking.append(f"{needed:,} bytes are needed in the tier {name} and {free:,} are free; raise {setting}")
    else:
        raise PackError(f"no tier in memory has room for the pack {path}: {'; or '.join(lacking)}")
    if left_out := tree.restore(tier, new):
        raise PackError(f"pack {path} is not complete: the block before {left_out[0].key.hex()} is missing")
    for each in new:
        converted = place.converted(packed[each.key][0])
        place.blocks[each.key] = converted.map(lambda part: part.pin_memory()) if place.pinned else converted
    followed = {each.parent for _, each in packed.values()}
    for _, each in packed.values():
        if each.mark_ttl or each.key not in followed:
            node = tree.ending(each.key)
            assert node is not None
            tree.prolong(node.path(), math.inf, now)  # a lower tier may have had it, for less time
            if each.mark_ttl:
                tree.mark(node, math.inf, now)
            tree.pin(node.path(), tier)
    log.info("pack %s: %d blocks in the tier %s", path, len(packed), place.tier.name)
    return set(packed)
