import tracemalloc
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warmkv.prefixes.index import MEND_EVERY, TIERS, PrefixIndex
from warmkv.prefixes.mask_table import MaskTable, pack, unpack

REPLICAS = [f"replica-{number}" for number in range(6)]
# Keys of a tree: a node's key has the path to it, so equal keys mean equal prefixes, as with chained hashes.
PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=7)


def chain(path):
    return [bytes(path[: end + 1]).ljust(8, b"\0") for end in range(len(path))]


def begins(key, path):
    return key.startswith(bytes(path))


class Obvious:
    """A dict of what each replica holds in which tiers, and a walk."""

    def __init__(self):
        self.held = {}  # replica -> key -> the fastest tier, as its place in TIERS

    def depths(self, hashes):
        found = {}
        for replica, tiers in self.held.items():
            depths = []
            for slowest in range(len(TIERS)):
                count = 0
                while count < len(hashes) and tiers.get(hashes[count], len(TIERS)) <= slowest:
                    count += 1
                depths.append(count)
            if depths[-1]:
                found[replica] = tuple(depths)
        return found


class IndexMachine(RuleBasedStateMachine):
    """The index beside the obvious one, under changes as stores make them: each tier with the faster ones is closed."""

    def __init__(self):
        super().__init__()
        self.index, self.obvious = PrefixIndex(), Obvious()

    @rule(replica=st.sampled_from(REPLICAS), path=PATHS)
    def store(self, replica, path):
        self.index.add(replica, pack(chain(path)))
        self.obvious.held.setdefault(replica, {}).update(dict.fromkeys(chain(path), 0))

    @rule(replica=st.sampled_from(REPLICAS), path=PATHS, tier=st.integers(1, 2))
    def demote_with_all_that_follows(self, replica, path, tier):
        tiers = self.obvious.held.get(replica, {})
        moved = [key for key, at in tiers.items() if begins(key, path) and at < tier]
        if moved:
            self.index.add(replica, pack(moved), TIERS[tier])
            tiers.update(dict.fromkeys(moved, tier))

    @rule(replica=st.sampled_from(REPLICAS), path=PATHS)
    def remove_with_all_that_follows(self, replica, path):
        tiers = self.obvious.held.get(replica, {})
        gone = [key for key in tiers if begins(key, path)]
        self.index.remove(replica, pack([*gone, b"unseen!!"]))
        for key in gone:
            del tiers[key]

    @rule(replica=st.sampled_from(REPLICAS))
    def drop(self, replica):
        self.index.drop_replica(replica)
        self.obvious.held.pop(replica, None)

    @rule(path=PATHS)
    def match(self, path):
        assert self.index.longest_match(chain(path)) == self.obvious.depths(chain(path))
        for replica, depths in self.index.longest_match(chain(path)).items():
            for start in range(MEND_EVERY):
                assert self.index.mend(replica, chain(path)[: depths[-1]], start) == depths[-1]

    @invariant()
    def agrees(self):
        held = self.obvious.held
        assert len(self.index) == len(set().union(*held.values()))
        assert set(self.index.replicas) == set(held)
        assert set(self.index.contents()) == set(held)
        for replica, by_tier in self.index.contents().items():
            assert {key: at for at, tier in enumerate(TIERS) for key in unpack(by_tier[tier])} == held[replica]
        for replica in REPLICAS:
            assert set(unpack(self.index.keys_of(replica))) == held.get(replica, {}).keys()
            assert self.index.blocks_of(replica) == len(held.get(replica, ()))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=50, stateful_step_count=40)

DEPTH = 24
KEYS = [bytes([number]) * 16 for number in range(DEPTH)]


