import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.hashing import DIGEST_BYTES, block_hashes, chain_root, extend, prefix_key, tenant_salt

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SIZES = st.integers(1, 9)
ROOT = chain_root(b"salt", "model", "64")


@given(TOKENS, SIZES)
def test_a_block_hash_is_the_chain_of_all_tokens_before_it(tokens, size):
    parent, expected = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = extend(parent, tokens[start : start + size])
        expected.append(parent)
    assert block_hashes(tokens, size, ROOT) == expected
    assert len(expected) == len(tokens) // size


@given(TOKENS, TOKENS, SIZES)
def test_hashes_agree_exactly_as_far_as_the_blocks_do(left, right, size):
    common = 0
    while (end := (common + 1) * size) <= min(len(left), len(right)) and left[:end] == right[:end]:
        common += 1
    ours, theirs = block_hashes(left, size, ROOT), block_hashes(right, size, ROOT)
    assert ours[:common] == theirs[:common]
    assert not set(ours[common:]) & set(theirs[common:])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), SIZES)
def test_prefix_keys_name_every_position_once(tokens, size):
    hashes = block_hashes(tokens, size, ROOT)
    keys = [prefix_key(tokens, at, size, hashes, ROOT) for at in range(len(tokens) + 1)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == ROOT
    assert keys[size::size][: len(hashes)] == hashes


@given(TOKENS, SIZES)
def test_arrays_hash_as_lists(tokens, size):
    assert block_hashes(np.array(tokens, dtype=np.int64), size, ROOT) == block_hashes(tokens, size, ROOT)


def test_a_known_hash_stays_what_it_is():
    data = ROOT + b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert extend(ROOT, [1, 2]) == hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
    assert len(ROOT) == DIGEST_BYTES


def test_roots_differ_by_salt_and_by_where_the_parts_end():
    roots = [chain_root(b"a", "x", "y"), chain_root(b"b", "x", "y"), chain_root(b"a", "xy", ""), chain_root(b"a", "xy")]
    assert len(set(roots)) == 4


def test_salts_differ_by_tenant_and_by_secret():
    salts = {tenant_salt(secret, tenant) for secret in (b"1", b"2") for tenant in ("ada", "bob")}
    assert len(salts) == 4


def test_a_token_that_is_no_32_bit_number_is_refused():
    with pytest.raises(OverflowError):
        block_hashes([2**32], 1, ROOT)
    with pytest.raises(OverflowError):
        extend(ROOT, [-1])
