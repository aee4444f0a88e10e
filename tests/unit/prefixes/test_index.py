from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warmkv.prefixes.index import PrefixIndex

REPLICAS = [f"replica-{number}" for number in range(6)]
# Keys of a tree: a node's key is the path to it, so equal keys mean equal prefixes, as with chained hashes.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def chain(path):
    return [bytes(path[: end + 1]) for end in range(len(path))]


class IndexMachine(RuleBasedStateMachine):
    """The index beside a dict of sets, under prefix-closed changes as stores make them."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.held = {}

    @rule(replica=st.sampled_from(REPLICAS), path=PATHS)
    def add(self, replica, path):
        self.index.add(replica, chain(path))
        self.held.setdefault(replica, set()).update(chain(path))

    @rule(replica=st.sampled_from(REPLICAS), path=PATHS)
    def remove_with_all_that_follows(self, replica, path):
        gone = [key for key in self.held.get(replica, ()) if key.startswith(bytes(path))]
        self.index.remove(replica, [*gone, b"never seen"])
        self.held.get(replica, set()).difference_update(gone)

    @rule(replica=st.sampled_from(REPLICAS))
    def drop(self, replica):
        self.index.drop_replica(replica)
        self.held.pop(replica, None)

    @rule(path=PATHS)
    def match(self, path):
        expected = {}
        for replica, keys in self.held.items():
            count = 0
            while count < len(path) and chain(path)[count] in keys:
                count += 1
            if count:
                expected[replica] = count
        assert self.index.longest_match(chain(path)) == expected

    @invariant()
    def agrees(self):
        assert len(self.index) == len(set().union(*self.held.values()))
        assert set(self.index.replicas) == set(self.held)
        for replica in REPLICAS:
            assert set(self.index.keys_of(replica)) == self.held.get(replica, set())
            assert self.index.blocks_of(replica) == len(self.held.get(replica, ()))


TestIndex = IndexMachine.TestCase


def test_nothing_matches_an_empty_prompt():
    index = PrefixIndex()
    index.add("a", [b"1"])
    assert index.longest_match([]) == {}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200))
def test_many_replicas_hold_as_much_as_each_was_given(depths):
    index = PrefixIndex()
    keys = chain(list(range(30)))
    for number, depth in enumerate(depths):
        index.add(f"r{number}", keys[:depth])
    assert index.longest_match(keys) == {f"r{n}": depth for n, depth in enumerate(depths) if depth}


def test_bits_of_replicas_that_left_are_used_again():
    index = PrefixIndex()
    for number in range(1000):
        index.add(f"r{number}", [b"block"])
        index.drop_replica(f"r{number}")
    index.add("last", [b"block"])
    assert index._masks == {b"block": 1}
