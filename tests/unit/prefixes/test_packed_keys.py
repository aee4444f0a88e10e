import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.packed_keys import Page, distinct, number, numbers_of

KEYS = st.tuples(st.sampled_from([b"1" * 8, b"2" * 8, bytes(8)]), st.sampled_from([b"1" * 8, b"\xff" * 8])).map(
    b"".join
)
CHAINS = st.lists(st.lists(KEYS, min_size=1, max_size=6), max_size=8)


def pack(chains, lines_of_a_page=3):
    """Return chains as they are read from a log: full pages are closed."""
    page, found = Page(), []
    for at, chain in enumerate(chains):
        if at and not at % lines_of_a_page:
            page.close()
            page = Page()
        found.append(page.add(b"".join(chain)))
    return found


def same(packed, chains):
    assert packed == [tuple(chain) for chain in chains]
    assert [tuple(chain) for chain in chains] == packed
    for one, chain in zip(packed, chains, strict=True):
        assert [one[at] for at in range(-len(chain), len(chain))] == chain + chain
        assert (len(one), one[1:-1], hash(one)) == (len(chain), tuple(chain[1:-1]), hash(tuple(chain)))
        for outside in (len(chain), -len(chain) - 1):
            with pytest.raises(IndexError):
                one[outside]


@given(CHAINS)
def test_keys_are_the_same_before_and_after_they_are_numbered(chains):
    packed = pack(chains)
    same(packed, chains)
    number(packed)
    same(packed, chains)
    number([*packed, *pack(chains)])  # some pages are numbered already
    same(packed, chains)
    if packed:
        assert pickle.loads(pickle.dumps(packed[0])) == tuple(chains[0])


@given(CHAINS, st.booleans(), st.data())
def test_equal_keys_have_equal_numbers_in_the_order_in_which_they_occur(chains, mixed, data):
    order = data.draw(st.permutations(range(len(chains))))
    packed = [pack(chains)[at] for at in order]
    ordered = [chains[at] for at in order]
    if mixed and packed:
        packed[-1] = tuple(ordered[-1])
    known = {}
    expected = [known.setdefault(key, len(known)) for chain in ordered for key in chain]
    assert numbers_of(packed).tolist() == expected


@given(st.lists(KEYS))
def test_distinct_keys_stand_in_the_order_in_which_they_occur(keys):
    found, numbers = distinct(b"".join(keys))
    assert found == b"".join(dict.fromkeys(keys))
    assert [found[at * 16 : at * 16 + 16] for at in numbers] == keys
