"""The prefix tree against a dictionary of blocks: every invariant of `policies/prefix_tree` after every step."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.replicas.block_store.harness import check_deadlines
from warmkv.policies import eviction
from warmkv.policies.eviction import CostAware, PrefillCost
from warmkv.policies.prefix_tree.nodes import Node
from warmkv.policies.prefix_tree.tree import PrefixTree
from warmkv.policies.tiers import Tier

SHAPE = {1: (0, 3), 2: (1, 2), 3: (1, 2), 4: (2, 1), 5: (0, 2), 6: (5, 4)}
"""Runs by number: the one before, and their blocks. Every block has a token and takes two bytes."""
TTLS = [2.0, 5.0, math.inf]
ORDERS = [eviction.lru, eviction.lfu, eviction.length, CostAware(PrefillCost())]


def chain(number):
    """Return the runs from the first one on."""
    return (*chain(SHAPE[number][0]), number) if number else ()


class PrefixTreeMachine(RuleBasedStateMachine):
    """Blocks are pairs of a run and a place. `lives` is what they should live, whichever tiers hold them."""

    @initialize(
        rooms=st.lists(st.integers(0, 12), min_size=1, max_size=3),
        order=st.sampled_from(ORDERS),
        share=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def make(self, rooms, order, share):
        names = ("device", "host", "disk")
        tiers = [Tier(name, 2 * room + 1, order) for name, room in zip(names, rooms, strict=False)]
        self.tree, self.share = PrefixTree(tiers, share, self.forget), share
        self.nodes, self.now, self.readings = {}, 0.0, []
        self.lives = {}  # block -> [ttl, expires]
        self.marks = {}  # run -> [ttl, expires]

    def forget(self, node):
        if self.parts(node.number)[:1] == [node]:
            del self.nodes[node.number]

    def parts(self, number):
        node, found = self.nodes.get(number), []
        while node is not None and node.number == number:
            found.insert(0, node)
            node = node.parent
        return found

    def path(self, number, *, make=False):
        found = []
        for run in chain(number):
            if run not in self.nodes:
                if not make:
                    break
                blocks, parent = SHAPE[run][1], found[-1] if found else None
                end = blocks + (parent.end if parent else 0)
                self.nodes[run] = Node(run, parent, blocks, 1, end, 2, [2] * len(self.tree.spaces))
            found += self.parts(run)
        return found

    def trim(self, number):
        for run in reversed(chain(number)):
            if run in self.nodes and not any(part.span for part in self.parts(run)):
                del self.nodes[run]

    def held(self):
        """Return the blocks of each tier."""
        tiers = []
        for tier in range(len(self.tree.spaces)):
            blocks = set()
            for run in self.nodes:
                start = 0
                for part in self.parts(run):
                    blocks |= {(run, start + at) for at in range(part.copies[tier].held)}
                    start += part.length
            tiers.append(blocks)
        return tiers

    def blocks(self, number):
        return [(run, at) for run in chain(number) for at in range(SHAPE[run][1])]

    def found(self, number):
        """Return the leading blocks of a prompt that some tier holds."""
        most = 0
        for tier in self.held():
            count = next((at for at, block in enumerate(self.blocks(number)) if block not in tier), math.inf)
            most = max(most, min(count, len(self.blocks(number))))
        return self.blocks(number)[:most]

    def refresh(self, blocks):
        for block in blocks:
            ttl, expires = self.lives[block]
            self.lives[block] = [ttl, max(expires, self.now + ttl)]
        for run, (ttl, expires) in self.marks.items():
            if (run, SHAPE[run][1] - 1) in blocks and expires > self.now:
                self.marks[run] = [ttl, max(expires, self.now + ttl)]

    def gone(self):
        """Forget the lives of blocks that are held nowhere."""
        held = set().union(*self.held())
        self.lives = {block: life for block, life in self.lives.items() if block in held}
        self.marks = {run: mark for run, mark in self.marks.items() if (run, SHAPE[run][1] - 1) in held}

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds
        self.expire()

    def expire(self):
        before, read = self.held(), self.read_blocks()
        self.tree.expire(self.now)
        for tier, (had, has) in enumerate(zip(before, self.held(), strict=True)):
            for block in had:
                stays = self.lives[block][1] > self.now or block in read[tier]
                assert (block in has) == stays, block
        self.gone()

    @rule(number=st.sampled_from(list(SHAPE)), ttl=st.sampled_from(TTLS), marked=st.booleans())
    def store(self, number, ttl, marked):
        before = self.held()
        own = set(self.blocks(number))
        there = set().union(*before)
        path = self.path(number, make=True)
        self.tree.store(path, ttl, self.now, "ab"[number >= 5])
        if marked:
            self.tree.mark(path[-1], ttl, self.now)
        self.trim(number)
        held = set().union(*self.held())
        for block in own & held:
            known = self.lives[block] if block in there else [0.0, -math.inf]
            most = max(known[0], ttl)
            self.lives[block] = [most, max(known[1], self.now + most)]
        last = self.blocks(number)[-1]
        if last not in there:
            self.marks.pop(number, None)
        if marked and last in held:
            old = self.marks.get(number, [0.0, -math.inf])
            most = max(ttl, old[0] if old[1] > self.now else 0.0)
            self.marks[number] = [most, max(old[1], self.now + most)]
        room = self.tree.spaces[0].capacity - sum(2 * len(blocks) for blocks in self.read_blocks()[:1])
        if not self.share and 2 * len(own) <= room:
            assert own <= self.held()[0]  # what fits beside all that is read is kept
        self.gone()

    @rule(number=st.sampled_from(list(SHAPE)))
    def read(self, number):
        found = self.found(number)
        path = self.path(number)
        if not found:
            return
        self.refresh(found)
        by_tier = [set(found) & tier for tier in self.held()]
        self.readings.append((self.tree.read(path, self.now), by_tier))

    def read_blocks(self):
        return [set().union(*(tiers[at] for _, tiers in self.readings)) for at in range(len(self.tree.spaces))]

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def release(self, data):
        reading, _ = self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1)))
        self.tree.release(reading)
        self.expire()

    @rule(number=st.sampled_from(list(SHAPE)))
    def promote(self, number):
        count = len(self.found(number))
        path, last = [], 0
        for node in self.path(number):
            if count > 0:
                path, last = [*path, node], min(count, node.length)
                count -= node.length
        if path:
            self.tree.promote(path, last)
            self.gone()

    @rule(number=st.sampled_from(list(SHAPE)), blocks=st.integers(1, 4))
    def cut(self, number, blocks):
        if len(self.found(number)) >= blocks:
            path = self.path(number)
            assert sum(node.length for node in self.tree.cut(path, blocks)) == blocks

    @invariant()
    def presence_is_prefix_closed(self):
        for held in self.held():
            for run, place in held:
                before = self.blocks(run)[: self.blocks(run).index((run, place))]
                assert held >= set(before)

    @invariant()
    def what_is_read_stays(self):
        for held, read in zip(self.held(), self.read_blocks(), strict=True):
            assert read <= held

    @invariant()
    def bytes_are_those_of_the_blocks(self):
        for space, held, read in zip(self.tree.spaces, self.held(), self.read_blocks(), strict=True):
            assert space.bytes == 2 * len(held) <= space.capacity
            assert space.pinned == 2 * len(read)

    @invariant()
    def what_is_watched_is_held(self):
        assert all(node.span for node in check_deadlines(self.tree.deadlines))

    @invariant()
    def lives_are_those_of_the_blocks(self):
        for run in self.nodes:
            start = 0
            for part in self.parts(run):
                for at in range(part.span):
                    assert [part.ttl, part.expires] == self.lives[run, start + at]
                start += part.length
            node = self.nodes[run]
            readable = node.mark_expires > self.now
            assert readable == (self.marks.get(run, [0, -math.inf])[1] > self.now)
            assert start == SHAPE[run][1]

    @invariant()
    def parents_outlive_children(self):
        for run in self.nodes:
            for node in self.parts(run):
                if node.parent is not None and node.span:
                    assert node.parent.expires >= node.expires


TestPrefixTree = PrefixTreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def whole(tree, number, blocks, size=2, parent=None):
    return Node(number, parent, blocks, 1, blocks + (parent.end if parent else 0), size, [size] * len(tree.spaces))


def test_no_tenant_is_evicted_below_its_share_by_another():
    gone = []
    tree = PrefixTree([Tier("device", 20)], 0.4, gone.append)
    for number in range(2):
        tree.store([whole(tree, number, 2)], 9.0, 0.0, "small")
    nodes = [whole(tree, 10 + number, 1) for number in range(20)]
    for node in nodes:
        tree.store([node], 9.0, 1.0, "large")
    assert [node.number for node in gone if node.number < 10] == []
    assert sum(node.span for node in nodes) == 6
    assert tree.spaces[0].bytes == 20


def test_the_end_of_a_run_is_evicted_without_a_split_and_comes_back():
    tree = PrefixTree([Tier("device", 20)], 0.0, lambda node: None)
    long, other = whole(tree, 0, 10), whole(tree, 1, 4)
    tree.store([long], 9.0, 0.0, "")
    tree.store([other], 9.0, 0.0, "")
    assert (long.copies[0].held, long.length, other.copies[0].held) == (6, 10, 4)
    path = [long]
    tree.store(path, 9.0, 0.0, "")
    assert (path, long.copies[0].held) == ([long], 10)


def test_a_run_splits_where_its_blocks_live_differently():
    tree = PrefixTree([Tier("device", 20)], 0.0, lambda node: None)
    long, other = whole(tree, 0, 10), whole(tree, 1, 4)
    tree.store([long], 3600.0, 0.0, "")
    tree.store([other], 9.0, 0.0, "")
    path = [long]
    tree.store(path, 9.0, 1.0, "")
    assert [(node.length, node.expires) for node in path] == [(6, 3601.0), (4, 10.0)]


def test_what_was_evicted_and_stored_again_for_less_time_expires_then():
    tree = PrefixTree([Tier("device", 20)], 0.0, lambda node: None)
    long, other = whole(tree, 0, 10), whole(tree, 1, 4)
    tree.store([long], 3600.0, 0.0, "")
    tree.store([other], 3600.0, 0.0, "")
    tree.store([long], 9.0, 1.0, "")  # its last four blocks anew
    assert tree.deadlines.due == 10.0
    tree.expire(10.0)
    assert tree.spaces[0].bytes == 12


@pytest.mark.parametrize("order", ORDERS)
def test_operations_take_no_longer_for_longer_runs(order):
    """As many calls for a run of ten blocks as of ten thousand; what a garbage collection calls is not theirs."""
    import sys

    import warmkv

    calls, (home,) = [], warmkv.__path__
    for blocks in (10, 10_000):
        tree, count = PrefixTree([Tier("device", 2 * blocks, order)] * 2, 0.0, lambda node: None), 0
        node, other = whole(tree, 0, blocks), whole(tree, 1, blocks)

        def counted(frame, event, argument):
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(home)

        sys.setprofile(counted)
        tree.store([node], 9.0, 0.0, "")
        tree.release(tree.read([node], 1.0))
        tree.store([other], 9.0, 2.0, "")  # evicts the first
        tree.expire(20.0)
        sys.setprofile(None)
        calls.append(count)
    assert calls[0] == calls[1]
