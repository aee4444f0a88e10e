"""vLLM's events become block keys exactly: against a slow dictionary, over any order of them."""

import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import hashing
from warmkv.prefixes.index import TIERS
from warmkv.replicas.engines.kv_events import (
    BlocksRemoved,
    BlocksStored,
    Cleared,
    KVEvent,
    MissingEventsError,
    VllmBlocks,
    cache_salt,
    decode,
    root_of,
    sent_at,
)

ROOTS = [hashing.chain_root(name, "model") for name in (b"a", b"b")]
MEDIA = ("GPU", "CPU", "STORAGE")


class SlowVllm:
    """What vLLM's cache holds, as a bag of (medium, salt, tokens from the start of the prompt)."""

    def __init__(self, block_size: int) -> None:
        self.size, self.held = block_size, Counter[tuple[str, str, tuple[int, ...]]]()

    def name(self, salt: str, tokens: tuple[int, ...]) -> bytes:
        return hashlib.sha256(repr((salt, tokens)).encode()).digest()

    def store(self, salt: str, tokens: tuple[int, ...], medium: str, begin: int) -> BlocksStored | None:
        """Store the blocks of a prompt from number `begin` on, whatever is there already."""
        size, blocks = self.size, len(tokens) // self.size
        prefixes = [tokens[: (at + 1) * size] for at in range(begin, blocks)]
        if not prefixes:
            return None
        for prefix in prefixes:
            if medium == "GPU":
                self.held[medium, salt, prefix] += 1
            else:
                self.held[medium, salt, prefix] = 1
        parent = self.name(salt, tokens[: begin * size]) if begin else None
        names = tuple(self.name(salt, prefix) for prefix in prefixes)
        ids = tokens[begin * size : blocks * size]
        return BlocksStored(names, parent, ids, size, None if begin else salt, medium, 0, "full_attention")

    def remove(self, at: tuple[str, str, tuple[int, ...]]) -> BlocksRemoved:
        self.held[at] -= 1
        return BlocksRemoved((self.name(*at[1:]),), at[0])

    def resident(self, salt: str, tokens: tuple[int, ...]) -> bool:
        return any(self.held[medium, salt, tokens] > 0 for medium in MEDIA)

    def tiers(self, size: int) -> dict[bytes, str]:
        """Return the tiers of all keys of `size` tokens by looking everything up."""
        found = {}
        for salt, tokens in {at[1:] for at, count in self.held.items() if count > 0}:
            root = root_of(salt)
            if root is None or len(tokens) % size:
                continue
            ranks = []
            for end in range(len(tokens) - size + self.size, len(tokens) + 1, self.size):
                held = [rank for rank, medium in enumerate(MEDIA) if self.held[medium, salt, tokens[:end]] > 0]
                ranks.append(min(held, default=9))
            if max(ranks) < 9:
                found[hashing.block_hashes(tokens, size, root)[-1]] = TIERS[max(ranks)]
        return found


@given(st.data(), st.sampled_from([(2, 2), (2, 4), (1, 3)]))
def test_keys_are_held_where_all_of_their_blocks_are(data: st.DataObject, sizes: tuple[int, int]) -> None:
    theirs, ours = sizes
    vllm, blocks, known = SlowVllm(theirs), VllmBlocks(ours), dict[bytes, str]()
    salts = [*(cache_salt(root) for root in ROOTS), "somebody else's"]
    for _ in range(data.draw(st.integers(1, 25))):
        removable = [at for at, count in vllm.held.items() if count > 0 and not _followed(vllm, at)]
        what = data.draw(st.sampled_from(["store", "store", "remove", "clear"] if removable else ["store"]))
        event: KVEvent | None
        if what == "store":
            salt = data.draw(st.sampled_from(salts))
            tokens = tuple(data.draw(st.lists(st.integers(0, 1), max_size=4 * ours)))
            resident = 0
            while resident < len(tokens) // theirs and vllm.resident(salt, tokens[: (resident + 1) * theirs]):
                resident += 1
            event = vllm.store(salt, tokens, data.draw(st.sampled_from(MEDIA)), data.draw(st.integers(0, resident)))
        elif what == "remove":
            event = vllm.remove(data.draw(st.sampled_from(sorted(removable))))
        else:
            vllm.held.clear()
            event = Cleared()
        if event is not None:
            changes = blocks.apply(event)
            assert not set(changes.gone) - set(known)
            known = {key: tier for key, tier in known.items() if key not in changes.gone} | dict(changes.stored)
        assert known == vllm.tiers(ours)
        assert len(blocks) == len(known)
        for key, tier in known.items():
            assert blocks.tier(key) == tier
    for key in [key for key in known if blocks.chain(key)]:
        assert blocks.chain(key)[-1] == key


