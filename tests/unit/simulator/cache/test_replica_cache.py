"""The blocks of a simulated replica, by hand."""

import pytest

from tests.unit.simulator.conversations import BLOCK, record
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import Tier
from warmkv.simulator.cache.layout import layout
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import NOTHING, Removals, ReplicaCache

PROMPT = list(range(30))
DEVICE = (Tier("device", 1000),)


class Store:
    """A cache for these requests, which are known by their numbers."""

    def __init__(self, *records, tiers=DEVICE, automatic=True, default=300.0):
        self.records, self.layout = records, layout(records)
        self.stored, self.removals = TimeWeightedGauge(), Removals()
        lifetimes = Lifetimes({"5m": 300.0, "1h": 3600.0}, default, automatic)
        self.cache = ReplicaCache("a", self.layout, tiers, 2, lifetimes, self.stored, self.removals)

    def prompt(self, number):
        return self.layout.prompts[number]

    def match(self, number, now):
        return self.cache.match(self.prompt(number), now)

    def use(self, number, now):
        found, prompt = self.match(number, now), self.prompt(number)
        self.cache.store(prompt, self.records[number].marks, now, NOTHING, now)
        self.cache.release(found)
        return found

    def depths(self, number):
        return self.cache.depths(self.prompt(number).runs)


def test_a_tail_is_reused_and_read_to_the_token():
    store = Store(
        record(0, PROMPT[:10], ends=[10], ttls=["5m"]),
        record(1, PROMPT[:19], ends=[10, 19], ttls=[None, "5m"]),
        record(2, PROMPT, ends=[10, 19, 30], ttls=[None, None, "5m"]),
    )
    store.use(0, 0)
    found = store.use(1, 1)
    assert (found.hit, found.blocks, found.tokens) == (10, 2, 10)
    found = store.use(2, 2)
    assert (found.hit, found.blocks, found.tokens) == (19, 4, 19)


def test_blocks_are_reused_without_marks_but_not_billed_as_read():
    store = Store(record(0, PROMPT), record(1, PROMPT, ends=[30], ttls=["5m"]))
    store.use(0, 0)
    found = store.use(1, 1)
    assert (found.hit, found.blocks, found.tokens) == (0, 7, 28)


def test_only_marked_prefixes_are_kept_unless_automatic():
    store = Store(record(0, PROMPT), record(1, PROMPT, ends=[10, 30], ttls=["5m", None]), automatic=False)
    store.use(0, 0)
    assert store.stored.value == 0
    store.use(1, 1)
    assert store.stored.value == 10 * 2
    assert store.depths(0) == (2, 2, 2)


def test_a_billed_tail_beside_the_reused_chain_is_refreshed():
    later = record(1, PROMPT, ends=[10, 30], ttls=[None, "5m"])
    store = Store(record(0, PROMPT[:10], ends=[10], ttls=["5m"]), record(1, PROMPT), later, default=3600.0)
    store.use(0, 0)
    store.use(1, 1)  # stores more blocks, so that the chain goes past the tail
    for now in (250.0, 500.0, 750.0):
        found = store.match(2, now)
        assert (found.hit, found.tokens) == (10, 28)
        store.cache.release(found)


def test_a_mark_that_has_lapsed_is_not_read():
    store = Store(record(0, PROMPT[:8], ends=[8], ttls=["5m"]), default=3600.0)
    store.use(0, 0)
    found = store.match(0, 301)
    assert (found.hit, found.tokens) == (0, 8)


def test_entries_leave_at_their_own_time():
    store = Store(record(0, PROMPT[:8]), record(1, [7] * BLOCK))
    store.use(0, 0.0)
    store.use(1, 100.0)
    store.cache.expire(1000.0)
    assert (store.stored.value, store.depths(0), store.removals.expired) == (0, (0, 0, 0), 3)
    assert store.stored.peak == 12 * 2
    assert store.stored.mean(1000.0) == pytest.approx((16 * 300 + 8 * 300) / 1000)


def test_evictions_are_counted():
    store = Store(record(0, PROMPT[:8]), record(1, [7] * BLOCK), tiers=[Tier("device", 16)])
    store.use(0, 0)
    store.use(1, 1)
    assert (store.removals.evicted, store.removals.expired, store.stored.value) == (1, 0, 16)
    assert store.depths(0) == (1, 1, 1)


