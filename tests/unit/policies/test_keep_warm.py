"""Prefixes that are touched in time stay in a cache that evicts by recency, and nothing is touched for nothing."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.keep_warm import KeepWarm, KeptPrefix

ROOM = 40


def always(one):
    return True


class Lru:
    """Keep blocks, least recently used first. A prompt takes what it finds and then the first ones; its own go
    to the end, the last of them first."""

    def __init__(self, blocks):
        self.free, self.stored = [None] * blocks, 0

    def ask(self, chain):
        found = [key for at, key in enumerate(chain) if all(before in self.free for before in chain[: at + 1])]
        self.free = [key for key in self.free if key not in found]
        new = chain[len(found) :]
        self.free = self.free[len(new) :] + list(chain)[::-1]
        self.stored += len(new)
        return len(found)


def prefix(name, blocks, end=None):
    chain = tuple(f"{name}{at}".encode() for at in range(blocks))
    return KeptPrefix(f"mark {name} {end or blocks}".encode(), b"", chain[:end], ())


ASKS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=40)


@given(ASKS, st.integers(1, 16), st.booleans())
def test_what_is_kept_is_never_evicted_within_the_limit(asks, limit, ends_live):
    """Prompts of up to 4 blocks, some of them marked at their end, computed one after the other."""
    engine, warm, touches = Lru(ROOM), KeepWarm(limit), 0
    dead = set()
    for number, (name, blocks, marked) in enumerate(asks):
        asked = prefix(name if marked else f"x{number}.", blocks)
        engine.ask(asked.chain)
        warm.used(asked.chain, engine.stored)
        if marked:
            warm.keep(asked, engine.stored)
            if ends_live and name == 0:
                dead.add(asked.mark)
        while (due := warm.due(engine.stored, ROOM, lambda one: one.mark not in dead, always)) is not None:
            assert due.mark not in dead
            assert engine.ask(due.chain) == len(due.chain)  # it is there still, so a touch computes nothing
            touches += 1
        kept = [one.prefix for one in warm._kept.values()]
        assert warm.blocks == len({key for one in kept for key in one.chain}) <= limit
        assert all(key in engine.free for one in kept if one.mark not in dead for key in one.chain)
    assert touches <= engine.stored


def test_the_longest_prefix_is_touched_for_those_that_it_begins_with():
    warm = KeepWarm(10)
    for end in (2, 6, 4):
        warm.keep(prefix("a", 6, end), 0)
    assert (len(warm), warm.blocks) == (3, 6)
    assert warm.due(17, ROOM, always, always) is None  # half of what others have room for
    assert warm.due(18, ROOM, always, always).chain == prefix("a", 6).chain
    assert warm.due(18, ROOM, always, always) is None
    assert warm.due(36, ROOM, always, always) is not None


def test_the_least_recently_used_gives_way_and_what_exceeds_the_limit_is_not_kept():
    warm = KeepWarm(5)
    for name in "ab":
        warm.keep(prefix(name, 2), 0)
    warm.used(prefix("a", 2).chain, 3)
    warm.keep(prefix("c", 3), 3)
    assert [one.prefix.chain[0] for one in warm._kept.values()] == [b"a0", b"c0"]
    warm.keep(prefix("d", 6), 3)
    warm.keep(prefix("e", 0), 3)
    assert (len(warm), warm.blocks) == (2, 5)
    for one in (prefix("a", 2), prefix("never kept", 1)):
        warm.forget(one)
    assert (len(warm), warm.blocks) == (1, 3)


def test_marks_behind_the_same_blocks_take_one_place_for_each_ttl():
    warm, hot = KeepWarm(10), prefix("a", 4)
    for number in range(1000):
        warm.keep(replace(hot, mark=b"m%d" % number), number)
        warm.used(hot.chain, number)
    assert (len(warm), warm.blocks) == (1, 4)
    for mark, ttl in ((b"long", "1h"), (b"short", "")):
        warm.keep(replace(hot, mark=mark, ttl=ttl), 1000)
    assert warm.due(2000, ROOM, lambda one: one.mark == b"long", always).mark == b"long"
    assert (len(warm), warm.blocks) == (1, 4)


def test_a_mark_that_is_over_is_forgotten_while_its_blocks_are_used():
    warm, hot = KeepWarm(10), prefix("a", 4)
    warm.keep(hot, 0)
    warm.used(hot.chain, 5)
    assert warm.due(5, ROOM, lambda one: False, always) is None
    assert (len(warm), warm.blocks) == (0, 0)


def test_running_requests_that_leave_no_room_cause_no_touch_after_the_other():
    warm = KeepWarm(10)
    warm.keep(prefix("a", 4), 7)
    for stored, due in ((7, False), (8, True), (8, False), (9, True)):
        assert (warm.due(stored, 2, always, always) is not None) == due


def test_without_a_limit_nothing_is_kept():
    warm = KeepWarm(0)
    warm.keep(prefix("a", 1), 0)
    warm.used(prefix("a", 1).chain, 1)
    assert (len(warm), warm.due(10**6, 1, always, always)) == (0, None)
