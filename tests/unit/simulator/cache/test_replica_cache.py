import pytest

from tests.unit.simulator.conversations import BLOCK, record
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import Tier
from warmkv.prefixes.index import PrefixIndex
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache

PROMPT = list(range(30))


def cache(capacity=1000, automatic=True, default=300.0):
    index, stored, removals = PrefixIndex(), TimeWeightedGauge(), Removals()
    lifetimes = Lifetimes({"5m": 300.0, "1h": 3600.0}, default, automatic)
    return ReplicaCache("a", [Tier("device", capacity)], 2, lifetimes, index, stored, removals), index, stored, removals


def use(store, request, now):
    store.expire(now)
    match = store.match(request, now)
    store.store(request, request.marks, now, None, now)
    store.release(request, match)
    return match


def test_a_tail_is_reused_and_read_to_the_token():
    store, *_ = cache()
    use(store, record(0, PROMPT[:10], ends=[10], ttls=["5m"]), 0)
    match = use(store, record(1, PROMPT[:19], ends=[10, 19], ttls=[None, "5m"]), 1)
    assert (match.hit, match.blocks, match.tokens) == (10, 2, 10)
    match = use(store, record(2, PROMPT, ends=[10, 19, 30], ttls=[None, None, "5m"]), 2)
    assert (match.hit, match.blocks, match.tokens) == (19, 4, 19)


def test_blocks_are_reused_without_marks_but_not_billed_as_read():
    store, *_ = cache()
    use(store, record(0, PROMPT), 0)
    match = use(store, record(1, PROMPT, ends=[30], ttls=["5m"]), 1)
    assert (match.hit, match.blocks, match.tokens) == (0, 7, 28)


def test_only_marked_prefixes_are_kept_unless_automatic():
    store, index, stored, _ = cache(automatic=False)
    use(store, record(0, PROMPT), 0)
    assert stored.value == 0
    use(store, record(1, PROMPT, ends=[10, 30], ttls=["5m", None]), 1)
    assert stored.value == 10 * 2
    assert len(index) == 3  # two blocks and a tail


def test_a_billed_tail_beside_the_reused_chain_is_refreshed():
    store, *_ = cache(default=3600.0)
    use(store, record(0, PROMPT[:10], ends=[10], ttls=["5m"]), 0)
    use(store, record(1, PROMPT), 1)  # stores more blocks, so that the chain goes past the tail
    for now in (250.0, 500.0, 750.0):
        request = record(now, PROMPT, ends=[10, 30], ttls=[None, "5m"])
        match = store.match(request, now)
        assert (match.hit, match.tokens) == (10, 28)
        store.release(request, match)
        store.expire(now)


def test_a_mark_that_has_lapsed_is_not_read():
    store, *_ = cache(default=3600.0)
    request = record(0, PROMPT[:8], ends=[8], ttls=["5m"])
    use(store, request, 0)
    match = store.match(request, 301)
    assert (match.hit, match.tokens) == (0, 8)


def test_entries_leave_at_their_own_time():
    store, index, stored, removals = cache()
    use(store, record(0, PROMPT[:8]), 0.0)
    use(store, record(1, [7] * BLOCK), 100.0)
    store.expire(1000.0)
    assert (stored.value, len(index), removals.expired) == (0, 0, 3)
    assert stored.peak == 12 * 2
    assert stored.mean(1000.0) == pytest.approx((16 * 300 + 8 * 300) / 1000)


def test_evictions_are_counted_and_unlisted():
    store, index, stored, removals = cache(capacity=16)
    use(store, record(0, PROMPT[:8]), 0)
    use(store, record(1, [7] * BLOCK), 1)
    assert (removals.evicted, removals.expired, stored.value) == (1, 0, 16)
    assert index.longest_match(record(0, PROMPT[:8]).hashes) == {"a": (1, 1, 1)}


