"""What a prefix is called: chained, tenant-salted hashes of token blocks.

The hash of a block covers everything before it, so equal hashes mean equal prefixes, and whoever holds a block's KV
for a request holds (or held) all blocks before it. The root of the chain covers the tenant's salt and everything
else that changes KV (model, revision, dtype), so unlike prefixes never meet.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.integer[Any]]

DIGEST_BYTES = 16  # 128 bits: a collision among 10^12 blocks has a chance of about 10^-15


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Derive the salt of a tenant on the server, so that no client can choose or guess it."""
    return hmac.digest(secret, tenant.encode("utf-8", "surrogatepass"), "sha256")


def chain_root(salt: bytes, *identity: str) -> bytes:
    """Start of a chain: the tenant's salt and the identity of the KV (model, revision, dtype, block size)."""
    digest = hashlib.blake2b(salt, digest_size=DIGEST_BYTES)
    for part in identity:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def chained(parent: bytes, data: bytes | memoryview) -> bytes:
    """Return the hash of the prefix that `parent` names followed by `data`."""
    return hashlib.blake2b(parent + data, digest_size=DIGEST_BYTES).digest()


def chain(data: bytes, step: int, root: bytes) -> list[bytes]:
    """Return chained hashes of the full blocks of `data`, of `step` bytes each."""
    view, hashes, parent = memoryview(data), [], root
    for start in range(0, len(view) - step + 1, step):
        parent = hashlib.blake2b(parent + view[start : start + step], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


def extend(parent: bytes, tokens: Tokens) -> bytes:
    """Return the hash of the prefix that `parent` names followed by `tokens`."""
    return chained(parent, np.asarray(tokens, dtype="<u4").tobytes())


def block_hashes(tokens: Tokens, block_size: int, root: bytes) -> list[bytes]:
    """Return chained hashes of the full blocks of `tokens`; a rest shorter than a block has no hash here."""
    return chain(np.asarray(tokens, dtype="<u4").tobytes(), 4 * block_size, root)


def prefix_key(tokens: Tokens, position: int, block_size: int, hashes: Sequence[bytes], root: bytes) -> bytes:
    """Return the name of the exact prefix `tokens[:position]`: a block's hash, or that of the partial tail behind."""
    full = position // block_size
    parent = hashes[full - 1] if full else root
    return parent if position == full * block_size else extend(parent, tokens[full * block_size : position])
