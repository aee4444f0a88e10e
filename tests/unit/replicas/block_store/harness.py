"""A store whose clock, threads and faults are in the hands of a test, beside a slow model of what it may answer."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch

from warmkv.config import PrefixCacheConfig
from warmkv.policies.prefix_tree.deadlines import Deadlines
from warmkv.policies.prefix_tree.nodes import Node
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.prefixes import hashing
from warmkv.prefixes.record import Candidate, Mark
from warmkv.replicas.block_store import BlockStore, Identity, WarmPrefix
from warmkv.replicas.block_store.disk import SUFFIX

BLOCK = 4
IDENTITY = Identity("test", "weights", "float32", layers=2, kv_heads=1, head_dim=4, block_size=BLOCK)
TOKEN = IDENTITY.shape.token_bytes
CPU = torch.device("cpu")


class ByHand:
    """Lanes whose jobs run when the test says."""

    def __init__(self) -> None:
        self.jobs: dict[str, deque[Any]] = {"write": deque(), "read": deque()}

    def submit(self, lane: str, job: Any) -> None:
        self.jobs[lane].append(job)

    def run(self, lane: str, most: int = 1 << 30) -> None:
        while self.jobs[lane] and most:
            self.jobs[lane].popleft()()
            most -= 1

    def close(self) -> None:
        for lane in self.jobs:
            self.run(lane)


def kv(tokens: list[int], salt: str = "") -> torch.Tensor:
    """Return keys and values [2, layers, kv_heads, T, head_dim] in which every token's depend on all before it."""
    shape = IDENTITY.shape
    out = torch.empty(2, shape.layers, shape.kv_heads, len(tokens), shape.head_dim)
    digest = hashlib.blake2b(salt.encode(), digest_size=8)
    for at, token in enumerate(tokens):
        digest.update(bytes([token]))
        value = int.from_bytes(digest.digest()[:3], "little") / 2**24
        out[..., at, :] = torch.arange(1.0, 1 + out[..., at, :].numel()).view(out[..., at, :].shape) * value
    return out


class Prompt:
    """Tokens of a tenant, with hashes and the keys of positions."""

    def __init__(self, tenant: str, tokens: list[int]) -> None:
        self.tenant, self.tokens = tenant, tokens
        self.root = hashing.chain_root(tenant.encode(), "test")
        self.hashes = hashing.block_hashes(tokens, BLOCK, self.root)
        self.kv = kv(tokens, tenant)

    def key(self, position: int) -> bytes:
        return hashing.prefix_key(self.tokens, position, BLOCK, self.hashes, self.root)

    def marks(self, positions: dict[int, str]) -> list[Mark]:
        return [Mark(at, ttl, self.key(at)) for at, ttl in sorted(positions.items())]

    def reads(self, positions: list[int]) -> list[Candidate]:
        return [Candidate(at, self.key(at)) for at in sorted(positions, reverse=True)]


