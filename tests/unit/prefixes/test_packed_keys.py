import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import packed_keys
from warmkv.prefixes.packed_keys import KeyTable, packed, ranks, unpacked

# Few halves, so that keys share one of them, and slots.
KEYS = st.tuples(st.sampled_from([b"1" * 8, b"2" * 8, bytes(8)]), st.integers(0, 40)).map(
    lambda halves: halves[0] + halves[1].to_bytes(8, "little")
)
BATCHES = st.lists(st.lists(KEYS, max_size=60), max_size=5)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    monkeypatch.setattr(packed_keys, "FIRST_SLOTS", 4)  # so that they grow


@given(BATCHES)
def test_keys_are_numbered_in_the_order_in_which_they_occur(batches):
    table, known = KeyTable(), dict[bytes, int]()
    for batch in batches:
        expected = [known.setdefault(key, len(known)) for key in batch]
        assert table.number(packed(b"".join(batch))).tolist() == expected
    assert len(table) == len(known)
    assert unpacked(table.close()) == list(known)


def test_many_keys_of_digests():
    keys = np.random.default_rng(0).integers(0, 2**63, (20_000, 2)).astype(np.uint64)
    table = KeyTable()
    assert table.number(keys).tolist() == list(range(20_000))
    assert table.number(keys[::-7]).tolist() == list(range(20_000))[::-7]
    assert (table.close() == keys).all()


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_ranks_begin_at_zero_and_rise_where_a_number_is_new(numbers, chunk):
    known = {}
    expected = [known.setdefault(number, len(known)) for number in numbers]
    assert ranks(np.array(numbers, dtype=np.int32), chunk).tolist() == expected
