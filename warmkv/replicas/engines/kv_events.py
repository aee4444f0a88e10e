"""vLLM's KV cache events, and what they say in warmkv's block keys. Without vLLM, ZMQ and clocks.

An event names blocks by vLLM's own hashes, with their tokens and, in the first block of a prompt, the `cache_salt`. The
salt that warmkv gives vLLM is the root of the chain of hashes (`cache_salt`), so the key of every block follows from
events alone, that of generated tokens included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from warmkv.prefixes import hashing
from warmkv.prefixes.index import TIERS

TIER_OF = {None: "device", "GPU": "device", "CPU": "host", "STORAGE": "disk"}
"""Tiers by the medium of an event."""

FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV cache groups whose blocks are those of the whole prefix; those of sliding windows leave before it."""

VllmHash = bytes | int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Tell that consecutive blocks came to a medium. `parent` is the block before them, None at the start of a prompt.

    Without tokens, as of what vLLM offloads, it names blocks that were told of before, and neither parent nor size.
    """

    hashes: tuple[VllmHash, ...]
    parent: VllmHash | None
    token_ids: tuple[int, ...]
    block_size: int
    salt: str | None = None  # of the first block
    medium: str | None = None
    group: int = 0
    kind: str | None = None
    lora: str | None = None
    plain: int | None = None  # leading blocks that their tokens name; behind them are images, say. None: all


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left a medium."""

    hashes: tuple[VllmHash, ...]
    medium: str | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block is gone."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Discard what was told before. Blocks may be held of which nothing tells."""


KVEvent = BlocksStored | BlocksRemoved | Cleared | Forgotten


def cache_salt(root: bytes, generation: int = 0) -> str:
    """Return what keeps the prompts of a chain's root apart in vLLM's cache; of another generation nothing is found."""
    return f"{root.hex()}.{generation}" if generation else root.hex()


def root_of(salt: str | None) -> bytes | None:
    """Return the root that a salt stands for; None for what warmkv did not send."""
    if salt is None:
        return None
    try:
        root = bytes.fromhex(salt.partition(".")[0])
    except ValueError:
        return None
    return root if len(root) == hashing.DIGEST_BYTES else None


def decode(payload: bytes) -> list[KVEvent]:
    """Decode a batch of events as vLLM sends it (msgpack). Kinds of events that are not known are left out.

    Raises ValueError where it is no such batch.
    """
    try:
        _, events, *_ = msgpack.unpackb(payload, strict_map_key=False)
        return [known for event in events if (known := _event(event)) is not None]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no batch of KV events: {error}") from error


def sent_at(payload: bytes) -> float:
    """Return when a batch was sent, in seconds by the engine's clock. Raises ValueError where it is no batch."""
    try:
        return float(msgpack.unpackb(payload, strict_map_key=False)[0])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no batch of KV events: {error}") from error


def _event(event: Mapping[str, Any]) -> KVEvent | None:
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    if event["type"] == "BlockRemoved":
        return BlocksRemoved(tuple(event["block_hashes"]), event.get("medium"), event.get("group_idx") or 0)
    if event["type"] != "BlockStored":
        return None
    extra, lora = event.get("extra_keys") or (), event.get("lora_name")
    return BlocksStored(
        tuple(event["block_hashes"]),
        event["parent_block_hash"],
        tuple(event["token_ids"]),
        event["block_size"],
        next((key for key in (extra[0] if extra else None) or () if isinstance(key, str) and key != lora), None),
        event.get("medium"),
        event.get("group_idx") or 0,
        event.get("kv_cache_spec_kind"),
        lora,
        next((at for at, keys in enumerate(extra) if not all(isinstance(key, str) for key in keys or ())), None),
    )


class MissingEventsError(Exception):
    """Events are missing: a block has a parent that was never told of."""