@given(st.dictionaries(st.sampled_from(REPLICAS), st.sets(st.integers(0, DEPTH - 1))))
def test_a_gap_makes_a_match_too_long_at_most_and_is_mended(held):
    """Any presence at all, closed or not."""
    index = PrefixIndex()
    for replica, blocks in held.items():
        index.add(replica, pack([KEYS[number] for number in sorted(blocks)]))
    for replica, blocks in held.items():
        true = next(number for number in range(DEPTH + 1) if number not in blocks)
        claimed = index.longest_match(KEYS).get(replica, (0, 0, 0))[-1]
        assert claimed >= true
        assert claimed == 0 or claimed - 1 in blocks
        for start in range(MEND_EVERY):
            left = index.mend(replica, KEYS[:claimed], start)
            assert left == claimed or not index.holds(replica, pack([KEYS[left]]))[0]
        assert index.longest_match(KEYS).get(replica, (0, 0, 0))[-1] == true
        assert index.blocks_of(replica) <= len(blocks)


def test_nothing_matches_an_empty_prompt():
    index = PrefixIndex()
    index.add("a", b"12345678")
    assert index.longest_match([]) == {}
    assert index.mend("unknown", [b"12345678"], 0) == 0


@given(st.lists(st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH), st.integers(0, DEPTH)), max_size=60))
def test_many_replicas_hold_as_much_as_each_was_given(given_depths):
    index, expected = PrefixIndex(), {}
    for number, depths in enumerate(given_depths):
        device, host, disk = sorted(depths)
        for tier, blocks in zip(TIERS, (KEYS[:device], KEYS[device:host], KEYS[host:disk]), strict=True):
            index.add(f"r{number}", pack(blocks), tier)
        if disk:
            expected[f"r{number}"] = (device, host, disk)
    assert index.longest_match(KEYS) == expected


@pytest.mark.parametrize("length", [1, 2, 12, 13, 14, DEPTH])
def test_where_replicas_parted_before_changes_no_match(length):
    index = PrefixIndex()
    index.add("a", pack(KEYS))
    for held in (3, 13, 12, 14, 1, DEPTH, 2):
        index.add("b", pack(KEYS[:held]))
        expected = {name: (depth, depth, depth) for name, depth in (("a", length), ("b", min(held, length)))}
        for asked in (KEYS, KEYS[:length]):  # where the replicas part of the first is remembered
            matched = index.longest_match(asked)
        assert matched == index.longest_match(KEYS[:length]) == expected
        index.remove("b", pack(KEYS[:held]))


def test_hashes_that_begin_alike_are_one_block():
    index = PrefixIndex()
    index.add("a", pack([b"12345678" + b"one"]))
    assert index.longest_match([b"12345678" + b"two"]) == {"a": (1, 1, 1)}
    index.remove("a", b"12345678")
    assert len(index) == 0


def test_an_unknown_tier_is_refused_and_changes_nothing():
    index = PrefixIndex()
    with pytest.raises(KeyError):
        index.add("a", b"12345678", "tape")
    assert (index.replicas, len(index)) == ((), 0)


def test_bits_of_replicas_that_left_are_used_again():
    index = PrefixIndex()
    index.add("first", b"another!")
    before = index.nbytes
    for number in range(100):
        index.add(f"r{number}", b"theblock")
        index.drop_replica(f"r{number}")
    index.add("last", b"theblock")
    assert index.holders(b"theblock") == ["last"]
    assert index.nbytes == before


def test_everything_is_read_once_however_many_replicas_there_are(monkeypatch):
    """Read them once, since a gateway that starts is sent everything in one turn of the directory."""
    index = PrefixIndex()
    for number in range(30):
        index.add(f"r{number}", pack(KEYS), TIERS[number % 3])
    reads, table = [], MaskTable._table
    monkeypatch.setattr(MaskTable, "_table", lambda self: reads.append(None) or table(self))
    assert index.contents()["r2"] == {"device": b"", "host": b"", "disk": pack(sorted(KEYS))}
    assert len(reads) == 2  # words of a mask


def test_the_index_knows_what_it_takes():
    keys = pack([blake2b(number.to_bytes(4), digest_size=16).digest() for number in range(50_000)])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = PrefixIndex()
    for replica in REPLICAS:
        index.add(replica, keys[: 320_000 if replica == REPLICAS[0] else 400_000])
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used == pytest.approx(index.nbytes, rel=0.05)
    assert index.nbytes / len(index) <= 60
