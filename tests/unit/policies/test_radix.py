"""The prefix tree by keys: beside a dictionary of blocks, and what it tells of what comes and leaves."""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.replicas.block_store.harness import check_tree
from warmkv.policies import eviction
from warmkv.policies.eviction import PrefillCost
from warmkv.policies.prefix_tree.held import Copied, Left, Stored
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.tiers import Tier

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
TTLS = st.sampled_from([1.0, 4.0, 10.0, math.inf])
ORDERS = {name: eviction.order(name, PrefillCost(3)) for name in ("lru", "lfu", "length", "cost")}


def chain(*path):
    """Return keys of a tree: a block's key is the path to it, as a chained hash covers all before it."""
    return [bytes(path[: end + 1]) for end in range(len(path))]


def tiers(*capacities, order=eviction.lru, share=0.0):
    names = ("device", "host", "disk")
    return RadixTree([Tier(name, size, order) for name, size in zip(names, capacities, strict=False)], share)


def store(tree, keys, now=0.0, ttl=100.0, tenant=""):
    """Store blocks of a token and a byte each; return what changed."""
    tree.expire(now)
    tree.store(tree.path(keys, 1, 1), ttl, now, tenant)
    return tree.changes()


def keys_of(tree, tier=0):
    return {key for run in tree.recent(tier) for key in run.keys}


def matched(tree, keys):
    return sum(node.length for node in tree.find(keys))


def gone(changes, why="evicted"):
    """Return keys that left, in the order in which they did: of each run the last one first."""
    return [
        key for change in changes if isinstance(change, Left) and change.why == why for key in change.run.keys[::-1]
    ]


