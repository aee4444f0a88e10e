"""Bytes held against bytes needed while requests come, decode and leave: slots, stored prefixes and workspaces.

Prompts are not computed and nothing attends: their keys and values are zeros, and everything else is as in the engine,
with rows laid out as for the kernels of a GPU. Run it as `python -m benchmarks.engine.held`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from warmkv.config import PrefixCacheConfig
from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import KVShape, row_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes import hashing
from warmkv.replicas.block_store import BlockStore, Identity
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import Slot, SlotRequest
from warmkv.replicas.slots.slots import SlotPool

BLOCK = 64
NEW_AT_MOST = 512  # tokens that every request may draw; most stop before
ROOT = hashing.chain_root(b"held", "synthetic")


@dataclass(slots=True)
class Ratio:
    """Sum bytes held and needed over moments, and keep the most that was held."""

    held: int = 0
    needed: int = 0
    most: int = 0

    @property
    def value(self) -> float:
        return self.held / self.needed


@dataclass(slots=True, eq=False)
class Request:
    """Hold a decoding request: its prompt, its slot and the tokens left to draw."""

    tokens: list[int]
    hashes: list[bytes]
    slot: Slot
    left: int


@dataclass(slots=True)
class Memory:
    """Drive a pool of slots and a prefix cache on one device."""

    shape: KVShape
    device: torch.device
    dtype: torch.dtype
    limit: int  # bytes that slots may take
    stored: int  # bytes that the prefix cache may take
    ratio: Ratio = field(default_factory=Ratio)
    decoding: list[Request] = field(default_factory=list)
    pool: SlotPool = field(init=False)
    store: BlockStore = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.pool = SlotPool(shape, self.dtype, self.device, BLOCK)
        dtype = str(self.dtype).removeprefix("torch.")
        identity = Identity("none", "none", dtype, shape.layers, shape.kv_heads, shape.head_dim, BLOCK)
        cache = PrefixCacheConfig(memory_bytes=self.stored, block_size=BLOCK)
        self.store = BlockStore(cache, identity, self.device, lambda: 0.0)

    def begin(self, tokens: list[int], policy: str, new: int) -> Request:
        """Compute a prompt, store it and hand it over; it draws `new` tokens from now on."""
        spec = budgets.in_force(PolicySpec.model_validate(policy), len(tokens), NEW_AT_MOST)
        slot = self.pool.claim(SlotRequest(spec, len(tokens), NEW_AT_MOST), self.limit)
        assert slot is not None
        size = self.shape.layers, self.shape.kv_heads, len(tokens), self.shape.head_dim
        keys, values = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        prompt = PrefillState(keys, values, q_heads=self.shape.kv_heads)
        hashes = hashing.block_hashes(tokens, BLOCK, ROOT)
        match = self.store.match(hashes, ())
        self.store.attach(match, keys, values)
        self.look(keys, values)
        self.store.store(hashes, (), keys, values, warm=match)
        self.store.release(match)
        self.pool.fill(slot, prompt, self._kept(spec, len(tokens)), self.store.on_device(hashes))
        request = Request(tokens, hashes, slot, new)
        self.decoding.append(request)
        return request

    def _kept(self, spec: PolicySpec, tokens: int) -> list[Selection]:
        """Return a selection of as many tokens as the policy keeps."""
        kept = budgets.layer_budgets(spec, tokens, self.shape.layers)
        heads = self.shape.kv_heads
        return [Selection(torch.arange(count).expand(heads, count), torch.zeros(heads, count)) for count in kept]

    def step(self, inv_freq: Tensor) -> None:
        """Let all draw a token; who has drawn all leaves."""
        self.pool.give_back()
        if self.decoding:
            DecodeState(self.pool, [request.slot for request in self.decoding], inv_freq)
        for request in self.decoding:
            request.left -= 1
            if not request.left:
                self.pool.release(request.slot)
        self.decoding = [request for request in self.decoding if request.left]
        self.look()

    def look(self, *workspace: Tensor) -> None:
        """Take what is held and needed now into the ratio."""
        held = [*workspace, *self.pool.tensors()]
        held += [part for place in self.store.places for packed in place.blocks.values() for part in packed.parts]
        bytes_held = sum({id(tensor): tensor.nbytes for tensor in held}.values())
        self.ratio.held += bytes_held
        self.ratio.needed += self._needed() + sum(tensor.nbytes for tensor in workspace)
        self.ratio.most = max(self.ratio.most, bytes_held)

    def _needed(self) -> int:
        """Return bytes of the entries in use, each once: blocks that are stored or that full caches have in common."""
        token, blocks = self.shape.token_bytes, {key for place in self.store.places for key in place.blocks}
        rest = 0
        full = {request.slot.id for request in self.decoding if request.slot.slot_request.spec.label == "full"}
        for request in self.decoding:
            if request.slot.id in full:
                blocks.update(request.hashes)
                rest += (request.slot.tokens - BLOCK * len(request.hashes)) * token
            elif request.slot.paged:
                ((slab, rows),) = request.slot.places
                rest += int(slab.state.count[rows[0]]) * token
            for piece in request.slot.pieces:
                used = np.minimum(piece.state.count[piece.rows], piece.state.limit[piece.rows]).sum()
                each = row_bytes(piece.kind, self.shape) / piece.kind.capacity
                rest += int(used * each) * len(piece.layers)
        return len(blocks) * BLOCK * token + rest


def _text(tokens: int, chance: random.Random) -> list[int]:
    return [chance.randrange(1 << 15) for _ in range(tokens)]


def conversations(memory: Memory, inv_freq: Tensor, *, users: int, turns: int) -> None:
    """Run conversations behind one system prompt, each turn with all that was said before; the full cache."""
    chance = random.Random(0)
    system = _text(2_000, chance)
    said = [system + _text(chance.randrange(100, 800), chance) for _ in range(users)]
    for _ in range(turns):
        for user in range(users):
            new = chance.randrange(20, 200)
            memory.begin(said[user], "full", new)
            said[user] = said[user] + _text(new + chance.randrange(50, 300), chance)
            for _ in range(30):
                memory.step(inv_freq)
    while memory.decoding:
        memory.step(inv_freq)


MIX = ("full", "snapkv@1024", "full", "h2o@1024", "streaming_llm@1024", "full", "snapkv@1024+kivi4", "full+fp8")


def mixed(memory: Memory, inv_freq: Tensor, *, requests: int) -> None:
    """Run prompts of 500 to 6,000 tokens under policies of all kinds."""
    chance = random.Random(1)
    for at in range(requests):
        memory.begin(_text(chance.randrange(500, 6_000), chance), MIX[at % len(MIX)], chance.randrange(50, 400))
        for _ in range(20):
            memory.step(inv_freq)
    while memory.decoding:
        memory.step(inv_freq)


def long(memory: Memory, inv_freq: Tensor, *, tokens: int) -> None:
    """Decode after one long prompt, with the full cache."""
    memory.begin(list(range(tokens)), "full", 200)
    memory.ratio = Ratio()  # while it decodes
    while memory.decoding:
        memory.step(inv_freq)


def ratios() -> Iterator[tuple[str, Ratio]]:
    """Yield the loads by name, with what became of them."""
    small = KVShape(layers=2, kv_heads=2, head_dim=16, dtype_bytes=4)
    large = KVShape(layers=32, kv_heads=8, head_dim=128, dtype_bytes=2)
    cpu, slots, stored = torch.device("cpu"), 100_000 * small.token_bytes, 50_000 * small.token_bytes
    loads: dict[str, tuple[Memory, Callable[[Memory, Tensor], None]]] = {
        "conversations": (
            Memory(small, cpu, torch.float32, slots, stored),
            lambda *on: conversations(*on, users=8, turns=4),
        ),
        "mixed": (Memory(small, cpu, torch.float32, slots, stored), lambda *on: mixed(*on, requests=32)),
        "long": (
            Memory(large, torch.device("meta"), torch.bfloat16, 40 << 30, 20 << 30),
            lambda *on: long(*on, tokens=(1 << 17) - NEW_AT_MOST),
        ),
    }
    for name, (memory, load) in loads.items():
        load(memory, torch.ones(memory.shape.head_dim // 2, dtype=torch.float64, device=memory.device))
        yield name, memory.ratio


if __name__ == "__main__":
    with patch("warmkv.replicas.slots.kernels.is_available", lambda device: True):  # where rows lie; none is called
        for name, ratio in ratios():
            print(f"{name}: held over needed {ratio.value:.4f}, at most {ratio.most / (1 << 20):,.0f} MiB held")
