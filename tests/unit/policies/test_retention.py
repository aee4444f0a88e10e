import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warmkv.policies import eviction
from warmkv.policies.eviction import PrefillCost, Reuse
from warmkv.policies.retention import TierIndex

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
TTLS = st.sampled_from([1.0, 4.0, 10.0, math.inf])
ORDERS = {name: eviction.order(name, PrefillCost(3)) for name in ("lru", "lfu", "length", "cost")}


def chain(path):
    """Keys of a tree: a block's key is the path to it, as a chained hash covers all before it."""
    return [bytes(path[: end + 1]) for end in range(len(path))]


def size_of(key):
    return 1 + sum(key) % 3


class LedgerMachine(RuleBasedStateMachine):
    """The index beside a dictionary, with every rule written out the slow way.

    A model entry is [expires_at, ttl, mark_expires_at, mark_ttl, reads, used, floor].
    """

    @initialize(capacity=st.integers(0, 25), order=st.sampled_from(sorted(ORDERS)))
    def start(self, capacity, order):
        self.order = ORDERS[order]
        self.index, self.capacity, self.now = TierIndex(capacity, self.order), capacity, 0.0
        self.model = {}
        self.pinned = []
        self.ticks, self.floor = 0, 0.0

    def pins(self, key):
        return sum(key in keys for keys, _ in self.pinned)

    def alive(self, key):
        return key in self.model and (self.model[key][0] > self.now or self.pins(key) > 0)

    def matched(self, path):
        count = 0
        while count < len(path) and self.alive(chain(path)[count]):
            count += 1
        return count

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
        """Of one more block, at the floor when it was used: by reads, or less the longer its prefix is."""
        return self.model[key][6] + (1 + self.model[key][4] if self.order is eviction.lfu else 1 / len(key))

    def has_children(self, key):
        return any(other[:-1] == key for other in self.model if len(other) > 1)

    def sweep(self):
        gone = []
        while ends := [k for k in self.model if not self.alive(k) and not self.has_children(k)]:
            for key in ends:
                del self.model[key]
            gone += ends
        return gone

    def used(self):
        return sum(size_of(key) for key in self.model)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        assert sorted(entry.key for entry in self.index.expire(self.now)) == sorted(self.sweep())

    @rule(path=PATHS, ttl=TTLS)
    def store(self, path, ttl):
        keys = chain(path)
        expired = self.sweep()
        present = self.matched(path)
        for key in keys[:present]:
            self.model[key][1] = max(self.model[key][1], ttl)
            self.model[key][0] = max(self.model[key][0], self.now + ttl)
        admission = self.index.store(keys, [size_of(key) for key in keys], ttl, self.now)

        gone = [entry.key for entry in admission.evicted]
        for victim in gone:  # each was an end that nobody read; under lru, the least recent one
            ends = [k for k in self.model if not self.pins(k) and not self.has_children(k) and k not in keys]
            assert victim in ends
            if self.order is eviction.lru:
                assert victim == min(ends, key=lambda k: self.model[k][5])
            if self.order in (eviction.lfu, eviction.length):
                assert self.worth(victim) == min(map(self.worth, ends))
                self.floor = max(self.floor, self.worth(victim))
            del self.model[victim]
        stored = []
        for key in keys[present:]:
            if self.used() + size_of(key) > self.capacity:
                break
            stored.append(key)
            self.model[key] = [self.now + ttl, ttl, -math.inf, 0.0, 0, 0, 0.0]
        self.use(keys[: present + len(stored)])
        assert admission.stored == stored
        assert sorted(entry.key for entry in admission.expired) == sorted(expired)
        if present + len(stored) < len(keys):  # it did not fit, whatever was given up
            missing = keys[present + len(stored)]
            bound = sum(size_of(k) for k in self.model if self.pins(k) or k in keys)
            assert bound + size_of(missing) > self.capacity
        if gone:  # no more than needed
            assert self.used() + size_of(gone[-1]) > self.capacity - 2

    @rule(path=PATHS)
    def read(self, path):
        count = self.index.match(chain(path), self.now)
        assert count == self.matched(path)
        self.index.touch(chain(path)[:count], self.now)
        self.use(chain(path)[:count], read=True)

    @rule(path=PATHS, ttl=st.sampled_from([1.0, 4.0]))
    def mark(self, path, ttl):
        key = bytes(path)
        if self.matched(path) < len(path):
            return
        self.index.mark(key, ttl, self.now)
        entry = self.model[key]
        entry[3] = max(ttl, entry[3] if entry[2] > self.now else 0.0)
        entry[2] = max(entry[2], self.now + entry[3])

    @rule(path=PATHS)
    def pin(self, path):
        keys = chain(path)[: self.index.match(chain(path), self.now)]
        self.pinned.append((keys, self.index.pin(keys)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        _, held = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.index.unpin(held)

    @rule(path=PATHS)
    def lose_a_whole_branch(self, path):
        branch = [key for key in self.model if key[: len(path)] == bytes(path)]
        if any(self.pins(key) for key in branch):
            return
        for key in branch:
            self.index.lose(key)
            del self.model[key]

    @invariant()
    def agrees(self):
        assert set(self.index) == set(self.model)
        assert list(self.index) == sorted(self.model, key=lambda key: self.model[key][5])
        assert self.index.bytes == self.used() <= self.capacity
        for key, entry in self.model.items():
            assert self.index.has_mark(key, self.now) == (entry[2] > self.now)
            assert self.index.entry(key).end == len(key)
            assert self.index.entry(key).reads == entry[4]

    @invariant()
    def presence_is_prefix_closed(self):
        assert all(key[:-1] in self.index for key in list(self.index) if len(key) > 1)

    @invariant()
    def deadlines_are_early_enough(self):
        unpinned = [entry[0] for key, entry in self.model.items() if not self.pins(key) and not self.has_children(key)]
        assert self.index.next_deadline <= min(unpinned, default=math.inf)


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_churn_leaves_nothing_behind():
    index = TierIndex(2)
    for number in range(10_000):
        index.store([b"%d" % (number % 5)], [1], 3600.0, float(number) / 100)
    assert len(index) == 2
    assert len(index._deadlines._heap) <= 2 * len(index) + 65
    assert len(index._ends[""]._heap) <= 2 * len(index) + 65


def test_reads_slide_the_lifetime():
    index = TierIndex(10)
    index.store([b"a"], [1], 5.0, 0.0)
    for now in (4.0, 8.0, 12.0):
        assert index.match([b"a"], now) == 1
        index.touch([b"a"], now)
    assert index.match([b"a"], 17.0) == 0
    assert [entry.key for entry in index.expire(17.0)] == [b"a"]


def test_a_long_mark_keeps_its_blocks_when_short_stores_follow():
    index = TierIndex(10)
    index.store([b"a", b"b"], [1, 1], 3600.0, 0.0)
    index.mark(b"b", 3600.0, 0.0)
    index.store([b"a", b"b", b"c"], [1, 1, 1], 300.0, 10.0)
    assert [entry.key for entry in index.expire(1000.0)] == [b"c"]
    assert index.has_mark(b"b", 1000.0)


def test_a_pinned_entry_outlives_its_ttl_and_goes_when_unpinned():
    index = TierIndex(10)
    index.store([b"a"], [1], 5.0, 0.0)
    held = index.pin([b"a"])
    assert index.expire(9.0) == []
    assert index.match([b"a"], 9.0) == 1
    index.unpin(held)
    assert index.match([b"a"], 9.0) == 0
    assert [entry.key for entry in index.expire(9.0)] == [b"a"]


def test_the_head_of_a_chain_that_is_too_long_is_kept():
    index = TierIndex(3)
    admission = index.store([b"a", b"b", b"c", b"d"], [1] * 4, 5.0, 0.0)
    assert admission.stored == [b"a", b"b", b"c"]


def test_marking_what_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        TierIndex(1).mark(b"a", 5.0, 0.0)


def evicted(order, script):
    """What goes when one more block comes to a full index."""
    index = TierIndex(4, ORDERS[order])
    script(index)
    return [entry.key for entry in index.store([b"new"], [1], 99.0, 50.0).evicted]


def history(index):
    """A long chain read often, a short one read once and lately, a single block never read."""
    index.store([b"a", b"ab"], [1, 1], 99.0, 0.0)
    for now in (1.0, 2.0, 3.0):
        index.touch([b"a", b"ab"], now)
    index.store([b"c"], [1], 99.0, 4.0)
    index.store([b"d"], [1], 99.0, 5.0)
    index.touch([b"c"], 6.0)


def test_each_order_gives_up_another_block():
    assert evicted("lru", history) == [b"ab"]
    assert evicted("lfu", history) == [b"d"]
    assert evicted("length", history) == [b"ab"]
    assert evicted("cost", history) == [b"d"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_the_ends_of_chains_by_worth_are_the_reverse_of_their_eviction(order):
    index = TierIndex(5, ORDERS[order])
    history(index)
    index.store([b"x"], [1], 99.0, 7.0)
    ends = [entry.key for entry in index.by_worth()]
    assert sorted(ends) == [b"ab", b"c", b"d", b"x"]
    (first,) = index.store([b"new"], [1], 99.0, 50.0).evicted
    assert first.key == ends[-1]
    index.lose(b"ab")
    assert b"ab" not in [entry.key for entry in index.by_worth()]


def test_what_is_dear_to_compute_stays_longer_by_cost():
    index = TierIndex(200, ORDERS["cost"])
    index.store([b"a", b"ab", b"abc"], [10, 10, 10], 99.0, 0.0, tokens=[8, 8, 8])
    index.store([b"x"], [10], 99.0, 1.0, tokens=[8])
    index.store([b"heavy"], [160], 99.0, 2.0, tokens=[8])  # as many tokens in more bytes
    order = [entry.key for entry in index.store([b"new"], [170], 99.0, 3.0, tokens=[80]).evicted]
    assert order == [b"heavy", b"x"]


def test_reuse_is_learnt_from_what_was_read_and_what_left():
    reuse, index = Reuse(), TierIndex(10)
    assert reuse.probability(0) == 0.5
    for block in (b"a", b"b", b"c"):
        index.store([block], [1], 10.0, 0.0)
    index.touch([b"a"], 1.0)
    index.expire(20.0)
    assert index._reuse.probability(0) == pytest.approx((1 + 1) / (3 + 2))
    assert index._reuse.probability(1) == pytest.approx((0 + 2 * 0.4) / (1 + 2))


@pytest.mark.parametrize("order", ORDERS)
def test_a_lost_block_hides_what_follows_it_until_it_is_stored_again(order):
    index = TierIndex(10, ORDERS[order])
    index.store([b"a", b"ab", b"abc"], [1, 1, 1], 9.0, 0.0)
    index.lose(b"ab")
    assert index.match([b"a", b"ab", b"abc"], 1.0) == 1
    assert (b"ab" in index, index.bytes) == (False, 2)
    assert index.store([b"a", b"ab"], [1, 1], 9.0, 1.0).stored == [b"ab"]
    assert index.match([b"a", b"ab", b"abc"], 1.0) == 3
    index.lose(b"ab")
    index.lose(b"abc")
    assert len(index) == 1


def test_nobody_is_evicted_below_the_own_share_by_others():
    random_ = random.Random(4)
    index, now = TierIndex(100, share=0.25), 0.0
    sizes = {}
    for step in range(3_000):
        now += 1.0
        tenant = random_.choice("abbbcccccc")
        before = {name: index.bytes_of(name) for name in "abc"}
        key = f"{tenant}{step}".encode()
        sizes[key] = random_.randint(1, 9)
        admission = index.store([key], [sizes[key]], 50.0, now, tenant=tenant)
        given = {name: sum(e.size for e in admission.evicted if e.tenant == name) for name in "abc"}
        lapsed = {name: sum(e.size for e in admission.expired if e.tenant == name) for name in "abc"}
        for name in set("abc") - {tenant}:
            if given[name]:
                assert before[name] - lapsed[name] - given[name] >= index.quota
        assert admission.stored == [key]  # nobody is shut out
        assert index.bytes <= 100
    assert index.bytes_of("a") > 0


def test_beyond_the_shares_who_holds_most_gives_way():
    index = TierIndex(10, share=0.1)
    index.store([b"%d" % i for i in range(6)], [1] * 6, 9.0, 0.0, tenant="large")
    index.store([b"x0", b"x1", b"x2", b"x3"], [1] * 4, 9.0, 1.0, tenant="small")
    for number in range(2):
        admission = index.store([b"y%d" % number], [1], 9.0, 2.0, tenant="new")
        assert [entry.tenant for entry in admission.evicted] == ["large"]
    held = index.pin([b"%d" % i for i in range(4)])
    assert [e.tenant for e in index.store([b"y2"], [1], 9.0, 3.0, tenant="new").evicted] == ["small"]
    index.unpin(held)


def test_a_share_is_not_evicted_even_if_the_newcomer_gets_nothing():
    index = TierIndex(10, share=0.5)
    for tenant in "ab":
        index.store([tenant.encode() + b"%d" % i for i in range(5)], [1] * 5, 9.0, 0.0, tenant=tenant)
    assert index.store([b"c"], [1], 9.0, 1.0, tenant="c").stored == []
    assert index.expire(20.0)
    assert index.store([b"c"], [1], 9.0, 20.0, tenant="c").stored == [b"c"]


def test_making_room_for_a_lost_block_does_not_take_the_block_itself():
    index = TierIndex(4)
    index.store([b"a", b"ab"], [1, 1], 9.0, 0.0)
    index.store([b"x"], [2], 9.0, 1.0)
    index.lose(b"a")
    admission = index.store([b"a"], [4], 9.0, 2.0)
    assert (admission.stored, [entry.key for entry in admission.evicted]) == ([b"a"], [b"ab", b"x"])
    assert (list(index), index.bytes, index.match([b"a"], 3.0)) == ([b"a"], 4, 1)
    assert [entry.key for entry in index.expire(20.0)] == [b"a"]
