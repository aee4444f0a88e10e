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
    """The ledger beside a dictionary, with every rule written out the slow way.

    A model entry is [expires_at, ttl, mark_expires_at, mark_ttl, reads, used, floor].
    """

    @initialize(capacity=st.integers(0, 25), order=st.sampled_from(sorted(ORDERS)))
    def start(self, capacity, order):
        self.order = ORDERS[order]
        self.ledger, self.capacity, self.now = TierIndex(capacity, self.order), capacity, 0.0
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
        assert sorted(entry.key for entry in self.ledger.expire(self.now)) == sorted(self.sweep())

    @rule(path=PATHS, ttl=TTLS)
    def store(self, path, ttl):
        keys = chain(path)
        expired = self.sweep()
        present = self.matched(path)
        for key in keys[:present]:
            self.model[key][1] = max(self.model[key][1], ttl)
            self.model[key][0] = max(self.model[key][0], self.now + ttl)
        admission = self.ledger.store(keys, [size_of(key) for key in keys], ttl, self.now)

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
        count = self.ledger.match(chain(path), self.now)
        assert count == self.matched(path)
        self.ledger.touch(chain(path)[:count], self.now)
        self.use(chain(path)[:count], read=True)

    @rule(path=PATHS, ttl=st.sampled_from([1.0, 4.0]))
    def mark(self, path, ttl):
        key = bytes(path)
        if self.matched(path) < len(path):
            return
        self.ledger.mark(key, ttl, self.now)
        entry = self.model[key]
        entry[3] = max(ttl, entry[3] if entry[2] > self.now else 0.0)
        entry[2] = max(entry[2], self.now + entry[3])

    @rule(path=PATHS)
    def pin(self, path):
        keys = chain(path)[: self.ledger.match(chain(path), self.now)]
        self.pinned.append((keys, self.ledger.pin(keys)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        _, held = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.ledger.unpin(held)

    @rule(path=PATHS)
    def lose_a_whole_branch(self, path):
        branch = [key for key in self.model if key[: len(path)] == bytes(path)]
        if any(self.pins(key) for key in branch):
            return
        for key in branch:
            self.ledger.lose(key)
            del self.model[key]

    @invariant()
    def agrees(self):
        assert set(self.ledger) == set(self.model)
        assert list(self.ledger) == sorted(self.model, key=lambda key: self.model[key][5])
        assert self.ledger.bytes == self.used() <= self.capacity
        for key, entry in self.model.items():
            assert self.ledger.has_mark(key, self.now) == (entry[2] > self.now)
            assert self.ledger.entry(key).end == len(key)
            assert self.ledger.entry(key).reads == entry[4]

    @invariant()
    def presence_is_prefix_closed(self):
        assert all(key[:-1] in self.ledger for key in list(self.ledger) if len(key) > 1)

    @invariant()
    def deadlines_are_early_enough(self):
        unpinned = [entry[0] for key, entry in self.model.items() if not self.pins(key) and not self.has_children(key)]
        assert self.ledger.next_deadline <= min(unpinned, default=math.inf)


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_churn_leaves_nothing_behind():
    ledger = TierIndex(2)
    for number in range(10_000):
        ledger.store([b"%d" % (number % 5)], [1], 3600.0, float(number) / 100)
    assert len(ledger) == 2
    assert len(ledger._deadlines._heap) <= 2 * len(ledger) + 65
    assert len(ledger._ends[""]._heap) <= 2 * len(ledger) + 65


def test_reads_slide_the_lifetime():
    ledger = TierIndex(10)
    ledger.store([b"a"], [1], 5.0, 0.0)
    for now in (4.0, 8.0, 12.0):
        assert ledger.match([b"a"], now) == 1
        ledger.touch([b"a"], now)
    assert ledger.match([b"a"], 17.0) == 0
    assert [entry.key for entry in ledger.expire(17.0)] == [b"a"]


def test_a_long_mark_keeps_its_blocks_when_short_stores_follow():
    ledger = TierIndex(10)
    ledger.store([b"a", b"b"], [1, 1], 3600.0, 0.0)
    ledger.mark(b"b", 3600.0, 0.0)
    ledger.store([b"a", b"b", b"c"], [1, 1, 1], 300.0, 10.0)
    assert [entry.key for entry in ledger.expire(1000.0)] == [b"c"]
    assert ledger.has_mark(b"b", 1000.0)


def test_a_pinned_entry_outlives_its_ttl_and_goes_when_unpinned():
    ledger = TierIndex(10)
    ledger.store([b"a"], [1], 5.0, 0.0)
    held = ledger.pin([b"a"])
    assert ledger.expire(9.0) == []
    assert ledger.match([b"a"], 9.0) == 1
    ledger.unpin(held)
    assert ledger.match([b"a"], 9.0) == 0
    assert [entry.key for entry in ledger.expire(9.0)] == [b"a"]


def test_the_head_of_a_chain_that_is_too_long_is_kept():
    ledger = TierIndex(3)
    admission = ledger.store([b"a", b"b", b"c", b"d"], [1] * 4, 5.0, 0.0)
    assert admission.stored == [b"a", b"b", b"c"]


def test_marking_what_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        TierIndex(1).mark(b"a", 5.0, 0.0)


def evicted(order, script):
    """What goes when one more block comes to a full ledger."""
    ledger = TierIndex(4, ORDERS[order])
    script(ledger)
    return [entry.key for entry in ledger.store([b"new"], [1], 99.0, 50.0).evicted]


def history(ledger):
    """A long chain read often, a short one read once and lately, a single block never read."""
    ledger.store([b"a", b"ab"], [1, 1], 99.0, 0.0)
    for now in (1.0, 2.0, 3.0):
        ledger.touch([b"a", b"ab"], now)
    ledger.store([b"c"], [1], 99.0, 4.0)
    ledger.store([b"d"], [1], 99.0, 5.0)
    ledger.touch([b"c"], 6.0)


def test_each_order_gives_up_another_block():
    assert evicted("lru", history) == [b"ab"]
    assert evicted("lfu", history) == [b"d"]
    assert evicted("length", history) == [b"ab"]
    assert evicted("cost", history) == [b"d"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_the_ends_of_chains_by_worth_are_the_reverse_of_their_eviction(order):
    ledger = TierIndex(5, ORDERS[order])
    history(ledger)
    ledger.store([b"x"], [1], 99.0, 7.0)
    ends = [entry.key for entry in ledger.by_worth()]
    assert sorted(ends) == [b"ab", b"c", b"d", b"x"]
    (first,) = ledger.store([b"new"], [1], 99.0, 50.0).evicted
    assert first.key == ends[-1]
    ledger.lose(b"ab")
    assert b"ab" not in [entry.key for entry in ledger.by_worth()]


def test_what_is_dear_to_compute_stays_longer_by_cost():
    ledger = TierIndex(200, ORDERS["cost"])
    ledger.store([b"a", b"ab", b"abc"], [10, 10, 10], 99.0, 0.0, tokens=[8, 8, 8])
    ledger.store([b"x"], [10], 99.0, 1.0, tokens=[8])
    ledger.store([b"heavy"], [160], 99.0, 2.0, tokens=[8])  # as many tokens in more bytes
    order = [entry.key for entry in ledger.store([b"new"], [170], 99.0, 3.0, tokens=[80]).evicted]
    assert order == [b"heavy", b"x"]


def test_reuse_is_learnt_from_what_was_read_and_what_left():
    reuse, ledger = Reuse(), TierIndex(10)
    assert reuse.probability(0) == 0.5
    for block in (b"a", b"b", b"c"):
        ledger.store([block], [1], 10.0, 0.0)
    ledger.touch([b"a"], 1.0)
    ledger.expire(20.0)
    assert ledger._reuse.probability(0) == pytest.approx((1 + 1) / (3 + 2))
    assert ledger._reuse.probability(1) == pytest.approx((0 + 2 * 0.4) / (1 + 2))


@pytest.mark.parametrize("order", ORDERS)
def test_a_lost_block_hides_what_follows_it_until_it_is_stored_again(order):
    ledger = TierIndex(10, ORDERS[order])
    ledger.store([b"a", b"ab", b"abc"], [1, 1, 1], 9.0, 0.0)
    ledger.lose(b"ab")
    assert ledger.match([b"a", b"ab", b"abc"], 1.0) == 1
    assert (b"ab" in ledger, ledger.bytes) == (False, 2)
    assert ledger.store([b"a", b"ab"], [1, 1], 9.0, 1.0).stored == [b"ab"]
    assert ledger.match([b"a", b"ab", b"abc"], 1.0) == 3
    ledger.lose(b"ab")
    ledger.lose(b"abc")
    assert len(ledger) == 1


def test_nobody_is_evicted_below_the_own_share_by_others():
    random_ = random.Random(4)
    ledger, now = TierIndex(100, share=0.25), 0.0
    sizes = {}
    for step in range(3_000):
        now += 1.0
        tenant = random_.choice("abbbcccccc")
        before = {name: ledger.bytes_of(name) for name in "abc"}
        key = f"{tenant}{step}".encode()
        sizes[key] = random_.randint(1, 9)
        admission = ledger.store([key], [sizes[key]], 50.0, now, tenant=tenant)
        given = {name: sum(e.size for e in admission.evicted if e.tenant == name) for name in "abc"}
        lapsed = {name: sum(e.size for e in admission.expired if e.tenant == name) for name in "abc"}
        for name in set("abc") - {tenant}:
            if given[name]:
                assert before[name] - lapsed[name] - given[name] >= ledger.quota
        assert admission.stored == [key]  # nobody is shut out
        assert ledger.bytes <= 100
    assert ledger.bytes_of("a") > 0


def test_beyond_the_shares_who_holds_most_gives_way():
    ledger = TierIndex(10, share=0.1)
    ledger.store([b"%d" % i for i in range(6)], [1] * 6, 9.0, 0.0, tenant="large")
    ledger.store([b"x0", b"x1", b"x2", b"x3"], [1] * 4, 9.0, 1.0, tenant="small")
    for number in range(2):
        admission = ledger.store([b"y%d" % number], [1], 9.0, 2.0, tenant="new")
        assert [entry.tenant for entry in admission.evicted] == ["large"]
    held = ledger.pin([b"%d" % i for i in range(4)])
    assert [e.tenant for e in ledger.store([b"y2"], [1], 9.0, 3.0, tenant="new").evicted] == ["small"]
    ledger.unpin(held)


def test_a_share_is_not_evicted_even_if_the_newcomer_gets_nothing():
    ledger = TierIndex(10, share=0.5)
    for tenant in "ab":
        ledger.store([tenant.encode() + b"%d" % i for i in range(5)], [1] * 5, 9.0, 0.0, tenant=tenant)
    assert ledger.store([b"c"], [1], 9.0, 1.0, tenant="c").stored == []
    assert ledger.expire(20.0)
    assert ledger.store([b"c"], [1], 9.0, 20.0, tenant="c").stored == [b"c"]


def test_making_room_for_a_lost_block_does_not_take_the_block_itself():
    ledger = TierIndex(4)
    ledger.store([b"a", b"ab"], [1, 1], 9.0, 0.0)
    ledger.store([b"x"], [2], 9.0, 1.0)
    ledger.lose(b"a")
    admission = ledger.store([b"a"], [4], 9.0, 2.0)
    assert (admission.stored, [entry.key for entry in admission.evicted]) == ([b"a"], [b"ab", b"x"])
    assert (list(ledger), ledger.bytes, ledger.match([b"a"], 3.0)) == ([b"a"], 4, 1)
    assert [entry.key for entry in ledger.expire(20.0)] == [b"a"]