def test_nothing_is_kept_where_nothing_fits():
    store, index, stored, _ = cache(capacity=0)
    match = use(store, record(0, PROMPT, ends=[30], ttls=["5m"]), 0)
    assert (match.tokens, stored.peak, len(index)) == (0, 0, 0)


def test_what_leaves_the_device_is_found_in_host_memory_and_stays_listed():
    index, stored, removals = PrefixIndex(), TimeWeightedGauge(), Removals()
    lifetimes = Lifetimes({"5m": 300.0, "1h": 3600.0}, 300.0, automatic=True)
    tiers = [Tier("device", 16), Tier("host", 64)]
    store = ReplicaCache("a", tiers, 2, lifetimes, index, stored, removals)
    first, second = record(0, PROMPT[:8]), record(1, [7] * 8)
    use(store, first, 0)
    use(store, second, 1)
    assert index.longest_match(first.hashes) == {"a": (0, 2, 2)}
    assert (stored.value, removals.evicted) == (32, 2)
    match = use(store, first, 2)
    assert match.tokens == 8
    for number in range(9):
        use(store, record(3 + number, [9 + number] * 8), 3 + number)
    assert index.longest_match(first.hashes) == {}
    assert stored.peak <= 16 + 64
    store.expire(10_000)
    assert (stored.value, len(index)) == (0, 0)


def test_what_is_fetched_lives_its_ttl_from_its_arrival_and_a_mark_what_was_left_of_it():
    donor, taker = cache()[0], cache()[0]
    request = record(0, PROMPT[:10], ends=[10], ttls=["5m"])
    use(donor, request, 0.0)
    parcel = donor.lend(request, 0, 2, 1 << 20, False, 290.0)
    assert (parcel.blocks, parcel.nbytes, parcel.more) == (2, 20, False)  # two blocks of four tokens, a tail of two
    taker.adopt(request, parcel, 295.0)
    for now, blocks, hit in ((304.0, 2, 10), (306.0, 2, 0), (594.0, 2, 0), (595.0, 0, 0)):
        fresh = cache()[0]
        fresh.adopt(request, parcel, 295.0)
        fresh.expire(now)
        match = fresh.match(request, now)
        assert (match.blocks, match.hit) == (blocks, hit)


def test_what_is_handed_over_lives_what_was_left_of_its_life():
    donor, choose_successor = cache()[0], cache()[0]
    request = record(0, PROMPT[:8])
    use(donor, request, 0.0)
    chains = donor.hottest(1 << 20, 290.0)
    choose_successor.take_over(chains, 295.0)
    choose_successor.expire(304.0)
    assert choose_successor.leading(request, 2, 304.0) == (2, 2, 2)
    choose_successor.expire(305.0)
    assert choose_successor.leading(request, 2, 305.0) == (0, 0, 0)


def test_pieces_of_a_parcel_are_blocks_in_order():
    donor = cache()[0]
    request = record(0, PROMPT)
    use(donor, request, 0.0)
    first, blocks = 0, []
    while (parcel := donor.lend(request, first, 7, 20, False, 1.0)).more:
        blocks.append((parcel.blocks, parcel.nbytes))
        first = parcel.blocks
    assert blocks == [(2, 16), (4, 16), (6, 16)]
    assert (parcel.blocks, parcel.nbytes) == (7, 8)
    assert donor.lend(request, 3, 4, 1, False, 1.0).nbytes == 8  # at least one
    assert donor.lend(request, 0, 7, 20, False, 400.0).blocks == 0  # all has expired


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("ends", [[], [1], [10, 30], [8], [17, 29]])
def test_a_replica_keeps_as_many_blocks_as_routing_expects(automatic, ends):
    store, index, *_ = cache(automatic=automatic)
    request = record(0, PROMPT, ends=ends, ttls=["5m"] * len(ends))
    use(store, request, 0)
    depths = index.longest_match(request.hashes).get("a", (0, 0, 0))
    lifetimes = Lifetimes({"5m": 300.0}, 300.0, automatic)
    assert depths[-1] == lifetimes.stored_blocks(request.marks, len(request.hashes), BLOCK)
