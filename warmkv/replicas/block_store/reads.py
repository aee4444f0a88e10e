"""Read a request's warm blocks from disk beside the engine, and copy them to its prompt."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from warmkv.policies.prefix_cache import Match
from warmkv.replicas.block_store.disk import Folder, Header
from warmkv.replicas.block_store.formats import Packed, unpack
from warmkv.replicas.block_store.io_threads import Jobs
from warmkv.replicas.block_store.tiers import TierStorage

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """Name a key and the tokens of the prompt whose KV it holds."""

    key: bytes
    start: int
    end: int


def spans(chain: Sequence[bytes], tokens: int, size: int) -> list[Span]:
    """Return the spans of a chain over the first `tokens` tokens of a prompt; the last may be shorter than a block."""
    return [Span(key, at * size, min((at + 1) * size, tokens)) for at, key in enumerate(chain)]


@dataclass(slots=True, eq=False)
class WarmPrefix:
    """Hold the warm prefix of a request, pinned until `release`, and what of it has been read from disk so far."""

    match: Match = field(default_factory=Match)
    reused: int = 0  # leading tokens to attach
    sums: bytes = b""  # key of the column sums of these, where they are needed
    read: dict[bytes, Packed] = field(default_factory=dict)
    pending: set[bytes] = field(default_factory=set)
    since: float = 0.0  # when it began to wait for them
    tiers: dict[str, int] = field(default_factory=dict)  # tokens attached, by the tier they came from
    to_attach: deque[tuple[Span, Packed, str]] | None = None  # with their tiers; None before that begins

    @property
    def hit(self) -> int:
        return self.match.hit


def keys_to_attach(warm: WarmPrefix, size: int) -> list[bytes]:
    """Return the keys of the blocks and column sums that are needed for what is to be attached."""
    chain = spans(warm.match.chain, warm.match.tokens, size)
    keys = [span.key for span in chain if span.start < warm.reused]
    return [*keys, warm.sums] if warm.sums else keys


def blocks_to_attach(warm: WarmPrefix, size: int, places: Sequence[TierStorage]) -> list[tuple[Span, Packed, str]]:
    """Return the blocks to attach with their tiers, up to the first that is missing."""
    found = []
    for span in spans(warm.match.chain, warm.match.tokens, size):
        if span.start >= warm.reused:
            break
        at = next((place for place in places if place.find(span.key) is not None), None)
        packed = at.find(span.key) if at is not None else warm.read.get(span.key)
        if packed is None:
            break
        name = at.tier.name if at is not None else "disk"
        found.append((Span(span.key, span.start, min(span.end, warm.reused)), packed, name))
    return found


def copy_blocks(warm: WarmPrefix, keys: Tensor, values: Tensor, dtype: torch.dtype, most: float) -> bool:
    """Copy the blocks to attach, about `most` bytes of those that the GPU does not hold itself; let go what was read.

    Returns True once all are copied.
    """
    copied, to_attach = 0, warm.to_attach
    assert to_attach is not None
    while to_attach and copied < most:
        span, packed, tier = to_attach.popleft()
        warm.read.pop(span.key, None)  # its copy takes memory now, which admission has counted once
        tokens = span.end - span.start
        block = unpack(packed.map(lambda part: part.to(keys.device, non_blocking=True)), dtype)
        keys[:, :, span.start : span.end] = block[0, :, :, :tokens]
        values[:, :, span.start : span.end] = block[1, :, :, :tokens]
        warm.tiers[tier] = warm.tiers.get(tier, 0) + tokens
        copied += packed.nbytes if tier != "device" or not keys.is_cuda else 0
    return not to_attach


class FileReads:
    """Read each file once for all requests that wait for it. For the engine's thread.

    `lost(key)` is called for a file that cannot be read.
    """

    def __init__(self, jobs: Jobs, lost: Callable[[bytes], None]) -> None:
        self._jobs, self._lost = jobs, lost
        self._waiting: dict[bytes, list[WarmPrefix]] = {}  # by the file that they wait for

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, folder: Folder, key: bytes, warm: WarmPrefix) -> None:
        """Begin to read a file that `warm` has pending."""
        if key in self._waiting:
            self._waiting[key].append(warm)
            return
        self._waiting[key] = [warm]
        self._jobs.submit("read", partial(folder.read, key), partial(self._has_read, key))

    def stop_waiting(self, warm: WarmPrefix) -> None:
        """Give up the blocks that have not been read yet."""
        for key in warm.pending:
            self._waiting[key].remove(warm)
        warm.pending.clear()

    def _has_read(self, key: bytes, result: tuple[Packed, Header] | Exception) -> None:
        for warm in self._waiting.pop(key):
            warm.pending.discard(key)
            if not isinstance(result, Exception):
                warm.read[key] = result[0]
        if isinstance(result, Exception):
            log.warning("a stored block is lost: %s", result)
            self._lost(key)
