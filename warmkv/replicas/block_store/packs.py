"""Knowledge packs: folders of blocks that were computed before, and that replicas keep for good.

The format is that of the disk tier, uncompressed. A pack belongs to the tenants it was built for: block hashes are
salted by tenant, so nobody else could find its blocks.
"""

from __future__ import annotations

from pathlib import Path

from warmkv.replicas.block_store.disk import BlockFileError, Folder, FolderError, Header
from warmkv.replicas.block_store.formats import Packed
from warmkv.replicas.block_store.identity import Identity


class PackError(ValueError):
    """A pack that cannot be used; the message says why."""


def read(path: Path, identity: Identity) -> list[tuple[Packed, Header]]:
    """All blocks of a pack, each behind the one before it. Raises PackError unless it is whole and fits the model."""
    folder = Folder(path, identity, "model")
    try:
        manifest = folder.check()
        headers = [found for found in folder.scan() if isinstance(found, Header)]
        if len(headers) != manifest.get("blocks"):
            raise FolderError(f"{path} should have {manifest.get('blocks')} blocks, {len(headers)} can be read")
        headers.sort(key=lambda header: header.end)
        return [folder.read(bytes.fromhex(header.key)) for header in headers]
    except (FolderError, BlockFileError) as error:
        raise PackError(f"the pack does not fit or is damaged: {error}") from None