@dataclass(slots=True)
class _Block:
    """A block that vLLM holds. It ends a key, or is a part of one."""

    root: bytes  # of its chain; empty where it is left out
    before: bytes  # the last whole key before it, or the root
    tokens: tuple[int, ...] = ()  # since then, its own included, while they are less than a key has
    parts: tuple[VllmHash, ...] = ()  # the blocks of these tokens
    key: bytes = b""  # that they complete
    copies: Counter[str] = field(default_factory=Counter)  # by tier


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys that came to a tier, the fastest in which all of their blocks are, and keys that are gone."""

    stored: Mapping[bytes, str]
    gone: Sequence[bytes]


class VllmBlocks:
    """The blocks of a vLLM engine by warmkv's keys.

    `block_size` is warmkv's, a multiple of vLLM's: a key is held while all of vLLM's blocks of it are. vLLM may hold a
    block twice on its device, so it is gone when it was removed as often as it was stored. `root_of` returns the chain
    that a salt stands for; None for others, whose blocks are left out, as are those of adapters (LoRA) and those of
    images, of which more than tokens tells, with all behind them.
    """

    def __init__(self, block_size: int, root_of: Callable[[str | None], bytes | None] = root_of) -> None:
        self._size, self._root_of = block_size, root_of
        self._blocks: dict[VllmHash, _Block] = {}
        self._keys: dict[bytes, tuple[bytes, tuple[VllmHash, ...]]] = {}  # the key before, and vLLM's blocks
        self._keys_of: defaultdict[VllmHash, set[bytes]] = defaultdict(set)
        self._tiers: dict[bytes, str] = {}
        self._group: int | None = None  # of KV caches, that is followed
        self.whole = True
        """Whether every block that vLLM holds is known."""

    def __len__(self) -> int:
        return len(self._tiers)

    def tier(self, key: bytes) -> str | None:
        """Return the fastest tier that has all of a key; None if none has."""
        return self._tiers.get(key)

    def root(self, key: bytes) -> bytes:
        """Return the root of the chain that a key is of."""
        parts = self._keys[key][1]
        return next(self._blocks[part].root for part in parts if part in self._blocks)

    def chain(self, key: bytes) -> tuple[bytes, ...]:
        """Return the keys from the start of the prompt to this one; () where one of them is not known any more."""
        found, root = [key], self.root(key)
        while (before := self._keys[found[-1]][0]) != root:
            if before not in self._keys:
                return ()
            found.append(before)
        return tuple(reversed(found))

    def apply(self, event: KVEvent) -> Changes:
        """Take an event; return what changed. Raises MissingEventsError."""
        touched: dict[bytes, None] = {}
        if isinstance(event, Cleared | Forgotten):
            self.whole = isinstance(event, Cleared)
            touched = dict.fromkeys(self._tiers)
            for held in (self._blocks, self._keys, self._keys_of):
                held.clear()
        elif isinstance(event, BlocksRemoved):
            if event.group == (self._group or 0):
                self._remove(event, touched)
        elif self._follows(event):
            self._store(event, touched)
        stored, gone = {}, []
        for key in touched:
            before, tier = self._tiers.get(key), self._fastest(key)
            if tier is None:
                if before is not None:
                    del self._tiers[key]
                    gone.append(key)
            elif tier != before:
                stored[key] = self._tiers[key] = tier
        return Changes(stored, gone)

    def forget(self, root: bytes) -> list[bytes]:
        """Leave out from now on what is held of a chain; return its keys."""
        for block in self._blocks.values():
            if block.root == root:
                block.root = block.key = b""
        gone = [
            key
            for key, (_, parts) in self._keys.items()
            if any(part in self._blocks and not self._blocks[part].root for part in parts)
        ]
        for key in gone:
            self._tiers.pop(key, None)
            self._unlink(key)
        return gone

    def _follows(self, event: BlocksStored) -> bool:
        if event.kind not in FULL_ATTENTION:
            return False
        if self._group is None and event.token_ids:
            self._group = event.group
        return event.group == self._group

    def _store(self, event: BlocksStored, touched: dict[bytes, None]) -> None:
        parent: _Block | None = None
        if event.parent is not None and (parent := self._blocks.get(event.parent)) is None:
            if self.whole:
                raise MissingEventsError(f"a block follows {event.parent!r}, of which no event told")
            parent = _Block(b"", b"")
        tier, size = TIER_OF.get(event.medium, "disk"), event.block_size
        for at, name in enumerate(event.hashes):
            own = event.token_ids[at * size : (at + 1) * size]
            block = self._blocks.get(name)
            if not event.token_ids:
                if block is None:
                    continue  # it has left the other tiers already: nothing tells whose it is
            elif block is None or not block.root:
                plain = event.lora is None and (event.plain is None or at < event.plain)
                behind = self._behind(parent, event.salt, own, name) if plain else _Block(b"", b"")
                if block is not None:
                    behind.copies = block.copies
                block = self._blocks[name] = behind
            block.copies[tier] = block.copies[tier] + 1 if tier == TIERS[0] else 1
            if block.key and block.key not in self._keys:
                self._keys[block.key] = block.before, block.parts
                for part in block.parts:
                    self._keys_of[part].add(block.key)
            touched |= dict.fromkeys(self._keys_of.get(name, ()))
            parent = block

    def _behind(self, parent: _Block | None, salt: str | None, own: tuple[int, ...], name: VllmHash) -> _Block:
        root = parent.root if parent is not None else self._root_of(salt)
        if not root:
            return _Block(b"", b"")
        if parent is None or parent.key:
            block = _Block(root, parent.key if parent is not None else root, own, (name,))
        else:
            block = _Block(root, parent.before, parent.tokens + own, (*parent.parts, name))
        if len(block.tokens) == self._size:
            block.key, block.tokens = hashing.extend(block.before, block.tokens), ()
        return block

    def _remove(self, event: BlocksRemoved, touched: dict[bytes, None]) -> None:
        tier = TIER_OF.get(event.medium, "disk")
        for name in event.hashes:
            block = self._blocks.get(name)
            if block is None or not block.copies[tier]:
                continue
            block.copies[tier] -= 1
            keys = list(self._keys_of.get(name, ()))
            touched |= dict.fromkeys(keys)
            if not +block.copies:
                del self._blocks[name]
                for key in keys:
                    if not any(part in self._blocks for part in self._keys[key][1]):
                        self._unlink(key)

    def _unlink(self, key: bytes) -> None:
        for part in self._keys.pop(key)[1]:
            self._keys_of[part].discard(key)
            if not self._keys_of[part]:
                del self._keys_of[part]

    def _fastest(self, key: bytes) -> str | None:
        if key not in self._keys:
            return None
        ranks = []
        for part in self._keys[key][1]:
            held = self._blocks.get(part)
            rank = next((rank for rank, tier in enumerate(TIERS) if held is not None and held.copies[tier] > 0), None)
            if rank is None:
                return None
            ranks.append(rank)
        return TIERS[max(ranks)]
