"""Blocks that move from store to store: found, read and billed there as where they come from, or not at all."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas.block_store.harness import BLOCK, CPU, IDENTITY, TOKEN, Prompt, check_tree
from warmkv.config import PrefixCacheConfig
from warmkv.replicas.block_store import BlockStore, disk
from warmkv.replicas.block_store.exchange import PayloadError, lend, seal, take, unseal

LIVES = {"5m": 30.0, "1h": 200.0}


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make(now: float = 0.0, blocks: float = 100, **cache: Any) -> BlockStore:
    size = int(blocks * BLOCK * TOKEN)
    config = {
        "block_size": BLOCK, "min_tokens": 1, "memory_bytes": size, "moving_bytes": 1 << 28, "ttls": LIVES, **cache
    }  # fmt: skip
    return BlockStore(PrefixCacheConfig.model_validate(config), IDENTITY, CPU, Clock(now))


def write(store: BlockStore, prompt: Prompt, marks: dict[int, str] | None = None, sums: bool = False) -> None:
    column_sums = {at: torch.full((2, 1, at), float(at)) for at in (marks or {})} if sums else None
    keys, values = prompt.kv
    store.store(prompt.hashes, prompt.marks(marks or {}), keys, values, column_sums, tenant=prompt.tenant)


def move(
    donor: BlockStore,
    other: BlockStore,
    prompt: Prompt,
    reads: list[int] | None = None,
    most: int = 1 << 30,
    **how: Any,
) -> int:
    """Fetch what `other` lacks, piece by piece, through everything that a network would carry. Returns pieces."""
    tails, more, pieces = [read.key for read in prompt.reads(reads or [])], True, 0
    while more:
        first, _ = other.leading(prompt.hashes)
        lent, more = lend(donor, prompt.hashes, first, tails, most, **how)
        if lent:
            pieces += 1
            take(other, [unseal(seal(one), IDENTITY, ("model", other.places[0].tier.storage)) for one in lent])
    return pieces


def read(store: BlockStore, prompt: Prompt, reads: list[int], **how: Any) -> tuple[int, int, torch.Tensor, Any]:
    """What a request finds: billed position, tokens, their KV, and column sums."""
    warm = store.match(prompt.hashes, prompt.reads(reads), **how)
    out = torch.zeros(2, IDENTITY.layers, IDENTITY.kv_heads, len(prompt.tokens), IDENTITY.head_dim)
    attached = store.attach(warm, *out)
    assert attached is not None
    tokens, sums = attached
    store.release(warm)
    return warm.hit, tokens, out, sums


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    alike = torch.equal(found[2], expected[2])
    if expected[3] is not None:
        alike = alike and torch.equal(found[3], expected[3])
    return found[:2] == expected[:2] and alike and (found[3] is None) == (expected[3] is None)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=30).map(lambda tokens: Prompt("t", tokens))


@st.composite
def stored(draw):
    prompt = draw(PROMPTS)
    marks = draw(st.dictionaries(st.integers(1, len(prompt.tokens)), st.sampled_from(sorted(LIVES)), max_size=3))
    return prompt, marks


@settings(max_examples=150)
@given(stored(), st.integers(0, 30), st.integers(1, 400), st.sampled_from([(), ("host",)]), st.booleans())
def test_what_arrives_is_read_as_on_the_donor(case, known, most, below, sums):
    """Bit by bit, whatever the receiver held and however small the pieces were; and billed alike.

    A block that the receiver has already is not sent, so a breakpoint that only the donor wrote there stays unknown.
    """
    prompt, marks = case
    tiers = {tier: {"memory_bytes": 100 * BLOCK * TOKEN} for tier in below}
    donor, other = make(blocks=2.5 if below else 100, **tiers), make(1e6, **tiers)
    write(donor, prompt, marks, sums=sums and bool(marks))
    if known:
        write(other, Prompt("t", prompt.tokens[:known]))
    move(donor, other, prompt, sorted(marks), most, sums=sums)
    for reads in (sorted(marks), []):
        expected, found = read(donor, prompt, reads, sums=sums), read(other, prompt, reads, sums=sums)
        if known and not sums:
            assert found[0] <= expected[0]
            assert found[1] >= expected[1] // BLOCK * BLOCK
            assert torch.equal(found[2][..., : found[1], :], prompt.kv[..., : found[1], :])
        elif not known and (not sums or expected[3] is not None):
            assert same(found, expected)


@pytest.mark.parametrize("storage", ["fp8", "kivi4"])
def test_a_format_arrives_as_it_is(storage):
    identity = replace(IDENTITY, block_size=64, head_dim=32)
    config = PrefixCacheConfig(block_size=64, memory_bytes=512 << 20, storage=storage)
    donor, other = (BlockStore(config, identity, CPU, Clock(0)) for _ in range(2))
    plain = BlockStore(PrefixCacheConfig(block_size=64, memory_bytes=512 << 20), identity, CPU, Clock(0))
    keys, values = torch.randn(2, 2, 1, 150, 32)
    hashes = [bytes([number]) * 16 for number in range(2)]
    donor.store(hashes, (), keys, values)
    lent, _ = lend(donor, hashes, 0, (), 1 << 30)
    take(other, [unseal(seal(one), identity, ("model", storage)) for one in lent])
    for key in hashes:
        there, here = donor.places[0].blocks[key], other.places[0].blocks[key]
        assert here.storage == storage
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(here.parts, there.parts, strict=True)
        )
    assert other.tier_bytes == donor.tier_bytes
    with pytest.raises(PayloadError, match=f"as {storage}"):  # a replica that keeps all as computed stays that way
        unseal(seal(lent[0]), identity, ("model", plain.places[0].tier.storage))


def test_a_block_lives_on_for_what_was_left_of_its_life():
    prompt, donor, other = Prompt("t", [1] * 10), make(0.0), make(500.0)
    write(donor, prompt, {10: "1h", 8: "5m"})
    donor.clock.now += 25.0  # type: ignore[attr-defined]
    move(donor, other, prompt, [8, 10])
    other.clock.now += 5.5  # type: ignore[attr-defined]
    other.expire()
    assert other.leading(prompt.hashes) == (2, 2)  # as long as what follows them
    assert read(other, prompt, [8])[:2] == (0, 8)  # the mark's own life is over
    other.clock.now += 169.0  # type: ignore[attr-defined]
    assert read(other, prompt, [10])[:2] == (10, 10)
    other.clock.now += 199.0  # type: ignore[attr-defined]
    assert read(other, prompt, [10])[:2] == (10, 10)  # a read prolongs it by its own TTL
    other.clock.now += 201.0  # type: ignore[attr-defined]
    other.expire()
    assert len(other) == 0


def test_what_has_outlived_its_life_is_not_lent():
    prompt, donor = Prompt("t", [1] * 8), make()
    write(donor, prompt)
    donor.clock.now += 31.0  # type: ignore[attr-defined]
    assert lend(donor, prompt.hashes, 0, [], 1 << 30) == ([], False)


def test_the_receivers_limits_hold():
    prompt, donor = Prompt("t", list(range(40))), make()
    write(donor, prompt, {40: "1h"})
    small = make(blocks=3)
    move(donor, small, prompt, [40])
    assert small.leading(prompt.hashes) == (3, 3)
    assert small.resident_bytes <= 3 * BLOCK * TOKEN
    shared = make(blocks=8, tenant_share=0.5)
    mine = Prompt("mine", [7] * 16)
    write(shared, mine)
    move(donor, shared, prompt, [40])
    assert shared.leading(mine.hashes) == (4, 4)  # nobody takes a tenant's share
    assert shared.leading(prompt.hashes) == (4, 4)


def test_what_is_being_read_does_not_give_way():
    mine, theirs = Prompt("t", [1] * 16), Prompt("t", [2] * 16)
    donor, other = make(), make(blocks=4)
    write(donor, theirs)
    write(other, mine)
    warm = other.match(mine.hashes, [])
    move(donor, other, theirs)
    assert other.leading(mine.hashes) == (4, 4)
    assert other.leading(theirs.hashes) == (0, 0)
    other.release(warm)
    move(donor, other, theirs)
    assert other.leading(theirs.hashes) == (4, 4)


def test_a_piece_is_limited_and_all_pieces_make_the_whole():
    prompt, donor, other = Prompt("t", [1] * 40), make(), make()
    write(donor, prompt)
    assert move(donor, other, prompt, most=3 * BLOCK * TOKEN) == 4
    assert other.leading(prompt.hashes) == (10, 10)
    assert move(donor, make(), prompt, most=1) == 10  # at least one block


def test_headers_are_made_of_what_is_lent_alone(monkeypatch):
    """Make none of the rest of the prompt for each piece, which held engines' threads for a time in its square."""
    prompt, donor, made = Prompt("t", list(range(40))), make(), 0
    write(donor, prompt)
    header = disk.header

    def counted(*given: Any) -> disk.Header:
        nonlocal made
        made += 1
        return header(*given)

    monkeypatch.setattr(disk, "header", counted)
    assert move(donor, make(), prompt, most=1) == 10
    assert made == 10


