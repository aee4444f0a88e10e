"""Blocks as files: safetensors with a checksum, in a folder that says whose KV it holds. Never pickle.

A folder has a `manifest.json` and a file for each block, named after its key. A file is complete or not there: it is
written under another name first. Whatever else lies in the folder is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from warmkv.config import BlockStorage
from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.policies.prefix_tree.nodes import EXPIRED
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.tiers import FILE_BYTES
from warmkv.replicas.block_store.formats import Packed
from warmkv.replicas.block_store.identity import Identity

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, LOCK, SUFFIX, PART = "manifest.json", "lock", ".safetensors", ".part"
MOST_FOLDERS = 256  # replicas of one machine that share a path, and folders of other models in it
# What reading a file raises that is missing, or that has any byte changed.
_DAMAGED = (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


class BlockFileError(ValueError):
    """A file that is damaged, or not what its name says."""


OWNER_ALONE = 0o700
"""Mode of folders: blocks are what tenants sent, as keys and values."""


class DiskTierError(ValueError):
    """A folder that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """Describe a block in its file. Times are Unix time; None is infinity."""

    key: str  # hexadecimal, as `parent`, which is empty for the first block of a prompt
    parent: str
    tenant: str
    plain: int  # bytes uncompressed
    tokens: int
    end: int  # tokens from the start of the prompt
    ttl: float | None
    expires_at: float | None
    mark_ttl: float | None  # 0 where there is no mark
    mark_expires_at: float | None
    storage: BlockStorage
    reads: int = 0


def header(block: HeldBlock, storage: BlockStorage, now: float, wall: float) -> Header:
    """Build the file header of a block; `now` on its clock is the Unix time `wall`."""
    is_marked = block.mark_expires_at > now
    return Header(
        key=block.key.hex(),
        parent=block.parent.hex(),
        tenant=block.tenant,
        plain=block.plain,
        tokens=block.tokens,
        end=block.end,
        ttl=_finite(block.ttl),
        expires_at=_finite(block.expires_at + wall - now),
        mark_ttl=_finite(block.mark_ttl) if is_marked else 0.0,
        mark_expires_at=_finite(block.mark_expires_at + wall - now) if is_marked else 0.0,
        storage=storage,
        reads=block.reads,
    )


def lasting_header(block: HeldBlock, storage: BlockStorage, *, marked: bool) -> Header:
    """Build the header of a block without expiry; `marked` if a breakpoint is readable at its end."""
    mark_ttl, mark_expires_at = (math.inf, math.inf) if marked else (0.0, EXPIRED)
    lasting = block._replace(
        ttl=math.inf, expires_at=math.inf, mark_ttl=mark_ttl, mark_expires_at=mark_expires_at
    )  # fmt: skip
    return header(lasting, storage, 0.0, 0.0)


def block(header: Header, now: float, wall: float) -> HeldBlock:
    """Rebuild the block of a file header."""
    return HeldBlock(
        bytes.fromhex(header.key),
        bytes.fromhex(header.parent),
        header.plain,
        header.tokens,
        header.end,
        header.tenant,
        ttl=_infinite(header.ttl),
        expires_at=_infinite(header.expires_at) + now - wall,
        mark_ttl=_infinite(header.mark_ttl),
        mark_expires_at=_infinite(header.mark_expires_at) + now - wall if header.mark_ttl != 0 else EXPIRED,
        reads=header.reads,
        used_at=math.nan,
        since=math.nan,
    )


def _finite(time: float) -> float | None:
    """Return null for infinity, which JSON does not have."""
    return time if math.isfinite(time) else None


def _infinite(time: float | None) -> float:
    return math.inf if time is None else time