class Harness:
    """Drives a store and checks every answer.

    `expiry` holds, for every prefix that was ever stored, the latest moment until which it may be found.
    """

    def __init__(self, path: Path, wait_seconds: float = 1e9, **settings: Any) -> None:
        self.now, self.restarts, self.wait_seconds = 1000.0, 0, wait_seconds
        defaults = {
            "block_size": BLOCK,
            "min_tokens": 1,
            "ttls": {"5m": 30.0, "1h": 200.0},
            "memory_bytes": 6 * BLOCK * TOKEN,
            "host": {"memory_bytes": 10 * BLOCK * TOKEN},
            "disk": {"memory_bytes": 24 * (BLOCK * TOKEN + 4096), "path": path},
            "moving_bytes": 8 * BLOCK * TOKEN,
        }
        self.config = PrefixCacheConfig.model_validate(defaults | settings)
        self.path = path
        self.expiry: dict[bytes, float] = {}
        self.held: list[tuple[Prompt, WarmPrefix, set[bytes]]] = []  # with what was taken from them meanwhile
        self.attached: Counter[str] = Counter()  # tokens by tier
        self.damaged: dict[bytes, bytes] = {}  # what was made of files
        self.open()

    def open(self) -> None:
        self.lanes = ByHand()
        self.directory: dict[bytes, str] = {}
        # After a restart the monotonic clock shows something else.
        self.store = BlockStore(
            self.config, IDENTITY, CPU, lambda: self.now + 1e6 * self.restarts, self._published,
            wall_clock=lambda: self.now + 1e9, io_threads=self.lanes, wait_seconds=self.wait_seconds,
        )  # fmt: skip
        self.directory = self.full_blocks()

    def full_blocks(self) -> dict[bytes, str]:
        return {key: tier for tier, keys in self.store.full_blocks().items() for key in keys}

    def _published(self, stored: Any, evicted: Any, tier: str) -> None:
        for key in evicted:
            del self.directory[key]
        assert all(self.directory.get(key) != tier for key in stored), "told twice"
        self.directory.update(dict.fromkeys(stored, tier))

    # --- what happens

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire()

    def write(self, prompt: Prompt, marks: dict[int, str], warm: WarmPrefix | None = None) -> int:
        keys, values = prompt.kv
        found = prompt.marks(marks)
        written = self.store.store(prompt.hashes, found, keys, values, tenant=prompt.tenant, warm=warm)
        lives = dict.fromkeys(prompt.hashes, 30.0)
        for mark in found:
            for key in [*prompt.hashes[: mark.position // BLOCK], mark.key]:
                lives[key] = max(lives.get(key, 0.0), self.config.ttls[mark.ttl])
        for key, ttl in lives.items():
            self.expiry[key] = max(self.expiry.get(key, 0.0), self.now + max(ttl, self.ttl(key)))
        assert written in {0, *marks}
        return written

    def ttl(self, key: bytes) -> float:
        """Return the longest life that the entry of a key may have."""
        return max((node.ttl for node in self.store.tree._starts.values() if key in node.keys), default=0.0)

    def look_up(self, prompt: Prompt, reads: list[int]) -> None:
        warm = self.store.match(prompt.hashes, prompt.reads(reads))
        for key in warm.match.chain:
            assert self.expiry[key] > self.now or self.is_held(key), "found after its life has ended"
            self.expiry[key] = max(self.expiry[key], self.now + self.ttl(key))
        assert warm.match.hit in {0, *reads}
        files = self.files()
        broken = {key for key, content in self.damaged.items() if _content(files.get(key.hex())) == content}
        self.held.append((prompt, warm, broken & set(warm.match.chain)))

    def is_held(self, key: bytes) -> bool:
        return any(key in warm.match.chain for _, warm, _ in self.held)

    def finish(self, at: int, store: bool) -> None:
        """A request attaches what it found, and stores its prompt or leaves."""
        prompt, warm, broken = self.held.pop(at)
        while not self.store.ready(warm):
            self.lanes.run("read", 1)
            self.store.settle()
        keys, values = torch.zeros_like(prompt.kv)
        calls = 1
        while (attached := self.store.attach(warm, keys, values, 1)) is None:  # a block at a time
            calls += 1
        reused, sums = attached
        assert calls == max(1, -(-reused // BLOCK))
        assert sums is None
        assert torch.equal(keys[:, :, :reused], prompt.kv[0, :, :, :reused]), "a wrong hit"
        assert torch.equal(values[:, :, :reused], prompt.kv[1, :, :, :reused]), "a wrong hit"
        if not broken:
            assert reused == warm.match.tokens, "a pinned entry was lost"
        assert sum(warm.tiers.values()) == reused
        self.attached.update(warm.tiers)
        if store:
            self.write(prompt, {}, warm)
        self.store.release(warm)

    def drop(self, tenant: str) -> None:
        before = sum(self.store.tier_bytes.values())
        assert self.store.drop(tenant) == before - sum(self.store.tier_bytes.values())
        for prompt, warm, broken in self.held:
            if prompt.tenant == tenant:
                broken |= set(warm.match.chain)
        for tier in range(len(self.store.places)):
            assert all(run.tenant != tenant for run in self.store.tree.recent(tier))

    def run(self, lane: str, most: int) -> None:
        self.lanes.run(lane, most)
        self.store.settle()

    def damage(self, number: int, how: str) -> None:
        files = self.files()
        if not files:
            return
        name = sorted(files)[number % len(files)]
        path = files[name]
        content = bytearray(path.read_bytes() or b"-")
        if how == "flip":
            content[-1 - number % min(64, len(content))] ^= 1 + number % 255
        elif how == "header":
            end = min(8 + int.from_bytes(content[:8], "little"), len(content))
            content[number % end] ^= 1 << number // end % 8
        else:
            content = content[: number % len(content)]
        path.write_bytes(content)
        self.damaged[bytes.fromhex(name)] = bytes(content)
        for _, warm, broken in self.held:
            broken |= {bytes.fromhex(name)} & set(warm.match.chain)

    def restart(self, crash: bool) -> None:
        """Everything in memory is gone; what was not written yet, too, after a crash."""
        self.held.clear()
        if crash:
            self.store.places[-1].folder.release()
        else:
            self.store.close()
        self.restarts += 1
        self.open()

    def files(self) -> dict[str, Path]:
        return {path.name.removesuffix(SUFFIX): path for path in (self.path / "0").glob(f"??/*{SUFFIX}")}

    def keys(self, tier: int) -> set[bytes]:
        """Return the keys that a tier holds by its tree."""
        return {key for run in self.store.tree.recent(tier) for key in run.keys}

    # --- what must hold at all times

    def check(self) -> None:
        store = self.store
        for tier, place in enumerate(store.places):
            assert store.tree.spaces[tier].bytes <= place.tier.capacity
            if place.folder is None:
                assert place.blocks.keys() | place.arriving.keys() == self.keys(tier)
                assert sum(packed.nbytes for packed in place.blocks.values()) <= place.tier.capacity
            assert all(store._presence.has(key, tier) for key in self.keys(tier))
            assert store._presence.blocks[tier] == len(self.keys(tier))
        check_tree(store.tree)
        assert store._moves.bytes <= self.config.moving_bytes
        assert self.directory == self.full_blocks()
        assert all(store._presence.fastest(key) == tier for key, tier in self.directory.items())

    def check_at_rest(self) -> None:
        """Nothing is on its way, nobody reads: memory, files and indexes agree, and nothing is left over."""
        while self.held:
            self.finish(0, store=False)
        for lane in ("write", "read"):
            self.run(lane, 1 << 30)
        self.check()
        store = self.store
        assert (store._moves.bytes, len(store._reads)) == (0, 0)
        disk = store.places[-1]
        assert not disk.arriving
        files = self.files()
        assert files.keys() == {key.hex() for key in self.keys(len(store.places) - 1)}
        assert sum(path.stat().st_size for path in files.values()) <= disk.tier.capacity
        assert not list((self.path / "0").rglob("*.part"))
        for tier, space in enumerate(store.tree.spaces):
            packed = [run for run in store.tree.recent(tier) if run.keys[0] in store._packed_keys]
            assert space.pinned == sum(
                len(run.keys) * store.places[tier].tier.weigh(run.plain, run.tokens) for run in packed
            )


def check_tree(tree: RadixTree) -> None:
    """Check that what a tree keeps beside its nodes follows from them."""
    nodes = set(tree._starts.values())
    assert {node.keys[0]: node for node in nodes} == tree._starts
    assert {node.keys[-1]: node for node in nodes} == tree._ends
    for node in nodes:
        assert node.span == node.length == len(node.keys)
        assert node.parent is None or node.parent in nodes
        assert node.end == node.length * node.tokens + (node.parent.end if node.parent is not None else 0)
        assert node.sums is None or node.sums in nodes
    assert check_deadlines(tree._tree.deadlines) <= nodes
    for tier, space in enumerate(tree.spaces):
        copies = [node.copies[tier] for node in nodes]
        assert space.bytes == sum(copy.held * copy.size for copy in copies)
        assert space.pinned == sum(copy.pinned * copy.size for copy in copies)
        behind = Counter(copy.parent for copy in copies if copy.held and copy.parent is not None)
        assert all(copy.children == behind[copy] for copy in copies)
        assert all(copy.parent is None or copy.parent.held == copy.parent.node.length for copy in copies if copy.held)
        assert all(copy.queued or copy.loose <= 0 for copy in copies)
        if space.apart:
            held = Counter[str]()
            for copy in copies:
                held[copy.tenant] += copy.held * copy.size
            assert {tenant: size for tenant, size in held.items() if size} == dict(space._held)
            assert set(space._largest) == set(space._held)


def check_deadlines(deadlines: Deadlines) -> set[Node]:
    """Return the nodes that are watched, after a check that records are as many as they should be."""
    watched = {node for at, _, node in deadlines._heap if at == node.watched}
    assert len(watched) == deadlines._watched
    assert len(deadlines._heap) <= 2 * len(watched) + 64
    return watched


def _content(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None else None