def _followed(vllm: SlowVllm, at: tuple[str, str, tuple[int, ...]]) -> bool:
    """Whether this is the last copy of a block that others follow: vLLM evicts the ends of chains."""
    _, salt, tokens = at
    copies = sum(vllm.held[medium, salt, tokens] for medium in MEDIA)
    longer = tokens_of(vllm, salt)
    return copies == 1 and any(other[: len(tokens)] == tokens and other != tokens for other in longer)


def tokens_of(vllm: SlowVllm, salt: str) -> list[tuple[int, ...]]:
    return [at[2] for at, count in vllm.held.items() if count > 0 and at[1] == salt]


def test_a_chain_leads_from_the_start_of_the_prompt():
    vllm, blocks = SlowVllm(2), VllmBlocks(4)
    tokens = tuple(range(14))
    event = vllm.store(cache_salt(ROOTS[0]), tokens, "GPU", 0)
    assert event is not None
    keys = hashing.block_hashes(tokens, 4, ROOTS[0])
    assert list(blocks.apply(event).stored) == keys
    assert blocks.chain(keys[2]) == tuple(keys)


def test_a_block_whose_parent_is_unknown_tells_that_events_are_missing():
    vllm, blocks = SlowVllm(2), VllmBlocks(2)
    event = vllm.store(cache_salt(ROOTS[0]), (1, 2, 3, 4), "GPU", 1)
    assert event is not None
    with pytest.raises(MissingEventsError):
        blocks.apply(event)
    assert len(blocks) == 0


def test_an_event_without_tokens_adds_a_tier_to_blocks_that_are_known():
    vllm, blocks, tokens = SlowVllm(2), VllmBlocks(2, lambda salt: ROOTS[0]), (1, 2, 3, 4)
    event = vllm.store("", tokens, "GPU", 0)
    assert event is not None
    keys = hashing.block_hashes(tokens, 2, ROOTS[0])
    offloaded = BlocksStored(event.hashes, None, (), 0, medium="CPU")
    for group in (1, 0):  # of blocks that have left the device; neither is taken to be the group that is followed
        assert not blocks.apply(replace(offloaded, group=group)).stored
    assert list(blocks.apply(event).stored) == keys
    assert not blocks.apply(offloaded).stored
    assert dict(blocks.apply(BlocksRemoved(event.hashes, "GPU")).stored) == dict.fromkeys(keys, "host")
    assert blocks.apply(BlocksRemoved(event.hashes, "CPU")).gone == keys


def test_sliding_windows_are_left_out():
    vllm, blocks = SlowVllm(2), VllmBlocks(2)
    event = vllm.store(cache_salt(ROOTS[0]), (1, 2, 3, 4), "GPU", 0)
    assert event is not None
    window = BlocksStored(event.hashes[1:], None, event.token_ids, 2, event.salt, "GPU", 1, "sliding_window")
    for told in (window, event, BlocksRemoved(event.hashes, "GPU", 1)):
        blocks.apply(told)
    assert len(blocks) == 2
    assert len(blocks.apply(BlocksRemoved(event.hashes, "GPU", 0)).gone) == 2


