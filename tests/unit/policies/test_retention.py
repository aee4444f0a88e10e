import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warmkv.policies.retention import BlockLedger

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
TTLS = st.sampled_from([1.0, 4.0, 10.0, math.inf])


def chain(path):
    """Keys of a tree: a block's key is the path to it, as a chained hash covers all before it."""
    return [bytes(path[: end + 1]) for end in range(len(path))]


def size_of(key):
    return 1 + sum(key) % 3


class LedgerMachine(RuleBasedStateMachine):
    """The ledger beside a list in order of use, with every rule written out the slow way.

    A model entry is [key, ttl, expires_at, mark_ttl, mark_expires_at]; the most recently used comes last.
    """

    @initialize(capacity=st.integers(0, 25))
    def start(self, capacity):
        self.ledger, self.capacity, self.now = BlockLedger(capacity), capacity, 0.0
        self.model = {}
        self.pinned = []

    def pins(self, key):
        return sum(key in keys for keys in self.pinned)

    def alive(self, key):
        return key in self.model and (self.model[key][0] > self.now or self.pins(key) > 0)

    def matched(self, path):
        count = 0
        while count < len(path) and self.alive(chain(path)[count]):
            count += 1
        return count

    def use(self, keys):
        for key in reversed(keys):
            entry = self.model.pop(key)
            expires, ttl, mark_expires, mark_ttl = entry
            expires = max(expires, self.now + ttl)
            if mark_expires > self.now:
                mark_expires = self.now + mark_ttl
            self.model[key] = [expires, ttl, mark_expires, mark_ttl]

    def sweep(self):
        gone = [key for key in self.model if not self.alive(key)]
        for key in gone:
            del self.model[key]
        return gone

    def used(self):
        return sum(size_of(key) for key in self.model)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        assert set(self.ledger.expire(self.now)) == set(self.sweep())

    @rule(path=PATHS, ttl=TTLS)
    def store(self, path, ttl):
        keys = chain(path)
        gone = self.sweep()
        present = self.matched(path)
        for key in keys[:present]:
            self.model[key][1] = max(self.model[key][1], ttl)
        stored = []
        for key in keys[present:]:
            victims = []
            spare = [k for k in self.model if not self.pins(k) and k not in keys]
            while self.used() - sum(map(size_of, victims)) + size_of(key) > self.capacity and spare:
                victims.append(spare.pop(0))
            if self.used() - sum(map(size_of, victims)) + size_of(key) > self.capacity:
                break
            for victim in victims:
                del self.model[victim]
            gone += victims
            self.model[key] = [self.now + ttl, ttl, -math.inf, 0.0]
            stored.append(key)
        self.use(keys[: present + len(stored)])

        admission = self.ledger.store(keys, [size_of(key) for key in keys], ttl, self.now)
        assert admission.stored == stored
        assert set(admission.evicted) == set(gone)
        assert len(admission.evicted) == len(gone)

    @rule(path=PATHS)
    def read(self, path):
        count = self.ledger.match(chain(path), self.now)
        assert count == self.matched(path)
        self.ledger.touch(chain(path)[:count], self.now)
        self.use(chain(path)[:count])

    @rule(path=PATHS, ttl=st.sampled_from([1.0, 4.0]))
    def mark(self, path, ttl):
        key = bytes(path)
        if self.matched(path) < len(path):
            return
        self.ledger.mark(key, ttl, self.now)
        entry = self.model[key]
        entry[3] = max(ttl, entry[3] if entry[2] > self.now else 0.0)
        entry[2] = self.now + entry[3]

    @rule(path=PATHS)
    def pin(self, path):
        keys = chain(path)[: self.ledger.match(chain(path), self.now)]
        self.ledger.pin(keys)
        self.pinned.append(keys)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        keys = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.ledger.unpin(keys)

    @rule()
    def discard_what_is_not_pinned(self):
        gone = [key for key in self.model if not self.pins(key)]
        for key in gone:
            del self.model[key]
        self.ledger.discard(gone)

    @invariant()
    def agrees(self):
        assert list(self.ledger) == list(self.model)
        assert self.ledger.bytes == self.used() <= self.capacity
        for key, entry in self.model.items():
            assert self.ledger.has_mark(key, self.now) == (entry[2] > self.now)

    @invariant()
    def presence_is_prefix_closed(self):
        assert all(key[:-1] in self.ledger for key in list(self.ledger) if len(key) > 1)

    @invariant()
    def the_heap_is_bounded_and_early_enough(self):
        assert len(self.ledger._deadlines) <= 2 * len(self.ledger) + 65
        unpinned = [entry[0] for key, entry in self.model.items() if not self.pins(key)]
        assert self.ledger.next_deadline <= min(unpinned, default=math.inf)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_churn_leaves_no_deadlines_behind():
    ledger = BlockLedger(2)
    for number in range(10_000):
        ledger.store([b"%d" % (number % 5)], [1], 3600.0, float(number) / 100)
    assert len(ledger) == 2
    assert len(ledger._deadlines) <= 2 * len(ledger) + 65


def test_reads_slide_the_lifetime():
    ledger = BlockLedger(10)
    ledger.store([b"a"], [1], 5.0, 0.0)
    for now in (4.0, 8.0, 12.0):
        assert ledger.match([b"a"], now) == 1
        ledger.touch([b"a"], now)
    assert ledger.match([b"a"], 17.0) == 0
    assert ledger.expire(17.0) == [b"a"]


def test_a_long_mark_keeps_its_blocks_when_short_stores_follow():
    ledger = BlockLedger(10)
    ledger.store([b"a", b"b"], [1, 1], 3600.0, 0.0)
    ledger.mark(b"b", 3600.0, 0.0)
    ledger.store([b"a", b"b", b"c"], [1, 1, 1], 300.0, 10.0)
    assert ledger.expire(1000.0) == [b"c"]
    assert ledger.has_mark(b"b", 1000.0)


def test_a_pinned_entry_outlives_its_ttl_and_goes_when_unpinned():
    ledger = BlockLedger(10)
    ledger.store([b"a"], [1], 5.0, 0.0)
    ledger.pin([b"a"])
    assert ledger.expire(9.0) == []
    assert ledger.match([b"a"], 9.0) == 1
    ledger.unpin([b"a"])
    assert ledger.match([b"a"], 9.0) == 0
    assert ledger.expire(9.0) == [b"a"]


def test_the_head_of_a_chain_that_is_too_long_is_kept():
    ledger = BlockLedger(3)
    admission = ledger.store([b"a", b"b", b"c", b"d"], [1] * 4, 5.0, 0.0)
    assert admission.stored == [b"a", b"b", b"c"]


def test_marking_what_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        BlockLedger(1).mark(b"a", 5.0, 0.0)
