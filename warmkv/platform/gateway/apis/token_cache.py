"""Tokens and block hashes of prompts seen before, so that of a conversation's next turn only the new text is computed.

Each piece of a prompt is kept under a hash of its text and of all pieces before it, for its tenant alone: no tenant can
find, or time, what another one has sent.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

CACHE_BYTES = 64 << 20  # of a gateway: some 8 million tokens
TENANT_BYTES = CACHE_BYTES // 2  # of one tenant, so that none takes the room of all others
PIECE_BYTES = 400  # of a piece beside its tokens and hashes, its key included
HASH_BYTES = 72  # of a hash, as an object


@dataclass(frozen=True, slots=True)
class TokenizedPiece:
    """Tokens of a piece, and the hashes of the prompt's blocks that end within it."""

    tokens: array[int]
    hashes: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return PIECE_BYTES + self.tokens.itemsize * len(self.tokens) + HASH_BYTES * len(self.hashes)


@dataclass(slots=True)
class _Tenant:
    pieces: OrderedDict[bytes, TokenizedPiece] = field(default_factory=OrderedDict)  # latest used last
    nbytes: int = 0

    def pop(self) -> int:
        """Drop what was used longest ago; returns its bytes."""
        freed = self.pieces.popitem(last=False)[1].nbytes
        self.nbytes -= freed
        return freed


class TokenCache:
    """Pieces of prompts by tenant, those used latest, within a limit of bytes for each tenant and for all. Thread-safe.

    Where a tenant's limit is reached, its own pieces go; where that of all is, those of who came longest ago. Of a
    prompt the last pieces go first, since the others are of no use without the first.
    """

    def __init__(self, capacity: int = CACHE_BYTES, per_tenant: int = TENANT_BYTES) -> None:
        self._capacity, self._per_tenant = capacity, per_tenant
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # latest used last
        self._lock = threading.Lock()
        self.nbytes = 0

    def find(self, tenant: bytes, keys: Sequence[bytes]) -> list[TokenizedPiece]:
        """Return what is kept of the leading pieces of a tenant's prompt."""
        found: list[TokenizedPiece] = []
        with self._lock:
            if (held := self._tenants.get(tenant)) is not None:
                for key in keys:
                    if (piece := held.pieces.get(key)) is None:
                        break
                    found.append(piece)
        return found

    def keep(self, tenant: bytes, pieces: dict[bytes, TokenizedPiece]) -> None:
        """Keep the pieces of a tenant's prompt, in their order, as the latest used."""
        with self._lock:
            held = self._tenants.setdefault(tenant, _Tenant())
            self._tenants.move_to_end(tenant)
            before = held.nbytes
            for key, piece in reversed(pieces.items()):
                if (replaced := held.pieces.pop(key, None)) is not None:
                    held.nbytes -= replaced.nbytes
                held.pieces[key] = piece
                held.nbytes += piece.nbytes
            while held.nbytes > self._per_tenant:
                held.pop()
            self.nbytes += held.nbytes - before
            while self.nbytes > self._capacity:
                oldest = next(iter(self._tenants))
                self.nbytes -= self._tenants[oldest].pop()
                if not self._tenants[oldest].pieces:
                    del self._tenants[oldest]

    def forget(self, tenant: bytes) -> None:
        """Drop all of a tenant."""
        with self._lock:
            if (held := self._tenants.pop(tenant, None)) is not None:
                self.nbytes -= held.nbytes