def test_what_is_forgotten_does_not_come_back_with_later_tokens():
    vllm, blocks = SlowVllm(2), VllmBlocks(2)
    salt, tokens = cache_salt(ROOTS[0]), (1, 2, 3, 4, 5, 6)
    for begin, end in ((0, 4), (2, 6)):
        event = vllm.store(salt, tokens[:end], "GPU", begin)
        assert event is not None
        assert len(blocks.apply(event).stored) == (2 if not begin else 0)
        blocks.forget(ROOTS[0])
        assert len(blocks) == 0
    again = vllm.store(cache_salt(ROOTS[0], 1), tokens, "GPU", 0)
    assert again is not None
    assert list(blocks.apply(again).stored) == hashing.block_hashes(tokens, 2, ROOTS[0])


def test_salts_are_those_of_chains():
    assert root_of(cache_salt(ROOTS[0])) == root_of(cache_salt(ROOTS[0], 7)) == ROOTS[0]
    assert cache_salt(ROOTS[0]) != cache_salt(ROOTS[0], 7)
    assert [root_of(other) for other in (None, "", "tenant", "abcd")] == [None] * 4


def batch(*events: dict[str, Any]) -> bytes:
    """A batch as vLLM 0.32 sends it."""
    packed: bytes = msgpack.packb([1.5, list(events), 0])
    return packed


def test_batches_are_read_as_vllm_sends_them():
    stored = {
        "type": "BlockStored",
        "block_hashes": [b"1" * 32, b"2" * 32],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["salt"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 3}
    assert decode(batch(stored, {"type": "AllBlocksCleared"}, removed, {"type": "of tomorrow"})) == [
        BlocksStored((b"1" * 32, b"2" * 32), None, (1, 2, 3, 4), 2, "salt", "GPU", 0, "full_attention"),
        Cleared(),
        BlocksRemoved((7,), "CPU", 3),
    ]
    for damaged in (b"", b"\x91\x01", batch({"type": "BlockStored"}), batch({})):
        with pytest.raises(ValueError, match="no batch of KV events"):
            decode(damaged)


@pytest.mark.parametrize("extra", [{"lora": "adapter"}, {"plain": 1}])
def test_blocks_of_adapters_and_images_are_left_out_with_all_behind_them(extra: dict[str, Any]):
    vllm, blocks, tokens = SlowVllm(2), VllmBlocks(2), (1, 2, 3, 4, 5, 6)
    whole, more = vllm.store(cache_salt(ROOTS[0]), tokens[:4], "GPU", 0), vllm.store("", tokens, "GPU", 2)
    assert whole is not None
    assert more is not None
    more = replace(more, parent=whole.hashes[-1])
    known = {**blocks.apply(replace(whole, **extra)).stored, **blocks.apply(more).stored}
    assert list(known) == hashing.block_hashes(tokens, 2, ROOTS[0])[: 0 if "lora" in extra else 1]
    assert list(blocks.apply(BlocksRemoved((*whole.hashes, *more.hashes), "GPU")).gone) == list(known)


def test_copies_of_blocks_that_are_left_out_are_counted():
    vllm, blocks, tokens = SlowVllm(2), VllmBlocks(2), (1, 2, 3, 4)
    first, more = (vllm.store(cache_salt(ROOTS[0]), tokens[: 2 * end], "GPU", end - 1) for end in (1, 2))
    assert first is not None
    assert more is not None
    gone = BlocksRemoved(first.hashes, "GPU")
    for event in (*2 * [replace(first, lora="a")], gone, replace(more, lora="a")):
        assert not blocks.apply(event).stored
    for event in (BlocksRemoved(more.hashes, "GPU"), gone):
        blocks.apply(event)
    assert not blocks._blocks


def test_extra_keys_tell_salt_adapter_and_images():
    stored = {
        "type": "BlockStored",
        "block_hashes": [b"a", b"b", b"c"],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3],
        "block_size": 1,
        "lora_name": "adapter",
        "extra_keys": [["adapter", "salt"], ["adapter"], ["adapter", ["image", 0]]],
    }
    (event,) = decode(msgpack.packb([1.0, [stored], 0]))
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.lora, event.plain) == ("salt", "adapter", 2)
    assert sent_at(msgpack.packb([1.5, [], 0])) == 1.5
    for broken in (b"\x00", msgpack.packb([]), msgpack.packb({}), b""):
        with pytest.raises(ValueError, match="no batch"):
            sent_at(broken)
