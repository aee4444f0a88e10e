"""What is about to be held is found as a look at every request in flight would find it."""

from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.in_flight_prefixes import MOST, InFlightPrefixes

REPLICAS = ["a", "b", "c"]


def chain(tokens):
    """Hashes of which each stands for all tokens up to its own."""
    return [bytes(tokens[: end + 1]) for end in range(len(tokens))]


CHAINS = st.integers(0, 20).flatmap(
    lambda shared: st.lists(st.integers(0, 1), max_size=12).map(lambda own: chain([0] * shared + own))
)
ENTRIES = st.lists(st.tuples(CHAINS, st.sampled_from(REPLICAS), st.integers(0, 24), st.integers(0, 32)), max_size=MOST)


def common(one, other):
    return sum(left == right for left, right in zip(one, other, strict=False))


@given(ENTRIES, CHAINS, st.integers(0, 20), st.data())
def test_it_finds_what_a_look_at_every_request_finds(entries, asked, known, data):
    coming, there = InFlightPrefixes(), {}
    for number, (hashes, replica, held, leaves) in enumerate(entries):
        leaves = min(leaves, len(hashes))
        coming.add(number, replica, hashes, held, leaves)
        if leaves > held:
            there[number] = (replica, hashes[:leaves], held)
    for number in data.draw(st.sets(st.sampled_from(range(len(entries)))) if entries else st.just(set())):
        coming.remove(number)
        there.pop(number, None)
    for number in data.draw(st.sets(st.sampled_from(range(len(entries)))) if entries else st.just(set())):
        coming.move(number, "c")
        if number in there:
            there[number] = ("c", there[number][1], 0)
    assert len(coming) == len(there)

    found = coming.depths(asked, known)
    longest = {}
    for replica, hashes, _ in there.values():
        longest[replica] = max(longest.get(replica, 0), common(hashes, asked))
    assert all(known < depth <= longest[replica] for replica, depth in found.items())
    # A request is found by a power of two above what was known, where it was sent and where it is looked for.
    findable = [
        common(hashes, asked)
        for replica, hashes, held in there.values()
        if any(max(known, held) < at <= common(hashes, asked) for at in (1, 2, 4, 8, 16, 32))
    ]
    assert max(found.values(), default=0) == max(findable, default=0)


def test_nothing_stays_of_requests_that_have_ended():
    coming = InFlightPrefixes()
    hashes = chain([1] * 9)
    coming.add("1", "a", hashes, 0, 9)
    coming.add("1", "b", hashes, 2, 9)
    coming.move("1", "c")
    assert coming.depths(hashes, 0) == {"c": 9}
    coming.remove("1")
    coming.remove("1")
    coming.move("1", "a")
    assert coming.depths(hashes, 0) == {}
    assert not coming._requests
    assert not coming._chains


def test_only_what_is_left_behind_is_found():
    coming = InFlightPrefixes()
    coming.add("1", "a", chain([1] * 20), 0, 10)
    coming.add("2", "b", chain([1] * 20), 20, 20)
    assert coming.depths(chain([1] * 20), 0) == {"a": 10}
    assert coming.depths(chain([1] * 20), 10) == {}
    assert coming.depths(chain([1] * 9 + [0]), 0) == {"a": 9}


def test_many_requests_take_no_longer_than_a_few():
    coming = InFlightPrefixes()
    for number in range(100):
        coming.add(number, f"replica-{number}", chain([1] * 8), 0, 8)
    assert coming.depths(chain([1] * 8), 0) == {f"replica-{number}": 8 for number in range(100 - MOST, 100)}