def test_nothing_is_kept_where_nothing_fits():
    store = Store(record(0, PROMPT, ends=[30], ttls=["5m"]), tiers=[Tier("device", 0)])
    found = store.use(0, 0)
    assert (found.tokens, store.stored.peak, store.depths(0)) == (0, 0, (0, 0, 0))


def test_what_leaves_the_device_is_found_in_host_memory():
    others = [record(3 + number, [9 + number] * 8) for number in range(9)]
    tiers = [Tier("device", 16), Tier("host", 64)]
    store = Store(record(0, PROMPT[:8]), record(1, [7] * 8), *others, tiers=tiers)
    store.use(0, 0)
    store.use(1, 1)
    assert store.depths(0) == (0, 2, 2)
    assert (store.stored.value, store.removals.evicted) == (32, 2)
    assert store.use(0, 2).tokens == 8
    for number in range(2, 11):
        store.use(number, 1 + number)
    assert store.depths(0) == (0, 0, 0)
    assert store.stored.peak <= 16 + 64
    store.cache.expire(10_000)
    assert store.stored.value == 0


def test_what_is_fetched_lives_its_ttl_from_its_arrival_and_a_mark_what_was_left_of_it():
    request = record(0, PROMPT[:10], ends=[10], ttls=["5m"])
    donor = Store(request)
    donor.use(0, 0.0)
    parcel = donor.cache.chains.lend(donor.prompt(0), 0, 2, 1 << 20, False, 290.0)
    assert (parcel.blocks, parcel.nbytes, parcel.more) == (2, 20, False)  # two blocks of four tokens, a tail of two
    for now, blocks, hit in ((304.0, 2, 10), (306.0, 2, 0), (594.0, 2, 0), (595.0, 0, 0)):
        fresh = Store(request)
        fresh.cache.adopt(fresh.prompt(0), parcel, 295.0)
        found = fresh.match(0, now)
        assert (found.blocks, found.hit) == (blocks, hit)


def test_what_is_handed_over_lives_what_was_left_of_its_life():
    request = record(0, PROMPT[:8])
    donor, heir = Store(request), Store(request)
    donor.use(0, 0.0)
    chains = donor.cache.chains.hottest(1 << 20, 290.0)
    heir.cache.take_over(chains, 295.0)
    for now, blocks in ((304.0, 2), (305.0, 0)):
        assert heir.cache.leading(heir.prompt(0), 2, now) == (blocks, blocks, blocks)
    assert heir.cache.chains.holds(chains[0], 304.0) > heir.cache.chains.holds(chains[0], 305.0)


def test_what_comes_from_elsewhere_outlives_no_block_before_it():
    """A replica that holds the beginning for less long keeps it as long as what is behind it."""
    request = record(0, PROMPT[:8])
    both = (record(0, PROMPT[:4]), request)
    donor, heir = Store(*both), Store(*both)
    heir.use(0, 0.0)
    donor.use(1, 200.0)
    heir.cache.take_over(donor.cache.chains.hottest(1 << 20, 200.0), 200.0)
    found = heir.match(1, 499.0)
    assert found.blocks == 2
    heir.cache.release(found)
    heir.cache.expire(1e4)
    assert heir.stored.value == 0


def test_pieces_of_a_parcel_are_blocks_in_order():
    donor = Store(record(0, PROMPT))
    donor.use(0, 0.0)
    lend, first, blocks = donor.cache.chains.lend, 0, []
    while (parcel := lend(donor.prompt(0), first, 7, 20, False, 1.0)).more:
        blocks.append((parcel.blocks, parcel.nbytes))
        first = parcel.blocks
    assert blocks == [(2, 16), (4, 16), (6, 16)]
    assert (parcel.blocks, parcel.nbytes) == (7, 8)
    assert lend(donor.prompt(0), 3, 4, 1, False, 1.0).nbytes == 8  # at least one
    assert lend(donor.prompt(0), 0, 7, 20, False, 400.0).blocks == 0  # all has expired


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("ends", [[], [1], [10, 30], [8], [17, 29]])
def test_a_replica_keeps_as_many_blocks_as_routing_expects(automatic, ends):
    request = record(0, PROMPT, ends=ends, ttls=["5m"] * len(ends))
    store = Store(request, automatic=automatic)
    store.use(0, 0)
    lifetimes = Lifetimes({"5m": 300.0}, 300.0, automatic)
    assert store.depths(0)[-1] == lifetimes.stored_blocks(request.marks, len(request.hashes), BLOCK)
