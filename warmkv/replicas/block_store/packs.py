"""Knowledge packs: folders of blocks that were computed before, and that replicas keep for good.

The format is that of the disk tier, uncompressed. A pack belongs to the tenants it was built for: block hashes are
salted by tenant, so nobody else could find its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from warmkv.faults import UserError
from warmkv.policies.retention import TierIndex
from warmkv.replicas.block_store.disk import BlockFileError, DiskTierError, Folder, Header, entry
from warmkv.replicas.block_store.formats import Packed
from warmkv.replicas.block_store.identity import Identity
from warmkv.replicas.block_store.tiers import TierStorage

log = logging.getLogger(__name__)


class PackError(UserError):
    """A pack that cannot be used; the message says why."""


def read(path: Path, identity: Identity) -> list[tuple[Packed, Header]]:
    """Read all blocks of a pack, each behind the one before it.

    Raises PackError unless it is whole and fits the model.
    """
    folder = Folder(path, identity, "model")
    try:
        manifest = folder.check()
        headers = [found for found in folder.scan() if isinstance(found, Header)]
        if len(headers) != manifest.get("blocks"):
            raise DiskTierError(f"{path} should have {manifest.get('blocks')} blocks, {len(headers)} can be read")
        headers.sort(key=lambda header: header.end)
        return [folder.read(bytes.fromhex(header.key)) for header in headers]
    except (DiskTierError, BlockFileError) as error:
        raise PackError(f"the pack does not fit or is damaged: {error}") from None


def load(path: Path, identity: Identity, places: Sequence[TierStorage], indexes: Sequence[TierIndex]) -> set[bytes]:
    """Keep a pack's blocks for good, in the first tier in memory that has room for all of them; their keys.

    Raises PackError if it does not fit the model or the memory.
    """
    blocks = {bytes.fromhex(header.key): (packed, header) for packed, header in read(path, identity)}
    for place, index in zip(places, indexes, strict=True):
        new = {key: block for key, block in blocks.items() if key not in index}  # packs may begin alike
        needed = sum(place.tier.weigh(header.plain, header.tokens) for _, header in new.values())
        if place.folder is None and index.bytes + needed <= index.capacity:
            break
    else:
        raise PackError(f"pack {path}: no tier in memory has room for its {needed} bytes")
    for key, (packed, header) in new.items():
        if not index.restore(entry(header, 0.0, 0.0), header.parent_key):  # no time of a pack is finite
            raise PackError(f"pack {path} is not complete: the block before {header.key} is missing")
        kept = place.converted(packed)
        place.blocks[key] = kept.map(lambda part: part.pin_memory()) if place.pinned else kept
    index.pin(list(blocks))
    log.info("pack %s: %d blocks in the tier %s", path, len(blocks), place.tier.name)
    return set(blocks)