class RadixMachine(RuleBasedStateMachine):
    """Compare a tier with a dictionary, with every rule written out the slow way.

    A model entry is [expires_at, ttl, mark_expires_at, mark_ttl, reads, used, floor].
    """

    @initialize(capacity=st.integers(0, 15), order=st.sampled_from(sorted(ORDERS)))
    def start(self, capacity, order):
        self.order = ORDERS[order]
        self.tree, self.capacity, self.now = tiers(capacity, order=self.order), capacity, 0.0
        self.model, self.pinned = {}, []
        self.ticks, self.floor = 0, 0.0

    def pins(self, key):
        return sum(key in keys for keys, _ in self.pinned)

    def matched(self, keys):
        return next((at for at, key in enumerate(keys) if key not in self.model), len(keys))

    def use(self, keys, read=False):
        for key in reversed(keys):
            entry = self.model[key]
            entry[0] = max(entry[0], self.now + entry[1])
            if read and entry[2] > self.now:
                entry[2] = max(entry[2], self.now + entry[3])
            entry[4] += read
            self.ticks += 1
            entry[5], entry[6] = self.ticks, self.floor

    def worth(self, key):
        """Return that of one more block, at the floor when it was used: by reads, or less the longer its prefix is."""
        return self.model[key][6] + (1 + self.model[key][4] if self.order is eviction.lfu else 1 / len(key))

    def has_children(self, key):
        return any(other[:-1] == key for other in self.model if len(other) > 1)

    def sweep(self):
        """Expire in both; each says the same."""
        swept = []
        while ends := [
            key
            for key, entry in self.model.items()
            if entry[0] <= self.now and not self.pins(key) and not self.has_children(key)
        ]:
            for key in ends:
                del self.model[key]
            swept += ends
        self.tree.expire(self.now)
        assert sorted(gone(self.tree.changes(), "expired")) == sorted(swept)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds):
        self.now += seconds
        self.sweep()

    @rule(path=PATHS, ttl=TTLS)
    def store(self, path, ttl):
        keys = chain(*path)
        present = self.matched(keys)
        for key in keys[:present]:
            self.model[key][1] = max(self.model[key][1], ttl)
            self.model[key][0] = max(self.model[key][0], self.now + self.model[key][1])
        changes = store(self.tree, keys, self.now, ttl)
        for victim in gone(changes):  # each was an end that nobody read; under lru, the least recent one
            ends = [k for k in self.model if not self.pins(k) and not self.has_children(k) and k not in keys]
            assert victim in ends
            if self.order is eviction.lru:
                assert victim == min(ends, key=lambda k: self.model[k][5])
            if self.order in (eviction.lfu, eviction.length):
                assert self.worth(victim) == min(map(self.worth, ends))
                self.floor = max(self.floor, self.worth(victim))
            del self.model[victim]
        stored = keys[present : present + self.capacity - len(self.model)]
        for key in stored:
            self.model[key] = [self.now + ttl, ttl, -math.inf, 0.0, 0, 0, 0.0]
        self.use(keys[: present + len(stored)])
        assert [key for change in changes if isinstance(change, Stored) for key in change.run.keys] == stored
        if present + len(stored) < len(keys):  # it did not fit, whatever was given up
            assert sum(1 for k in self.model if self.pins(k) or k in keys) >= self.capacity
        if gone(changes):  # no more than needed
            assert len(self.model) == self.capacity

    @rule(path=PATHS)
    def read(self, path):
        found = self.tree.find(chain(*path))
        keys = chain(*path)[: sum(node.length for node in found)]
        assert len(keys) == self.matched(chain(*path))
        self.tree.touch(found, self.now)
        self.use(keys, read=True)

    @rule(path=PATHS, ttl=st.sampled_from([1.0, 4.0]))
    def mark(self, path, ttl):
        found = self.tree.find(chain(*path))
        if self.matched(chain(*path)) == len(path):
            self.tree.mark(found[-1], ttl, self.now)
            entry = self.model[bytes(path)]
            entry[3] = max(ttl, entry[3] if entry[2] > self.now else 0.0)
            entry[2] = max(entry[2], self.now + entry[3])

    @rule(path=PATHS)
    def pin(self, path):
        found = self.tree.find(chain(*path))
        self.pinned.append((chain(*path)[: sum(node.length for node in found)], self.tree.pin(found, 0)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data):
        _, reading = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.tree.release(reading)
        self.sweep()

    @rule(path=PATHS)
    def lose(self, path):
        """Lose a block with all behind it, readers or not."""
        branch = {key for key in self.model if key[: len(path)] == bytes(path)}
        self.tree.lose([bytes(path)], 0)
        assert set(gone(self.tree.changes(), "dropped")) == branch
        for key in branch:
            del self.model[key]
        self.pinned = [([key for key in keys if key not in branch], reading) for keys, reading in self.pinned]
        self.sweep()  # who was before them may have outlived its TTL

    @invariant()
    def agrees(self):
        assert keys_of(self.tree) == set(self.model)
        space = self.tree.spaces[0]
        assert space.bytes == len(self.model) <= self.capacity
        assert space.pinned == sum(self.pins(key) > 0 for key in self.model)
        for block in (block for run in self.tree.recent(0) for block in run.blocks()):
            entry = self.model[block.key]
            assert (block.ttl, block.expires_at) == (entry[1], entry[0])
            assert (block.parent, block.end) == (block.key[:-1], len(block.key))
            assert (self.tree.marked(block.key, self.now) is not None) == (entry[2] > self.now)
            if self.order in (eviction.lfu, ORDERS["cost"]):
                assert block.reads == entry[4]
        check_tree(self.tree)

    @invariant()
    def deadlines_are_early_enough(self):
        unpinned = [entry[0] for key, entry in self.model.items() if not self.pins(key) and not self.has_children(key)]
        assert self.tree.next_deadline <= min(unpinned, default=math.inf)


RadixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRadix = RadixMachine.TestCase


# --- where blocks live


def test_what_is_evicted_goes_down_with_the_chain_before_it():
    tree = tiers(3, 10)
    store(tree, chain(1, 1, 1))
    copied, left, stored = store(tree, chain(2), 1.0)
    assert (copied.run.keys, copied.source, copied.tier) == (chain(1, 1, 1), 0, 1)
    assert (left.run.keys, left.tier, left.why) == (chain(1, 1, 1)[2:], 0, "evicted")
    assert (stored.run.keys, stored.tier) == (chain(2), 0)
    left, stored = store(tree, chain(3), 2.0)  # it is below already
    assert (left.run.keys, stored.run.keys) == (chain(1, 1, 1)[1:2], chain(3))
    assert matched(tree, chain(1, 1, 1)) == 3


def test_what_has_expired_goes_nowhere():
    tree = tiers(3, 10)
    store(tree, chain(1, 1, 1), ttl=5.0)
    changes = store(tree, chain(2), 6.0)
    assert sorted(gone(changes, "expired")) == chain(1, 1, 1)
    assert not any(isinstance(change, Copied) for change in changes)


def test_what_is_found_below_comes_up_with_the_life_that_it_has():
    tree = tiers(3, 10)
    store(tree, chain(1, 1, 1), ttl=50.0)
    tree.mark(tree.find(chain(1, 1, 1))[-1], 50.0, 0.0)
    store(tree, chain(2, 2, 2), 1.0)
    assert keys_of(tree) == set(chain(2, 2, 2))
    path = tree.find(chain(1, 1, 1))
    tree.touch(path, 10.0)
    tree.promote(path, 10.0)
    stored = [change for change in tree.changes() if isinstance(change, Stored)]
    assert [(change.run.keys, change.tier, change.run.since) for change in stored] == [(chain(1, 1, 1), 0, 10.0)]
    assert tree.marked(bytes([1, 1, 1]), 59.0)
    assert {run.expires_at for run in tree.recent(0) if run.keys[0] == b"\x01"} == {60.0}
    tree.promote(path, 11.0)
    assert tree.changes() == []


def test_a_chain_too_long_for_the_device_is_kept_whole_below():
    tree = tiers(2, 10)
    store(tree, chain(1, 1, 1, 1, 1))
    assert (len(keys_of(tree)), len(keys_of(tree, 1)), matched(tree, chain(1, 1, 1, 1, 1))) == (2, 5, 5)


def test_the_head_of_a_chain_that_is_too_long_is_kept():
    tree = tiers(3)
    (stored,) = store(tree, chain(1, 1, 1, 1))
    assert stored.run.keys == chain(1, 1, 1)
    assert matched(tree, chain(1, 1, 1, 1)) == 3


def blocks_of(tree, keys):
    return list(tree.held(tree.find(keys), [0]))


def test_a_chain_of_another_replica_comes_where_a_computed_one_would():
    donor, tree = tiers(10), tiers(2, 10)
    store(donor, chain(1, 1, 1, 1), ttl=50.0)
    donor.mark(donor.find(chain(1, 1))[-1], 20.0, 5.0)
    tree.adopt(None, blocks_of(donor, chain(1, 1, 1, 1)), 10.0)
    kept = [(key, change.tier) for change in tree.changes() for key in change.run.keys]
    assert kept == [(key, 0) for key in chain(1, 1)] + [(key, 1) for key in chain(1, 1, 1, 1)]
    assert {(run.expires_at, run.ttl) for tier in (0, 1) for run in tree.recent(tier)} == {(50.0, 50.0)}
    assert tree.marked(bytes([1, 1]), 24.0)
    assert not tree.marked(bytes([1, 1]), 25.0)
    tree.adopt(None, blocks_of(donor, chain(1, 1)), 11.0)
    assert tree.changes() == []


def test_what_is_there_lives_as_long_as_what_comes_behind_it():
    donor, tree = tiers(10), tiers(10)
    store(donor, chain(1, 1, 1), ttl=50.0)
    store(tree, chain(1, 1), ttl=5.0)
    tree.adopt(tree.ending(bytes([1])), blocks_of(donor, chain(1, 1, 1))[1:], 1.0)
    tree.expire(49.0)
    assert keys_of(tree) == set(chain(1, 1, 1))


@pytest.mark.parametrize("capacities", [(5,), (5, 9), (5, 9, 20), (0, 9), (9, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_changes_are_what_the_tiers_hold_and_every_tier_is_closed(capacities, seed):
    """Carry the changes out: it gives what the tiers hold; a copy is only made of what is there."""
    chance, tree, now = random.Random(seed), tiers(*capacities), 0.0
    held = [set() for _ in capacities]
    for _ in range(400):
        now += chance.choice([0.0, 1.0, 5.0])
        path = chain(*(chance.randint(0, 1) for _ in range(chance.randint(1, 6))))
        tree.expire(now)
        match chance.randrange(4):
            case 0 | 1:
                tree.store(tree.path(path, 1, 1), chance.choice([3.0, 20.0]), now, "")
            case 2:
                if found := tree.find(path):
                    tree.touch(found, now)
                    tree.promote(found, now)
            case _:
                tree.lose(path[-1:], chance.randrange(len(capacities)))
        for change in tree.changes():
            keys, there = set(change.run.keys), held[change.tier]
            match change:
                case Stored():
                    assert not keys & there
                    there |= keys
                case Copied(_, source, _):
                    assert keys <= held[source]
                    assert not keys & there
                    there |= keys
                case Left():
                    assert keys <= there
                    there -= keys
        for tier, keys in enumerate(held):
            assert keys_of(tree, tier) == keys
            assert len(keys) <= capacities[tier]
            assert all(key[:-1] in keys for key in keys if len(key) > 1)
        check_tree(tree)


def test_what_is_restored_is_found_as_it_was_and_shares_nodes():
    chance, tree = random.Random(1), tiers(10_000)
    for number in range(60):
        path = chain(*(chance.randint(0, 1) for _ in range(chance.randint(1, 9))))
        store(tree, path, float(number // 20), chance.choice([50.0, 90.0]))
    blocks = [block for run in tree.recent(0) for block in run.blocks()]
    blocks.sort(key=lambda block: block.end)
    again = tiers(10_000)
    assert again.restore(0, blocks) == []
    assert {block._replace(used_at=0.0, since=0.0) for run in again.recent(0) for block in run.blocks()} == {
        block._replace(used_at=0.0, since=0.0) for block in blocks
    }
    assert len(list(again.recent(0))) <= len(list(tree.recent(0)))
    check_tree(again)


def test_what_follows_nothing_or_has_no_room_is_not_restored():
    tree, again = tiers(9), tiers(3)
    store(tree, chain(1, 1, 1, 1))
    one, two, three, four = blocks_of(tree, chain(1, 1, 1, 1))
    assert again.restore(0, [two, three]) == [two, three]
    assert again.restore(0, [one, two, four, three]) == [four]
    assert keys_of(again) == set(chain(1, 1, 1))


def test_a_look_up_compares_as_many_keys_for_long_runs_as_for_short_ones():
    class Counted(bytes):
        compared = 0

        def __eq__(self, other):
            Counted.compared += 1
            return bytes.__eq__(self, other)

        __hash__ = bytes.__hash__

    counts = []
    for blocks in (10, 10_000):
        tree = tiers(blocks)
        store(tree, [b"%d" % at for at in range(blocks)])
        Counted.compared = 0
        assert matched(tree, [Counted(b"%d" % at) for at in range(blocks)]) == blocks
        counts.append(Counted.compared)
    assert counts[0] == counts[1]


# --- what goes first


def history(tree):
    """Store a long chain read often, a short one read once and lately, a single block never read."""
    store(tree, chain(1, 1), 0.0)
    for now in (1.0, 2.0, 3.0):
        tree.touch(tree.find(chain(1, 1)), now)
    store(tree, chain(2), 4.0)
    store(tree, chain(3), 5.0)
    tree.touch(tree.find(chain(2)), 6.0)


@pytest.mark.parametrize(("order", "first"), [("lru", (1, 1)), ("lfu", (3,)), ("length", (1, 1)), ("cost", (3,))])
def test_each_order_gives_up_another_block(order, first):
    tree = tiers(4, order=ORDERS[order])
    history(tree)
    ends = [path[-1].keys[held - 1] for path, held in tree.by_worth(0)]
    assert sorted(ends) == [bytes([1, 1]), bytes([2]), bytes([3])]
    assert gone(store(tree, chain(4), 50.0)) == [bytes(first)] == ends[-1:]


def test_what_is_dear_to_compute_stays_longer_by_cost():
    tree = tiers(200, order=ORDERS["cost"])
    for at, (key, plain) in enumerate(((b"a", 10), (b"x", 10), (b"heavy", 160))):
        tree.store([tree.behind([], [key], 8, plain)], 99.0, float(at), "")
    tree.changes()
    tree.store([tree.behind([], [b"new"], 80, 170)], 99.0, 3.0, "")  # as many tokens in more bytes go first
    assert gone(tree.changes()) == [b"heavy"]


def test_nobody_is_evicted_below_the_own_share_by_others():
    chance = random.Random(4)
    tree, now = tiers(100, share=0.25), 0.0

    def held(tenant):
        return sum(len(run.keys) for run in tree.recent(0) if run.tenant == tenant)

    for step in range(1_000):
        now += 1.0
        tenant = chance.choice("abbbcccccc")
        tree.expire(now)
        tree.changes()
        before = {name: held(name) for name in "abc"}
        count = chance.randint(1, 9)
        changes = store(tree, [f"{tenant}{step}-{at}".encode() for at in range(count)], now, 50.0, tenant)
        for name in set("abc") - {tenant}:
            given = sum(len(c.run.keys) for c in changes if isinstance(c, Left) and c.run.tenant == name)
            assert not given or before[name] - given >= 25
        assert sum(len(change.run.keys) for change in changes if isinstance(change, Stored)) == count
        assert tree.spaces[0].bytes <= 100
    assert held("a") > 0


def test_churn_leaves_nothing_behind():
    tree = tiers(2)
    for number in range(5_000):
        store(tree, [b"%d" % (number % 5)], float(number) / 100, 3600.0)
    assert len(tree._starts) == len(tree._ends) == 2
    assert len(tree.spaces[0]._ends[""]) <= 2 * 2 + 65


def test_what_was_evicted_is_not_kept_until_its_ttl_ends():
    """Compact the records of deadlines, which refer to nodes, and nodes to those before them."""
    tree = tiers(20)
    for number in range(2_000):
        store(tree, chain(number >> 8, number & 255, *range(8)), float(number) / 100, 3600.0)
    records = tree._tree.deadlines._heap
    assert len(records) <= 2 * len(tree._starts) + 64
    kept = {node for _, _, end in records for node in end.path()}
    assert sum(len(node.keys) for node in kept) == len(keys_of(tree))


def test_what_is_dropped_of_a_tenant_leaves_others_and_what_is_kept():
    tree = tiers(20, 20)
    store(tree, chain(1, 1), tenant="a")
    store(tree, chain(2, 1), tenant="a")
    store(tree, chain(3, 1), tenant="b")
    tree.drop("a", set(chain(2, 1)))
    assert keys_of(tree) == {*chain(2, 1), *chain(3, 1)}