class Folder:
    """Reads and writes blocks of one identity and one storage format. Threads may share it."""

    def __init__(self, path: Path, identity: Identity, storage: BlockStorage) -> None:
        self.path, self.identity, self.storage = path, identity, storage
        self._lock: int | None = None

    # --- whose it is

    def manifest(self) -> dict[str, Any]:
        return {"format": FORMAT, "storage": self.storage, "identity": self.identity.document()}

    def create(self, **more: Any) -> None:
        """Make the folder and its manifest. Raises OSError."""
        self.path.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
        _replace(self.path / MANIFEST, (json.dumps(self.manifest() | more, indent=2) + "\n").encode())

    def check(self) -> dict[str, Any]:
        """Return its manifest. Raises DiskTierError if it cannot be read or belongs to other KV."""
        found = read_manifest(self.path)
        identity, own = found.get("identity"), self.identity
        if unlike := own.differs(identity):
            named = identity.get("model") if isinstance(identity, dict) else "an unknown model"
            whose = f"of {own.model} of another kind" if named == own.model else f"of {named}, not of {own.model}"
            raise DiskTierError(f"{self.path} holds KV {whose}: {unlike}")
        if found.get("storage") != self.storage:
            raise DiskTierError(f"{self.path} is kept as {found.get('storage')!r}, not as {self.storage!r}")
        return found

    def claim(self) -> bool:
        """Take the folder for this process, until it ends; False if another one has it. Raises OSError."""
        lock = lock_folder(self.path)
        if lock is not None:
            self._lock = lock
        return lock is not None

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- blocks

    def file(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / (name + SUFFIX)

    def write(self, packed: Packed, header: Header) -> None:
        """Write a block atomically. Raises OSError, on a full disk for instance; then nothing is left behind."""
        tensors = {str(at): part.contiguous() for at, part in enumerate(packed.parts)}
        text = json.dumps(asdict(header), sort_keys=True)
        metadata = {"header": text, "header_checksum": _checksum(text, {}), "checksum": _checksum(text, tensors)}
        content = safetensors.torch.save(tensors, metadata)
        path = self.file(bytes.fromhex(header.key))
        path.parent.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
        _replace(path, content)

    def read(self, key: bytes) -> tuple[Packed, Header]:
        """Read a block. Raises BlockFileError if the file is missing, damaged or that of another block."""
        path = self.file(key)
        try:
            content = path.read_bytes()
            tensors = safetensors.torch.load(content)
            header, checksum = _metadata(content[8 : 8 + int.from_bytes(content[:8], "little")])
            if _checksum(json.dumps(asdict(header), sort_keys=True), tensors) != checksum:
                raise ValueError("its checksum does not agree")
        except _DAMAGED as error:
            raise BlockFileError(f"{path} cannot be read: {error}") from None
        if header.key != key.hex() or header.storage not in (self.storage, "model"):
            raise BlockFileError(f"{path} holds another block")
        return Packed(header.storage, header.tokens, tuple(tensors[str(at)] for at in range(len(tensors)))), header

    def delete(self, key: bytes) -> None:
        self.file(key).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the unfinished files of a process that was killed."""
        for path in self.path.glob(f"??/*{SUFFIX}{PART}"):
            path.unlink(missing_ok=True)

    def scan(self) -> Iterator[Header | Path]:
        """Yield the headers of all blocks in no order, and the paths of files that look like one but are not."""
        return scan_blocks(self.path)


def lock_folder(path: Path) -> int | None:
    """Make a folder and lock it, until the descriptor is closed; None if another process has it. Raises OSError."""
    path.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise  # such as that of a file system without locks
    return lock


def scan_blocks(folder: Path) -> Iterator[Header | Path]:
    """Yield the headers of all blocks in no order, and the paths of files that look like one but are not."""
    for path in folder.glob(f"??/*{SUFFIX}"):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > FILE_BYTES:
                    raise ValueError("its header is too long")
                text = file.read(length)
                size = os.fstat(file.fileno()).st_size - 8 - length
            header, _ = _metadata(text)
            if path.name != header.key + SUFFIX or size != _data_bytes(text):
                raise ValueError("it is cut short, or renamed")
        except _DAMAGED as error:
            log.warning("%s is no block and is skipped: %s", path, error)
            yield path
        else:
            yield header


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder. Raises DiskTierError if there is none that can be read."""
    try:
        found = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DiskTierError(f"{path} has no manifest that can be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DiskTierError(f"{path} is not of format {FORMAT}")
    return found


def claim(path: Path, identity: Identity, storage: BlockStorage) -> Folder:
    """Claim the first of the folders 0, 1, ... in `path` that is free and holds KV of this kind, or nothing yet.

    So replicas of one machine do not meet, and one that starts again finds what another left. Folders of other models
    are reported and skipped. Raises DiskTierError if all are taken, OSError if the path cannot be written.
    """
    for number in range(MOST_FOLDERS):
        folder = Folder(path / str(number), identity, storage)
        if not folder.claim():
            continue
        if {entry.name for entry in folder.path.iterdir()} == {LOCK}:
            folder.create()
            return folder
        try:
            folder.check()
        except DiskTierError as error:
            log.warning("skipped: %s", error)
            folder.release()
        else:
            return folder
    raise DiskTierError(f"{path} has no folder left for a replica: delete what is not needed there")


def restore(folder: Folder, tree: RadixTree, tier: int, now: float, wall: float) -> int:
    """Take up the blocks of a folder that still live, with the chain before them, and remove the files of the others.

    `now` is the tree's time at the Unix time `wall`. Returns how many files were damaged.
    """
    folder.tidy()
    found = list(folder.scan())
    damaged = [path for path in found if isinstance(path, Path)]
    for path in damaged:
        path.unlink(missing_ok=True)
    blocks = [block(header, now, wall) for header in found if isinstance(header, Header)]
    alive = [each for each in blocks if each.expires_at > now]
    alive.sort(key=lambda each: (each.end, not each.tokens))  # each behind what it follows
    gone = [*tree.restore(tier, alive), *(each for each in blocks if each.expires_at <= now)]
    for each in gone:
        folder.delete(each.key)
    if found:
        log.info("%d of %d blocks in %s are taken up", len(blocks) - len(gone), len(found), folder.path)
    return len(damaged)


def _metadata(text: bytes) -> tuple[Header, str]:
    """Return header and checksum in the JSON of a safetensors file. Raises one of _DAMAGED if it was changed."""
    metadata = json.loads(text)["__metadata__"]
    header = metadata["header"]
    if _checksum(header, {}) != metadata["header_checksum"]:
        raise ValueError("the checksum of its header does not agree")
    return Header(**json.loads(header)), metadata["checksum"]


def _data_bytes(text: bytes) -> int:
    parts = (part for name, part in json.loads(text).items() if name != "__metadata__")
    return max(int(part["data_offsets"][1]) for part in parts)


def _checksum(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors, key=int):
        part = tensors[name]
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        digest.update(cast("np.ndarray[Any, Any]", part.contiguous().view(-1).view(torch.uint8).numpy()).data)
    return digest.hexdigest()


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + PART)
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