def test_blocks_without_the_one_before_are_left_out():
    prompt, donor, other = Prompt("t", [1] * 40), make(), make()
    write(donor, prompt)
    lent, _ = lend(donor, prompt.hashes, 0, [], 1 << 30)
    assert take(other, lent[1:]) == 0
    assert take(other, [*lent[:3], *lent[4:]]) == 3
    assert len(other) == 3


def test_blocks_that_do_not_follow_by_their_positions_are_left_out():
    prompt, donor, other = Prompt("t", [1] * 16), make(), make()
    write(donor, prompt)
    lent, _ = lend(donor, prompt.hashes, 0, [], 1 << 30)
    moved = [(replace(header, end=header.end + 4), packed) for header, packed in lent]
    assert take(other, moved) == 0
    assert take(other, [*lent[:2], *moved[2:]]) == 2


def test_a_donor_without_column_sums_has_nothing_for_whoever_needs_them():
    prompt, donor = Prompt("t", [1] * 40), make()
    write(donor, prompt, {22: "5m"})
    assert lend(donor, prompt.hashes, 0, [prompt.key(22)], 1 << 30, sums=True) == ([], False)
    write(donor, prompt, {22: "5m"}, sums=True)
    lent, _ = lend(donor, prompt.hashes, 0, [prompt.key(22)], 1 << 30, sums=True)
    assert [header.end for header, _ in lent] == [4, 8, 12, 16, 20, 22, 22]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 3},
        {"plain": 1},
        {"tokens": BLOCK + 1},
        {"tokens": -1},
        {"storage": "fp8"},
        {"expires_at": math.nan},
        {"ttl": math.inf},
    ],
)
def test_a_header_that_does_not_fit_is_refused(wrong):
    prompt, donor = Prompt("t", [1] * 8), make()
    write(donor, prompt)
    payload = seal(lend(donor, prompt.hashes, 0, [], 1 << 30)[0][0])
    with pytest.raises(PayloadError):
        unseal(replace(payload, header=replace(payload.header, **wrong)), IDENTITY, ("model",))


def test_bytes_that_do_not_fit_are_refused():
    prompt, donor = Prompt("t", [1] * 8), make()
    write(donor, prompt)
    payload = seal(lend(donor, prompt.hashes, 0, [], 1 << 30)[0][0])
    (array,) = payload.arrays
    for wrong in (
        replace(payload, arrays=(array[:-1],)),
        replace(payload, arrays=(array.astype(np.float32),)),
        replace(payload, arrays=(array, array)),
        replace(payload, shapes=((2, 2, 1, 4, 5),)),
        replace(payload, dtypes=("float16",)),
    ):
        with pytest.raises((PayloadError, ValueError)):
            unseal(wrong, IDENTITY, ("model",))
    other = replace(IDENTITY, head_dim=8)
    with pytest.raises(PayloadError):
        unseal(payload, other, ("model",))


def test_what_arrived_shares_no_memory_with_what_carried_it():
    prompt, donor, other = Prompt("t", [1] * 8), make(), make()
    write(donor, prompt)
    payloads = [seal(one) for one in lend(donor, prompt.hashes, 0, [], 1 << 30)[0]]
    for payload in payloads:
        payload.arrays[0].flags.writeable = False
    take(other, [unseal(payload, IDENTITY, ("model",)) for payload in payloads])
    for place in donor.places:
        for packed in place.blocks.values():
            packed.parts[0].zero_()
    assert torch.equal(read(other, prompt, [])[2][..., :8, :], prompt.kv[..., :8, :])


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.lists(PROMPTS, min_size=1, max_size=6))
def test_stores_that_exchange_at_random_never_give_wrong_kv(seed, prompts):
    """Two small stores with tiers that write, fetch from each other and forget: what is found is what was computed."""
    chance = random.Random(seed)
    stores = [make(now, blocks=5, host={"memory_bytes": 7 * BLOCK * TOKEN}) for now in (0.0, 1e6)]
    for _ in range(25):
        at, prompt = chance.randrange(2), chance.choice(prompts)
        marks = {chance.randint(1, len(prompt.tokens)): "1h"}
        match chance.randrange(4):
            case 0:
                write(stores[at], prompt, marks)
            case 1:
                move(stores[at], stores[1 - at], prompt, sorted(marks), chance.randint(1, 500))
            case 2:
                hit, tokens, found, _ = read(stores[at], prompt, sorted(marks))
                assert torch.equal(found[..., :tokens, :], prompt.kv[..., :tokens, :])
                assert hit in {0, *marks}
            case 3:
                for store in stores:
                    store.clock.now += chance.choice([1.0, 40.0])  # type: ignore[attr-defined]
                    store.expire()
        for store in stores:
            check_tree(store.tree)
            for place, space in zip(store.places, store.tree.spaces, strict=True):
                assert space.bytes <= space.capacity
                assert space.bytes == sum(packed.nbytes for packed in place.blocks.values())


def test_what_a_store_tells_of_its_blocks_is_what_it_holds_in_unix_time():
    config = {"block_size": BLOCK, "min_tokens": 1, "memory_bytes": 1 << 20, "ttls": LIVES}
    known = PrefixCacheConfig.model_validate(config)
    store = BlockStore(known, IDENTITY, CPU, Clock(100.0), wall_clock=lambda: 1.7e9)
    prompt = Prompt("t", list(range(2 * BLOCK + 1)))
    write(store, prompt, {2 * BLOCK + 1: "1h"}, sums=True)
    told = store.contents(10)
    entries = told.tiers["device"]
    assert (told.at, len(entries)) == (1.7e9, 4)  # two blocks, a tail, and its column sums
    for held in entries:
        node = store.tree.ending(held.key)
        assert node is not None
        assert (held.plain, held.tokens, held.tenant, held.ttl) == (node.plain, node.tokens, "t", node.ttl)
        assert held.expires_at == 1.7e9 + node.ttl
        assert held.parent == (node.parent.keys[-1] if node.parent is not None else b"")
    assert sum(held.mark_expires_at == 1.7e9 + 200 for held in entries) == 1
    assert len(store.contents(2).tiers["device"]) == 2
