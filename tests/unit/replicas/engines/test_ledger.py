"""The contract over a cache that vLLM keeps: as the replica's own rules where nothing is evicted, never more than is
there where something is.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replicas.engines.test_kv_events import SlowVllm
from warmkv.config import PrefixCacheConfig
from warmkv.policies.prefix_cache import Lifetimes, PrefixCache
from warmkv.policies.tiers import Tier
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes import breakpoints, hashing
from warmkv.prefixes.breakpoints import Breakpoint
from warmkv.replicas.engines.kv_events import KVEvent
from warmkv.replicas.engines.ledger import PrefixLedger
from warmkv.replicas.protocol import GenerateRequest, SamplingParams

SIZE = 4
ROOTS = [hashing.chain_root(name, "model") for name in (b"a", b"b")]
LIFETIMES = Lifetimes.of(PrefixCacheConfig())
MARKED = replace(LIFETIMES, automatic=False)


def asked(tokens: Sequence[int], marks: dict[int, str] | None = None, tenant: int = 0, other: bool = False):
    """Return a request; every token ends a content block, and with `other` its tool choice is another one."""
    marked = [Breakpoint(at, ttl) for at, ttl in sorted((marks or {}).items())]
    other_from = SIZE if other and len(tokens) > SIZE else None
    plan = breakpoints.plan(
        tokens,
        range(1, len(tokens) + 1),
        marked,
        ROOTS[tenant],
        block_size=SIZE,
        other_from=other_from,
    )
    return GenerateRequest(
        "request",
        tuple(tokens),
        plan.hashes,
        SamplingParams(8),
        PolicySpec(),
        plan.marks,
        plan.reads,
        root=ROOTS[tenant],
        other_from=other_from,
        tenant=f"t{tenant}",
    )


class Vllm:
    """vLLM's cache with the ledger over it, and what the directory knows."""

    def __init__(self, lifetimes: Lifetimes = LIFETIMES, limit: int = 1 << 30, keep_warm: int = 0) -> None:
        self.now, self.cache = 0.0, SlowVllm(SIZE)
        self.directory: dict[bytes, str] = {}
        self.ledger = PrefixLedger(SIZE, 1, limit, lifetimes, lambda: self.now, self.publish, keep_warm)

    def publish(self, stored: Sequence[bytes], evicted: Sequence[bytes], tier: str) -> None:
        for key in evicted:
            del self.directory[key]
        self.directory |= dict.fromkeys(stored, tier)

    def found(self, salt: str, tokens: Sequence[int]) -> int:
        """Tokens that vLLM finds: whole blocks, and never the last token."""
        blocks = 0
        while (end := (blocks + 1) * SIZE) < len(tokens) and self.cache.resident(salt, tuple(tokens[:end])):
            blocks += 1
        return blocks * SIZE

    def answer(self, request: GenerateRequest, late: bool = False, drawn: Sequence[int] = ()):
        """Compute a request; with `late` vLLM's events come behind its first token."""
        salt = self.ledger.salt(request)
        found = self.found(salt, request.token_ids)
        event = self.cache.store(salt, (*request.token_ids, *drawn), "GPU", found // SIZE)
        events = [event] if event is not None else []
        if not late:
            self.ledger.take(events)
        reading = self.ledger.began(request, found, self.now)
        if late:
            self.ledger.take(events)
        return reading, found

    def evict(self, at: tuple[str, str, tuple[int, ...]]) -> None:
        self.ledger.take([self.cache.remove(at)])

    def ends(self) -> list[tuple[str, str, tuple[int, ...]]]:
        held = [at for at, count in self.cache.held.items() if count > 0]
        return [
            at
            for at in held
            if not any(other[1] == at[1] and other[2] != at[2] and other[2][: len(at[2])] == at[2] for other in held)
        ]


REQUESTS = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.dictionaries(st.integers(1, 14), st.sampled_from(["5m", "1h"]), max_size=3),
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from([0.0, 100.0, 299.0, 301.0, 3601.0]),
)


@given(st.lists(REQUESTS, max_size=12), st.booleans(), st.booleans())
def test_reads_and_writes_are_those_of_the_replica_s_own_rules(asks, late: bool, automatic: bool):
    lifetimes = LIFETIMES if automatic else MARKED
    vllm, own = Vllm(lifetimes), PrefixCache([Tier("device", 1 << 30)], 1, lifetimes)
    for tokens, marks, tenant, other, seconds in asks:
        vllm.now += seconds
        marks = {at: ttl for at, ttl in marks.items() if at <= len(tokens)}
        request = asked(tokens, marks, tenant, other)
        known = sum(1 for _ in takewhile(vllm.directory.__contains__, request.hashes))
        assert vllm.ledger.lacking_tokens(request) == len(tokens) - known * SIZE
        own.expire(vllm.now)
        match = own.match(request.hashes, request.reads, SIZE, vllm.now)
        own.release(match)
        list(own.store(request.hashes, request.marks, SIZE, vllm.now, request.tenant, match))
        reading, found = vllm.answer(request, late)
        assert (reading.hit, reading.written) == (match.hit, own.highest_mark(request.marks, vllm.now))
        assert reading.cached_tokens == min(found, match.tokens)
        held = {key for run in own.tree.recent(0) for key in run.keys}
        told = {key for key in held if vllm.ledger._blocks.tier(vllm.ledger._own.get(key, key))}
        assert set(vllm.directory) == told >= set(request.hashes) & held


@given(st.data(), st.booleans())
def test_nothing_is_told_or_read_that_is_evicted_or_has_outlived_its_ttl(data: st.DataObject, late: bool):
    vllm, written = Vllm(), dict[bytes, float]()
    for _ in range(data.draw(st.integers(1, 20))):
        if (ends := vllm.ends()) and data.draw(st.booleans()):
            vllm.evict(data.draw(st.sampled_from(sorted(ends))))
            continue
        tokens, marks, tenant, other, seconds = data.draw(REQUESTS)
        vllm.now += seconds
        request = asked(tokens, {at: ttl for at, ttl in marks.items() if at <= len(tokens)}, tenant, other)
        reading, found = vllm.answer(request, late, data.draw(st.lists(st.integers(0, 1), max_size=6)))
        assert reading.cached_tokens <= found
        assert reading.hit // SIZE * SIZE <= found + SIZE
        key = next((read.key for read in request.reads if read.position == reading.hit), None)
        assert reading.hit == 0 or (key is not None and written[key] > vllm.now)
        lives = {mark.key: vllm.now + LIFETIMES.ttls[mark.ttl] for mark in request.marks}
        touched = [read.key for read in request.reads if read.position <= max(reading.hit, reading.cached_tokens)]
        for key in (*lives, *touched):
            written[key] = max(written.get(key, 0.0), lives.get(key, vllm.now + 3600.0))
        held = vllm.cache.tiers(SIZE)
        for name, tier in vllm.directory.items():
            assert held[vllm.ledger._own.get(name, name)] == tier
        assert vllm.ledger.full_blocks()["device"] == [key for key, at in vllm.directory.items() if at == "device"]


@given(st.data())
def test_events_may_come_long_after_the_answers(data: st.DataObject):
    vllm, pending, follow = Vllm(), list[KVEvent](), None
    follow, vllm.ledger.take = vllm.ledger.take, pending.extend  # type: ignore[method-assign, assignment]
    for _ in range(data.draw(st.integers(1, 20))):
        if (ends := vllm.ends()) and data.draw(st.booleans()):
            vllm.evict(data.draw(st.sampled_from(sorted(ends))))
            continue
        tokens, marks, tenant, other, seconds = data.draw(REQUESTS)
        vllm.now += seconds
        marks = {at: ttl for at, ttl in marks.items() if at <= len(tokens)}
        vllm.answer(asked(tokens, marks, tenant, other))
        if data.draw(st.booleans()):
            follow(pending)
            pending.clear()
    follow(pending)
    held = vllm.cache.tiers(SIZE)
    for name, tier in vllm.directory.items():
        assert held[vllm.ledger._own.get(name, name)] == tier


def test_generated_tokens_are_told_as_well():
    vllm, tokens, drawn = Vllm(), [1, 2, 3, 4, 5], [6, 7, 8]
    vllm.answer(asked(tokens), drawn=drawn)
    again = asked([*tokens, *drawn, 9])
    assert set(vllm.directory) == set(again.hashes)
    reading, found = vllm.answer(again)
    assert reading.cached_tokens == found == 8
    vllm = Vllm()
    vllm.answer(asked(tokens, other=True), drawn=drawn)
    reading, found = vllm.answer(asked([*tokens, *drawn, 9], other=True))
    assert (found, reading.cached_tokens) == (8, 4)  # as the log has it: events do not tell other names
    vllm = Vllm(MARKED)
    vllm.answer(asked(tokens), drawn=drawn)
    assert vllm.directory == {}


def test_what_outlived_its_ttl_is_written_anew_though_vllm_has_it():
    vllm, tokens = Vllm(), list(range(9))
    vllm.answer(asked(tokens, {8: "5m"}))
    vllm.now = 301
    vllm.ledger.expire()
    assert vllm.directory == {}
    assert vllm.ledger.left["device", "expired"] == 2
    reading, found = vllm.answer(asked(tokens, {8: "5m"}))
    assert (found, reading.hit, reading.cached_tokens, reading.written) == (8, 0, 0, 8)
    assert len(vllm.directory) == 2
    assert vllm.answer(asked(tokens, {8: "5m"}))[0].hit == 8


def test_what_is_evicted_is_written_anew_and_counted():
    vllm, tokens = Vllm(), list(range(9))
    vllm.answer(asked(tokens, {8: "1h"}))
    (end,) = vllm.ends()
    vllm.evict(end)
    assert len(vllm.directory) == 1
    assert vllm.ledger.left["device", "evicted"] == 1
    reading, found = vllm.answer(asked(tokens, {8: "1h"}))
    assert (found, reading.hit, reading.cached_tokens, reading.written) == (4, 0, 4, 8)


def test_prefixes_of_a_tenant_that_are_dropped_are_found_no_more():
    vllm, tokens = Vllm(), list(range(9))
    for tenant in (0, 1):
        vllm.answer(asked(tokens, {8: "5m"}, tenant))
    assert vllm.ledger.drop("t0") == 2 * SIZE
    assert set(vllm.directory) == set(asked(tokens, tenant=1).hashes)
    reading, found = vllm.answer(asked(tokens, {8: "5m"}))
    assert (found, reading.hit) == (0, 0)
    assert vllm.answer(asked(tokens, {8: "5m"}))[0].hit == 8
    assert vllm.answer(asked(tokens, {8: "5m"}, 1))[0].hit == 8
    assert vllm.ledger.left["device", "dropped"] == 2


def test_other_names_of_blocks_are_forgotten_when_a_tenant_s_prefixes_are_dropped():
    """vLLM tells of these blocks' evictions later, when they are nobody's any more."""
    vllm = Vllm()
    vllm.answer(asked(list(range(9)), other=True))
    assert len(vllm.ledger._own) == len(vllm.ledger._names) == 1
    vllm.ledger.drop("t0")
    assert not vllm.ledger._own
    assert not vllm.ledger._names


def test_other_names_of_what_is_never_computed_are_forgotten():
    vllm = Vllm()
    tokens = list(range(13))
    waiting, ended = (replace(asked(tokens[:count], other=True), id=str(count)) for count in (9, 13))
    for request in (waiting, ended):
        vllm.ledger.salt(request)
    vllm.ledger.ended(ended.id)
    assert set(vllm.ledger._own) == set(waiting.hashes[1:])
    assert vllm.answer(waiting)[0].cached_tokens == 0
    vllm.ledger.ended(waiting.id)
    assert vllm.answer(waiting)[0].cached_tokens == 2 * SIZE
    vllm.evict(max(vllm.ends()))
    assert not vllm.ledger._names
    vllm.ledger.salt(ended)
    vllm.ledger.ended(ended.id)
    assert not vllm.ledger._own


def test_no_names_are_kept_where_vllm_caches_nothing():
    """Keep none, since vLLM tells of no blocks then: none would ever be told to be gone."""
    ledger = PrefixLedger(SIZE, 1, 1 << 30, LIFETIMES, lambda: 0.0, lambda *_: None, enabled=False)
    for first in range(3):
        request = asked(range(first, first + 9), other=True)
        ledger.salt(request)
        ledger.began(request, 0, 0.0)
        ledger.ended(request.id)
    assert not ledger._own
    assert not ledger._names


def test_blocks_behind_what_has_outlived_its_ttl_are_looked_at_once(monkeypatch):
    """A prompt of thousands of blocks that goes on after its TTL held up the event loop, block by block."""
    vllm = Vllm()
    vllm.answer(asked(list(range(40))))
    vllm.now = 301.0
    chain, walked = vllm.ledger._blocks.chain, 0

    def counted(key: bytes) -> tuple[bytes, ...]:
        nonlocal walked
        found = chain(key)
        walked += len(found)
        return found

    monkeypatch.setattr(vllm.ledger._blocks, "chain", counted)
    vllm.answer(asked(list(range(80))))
    assert 0 < walked <= 20  # blocks of the prompt


@pytest.mark.parametrize("late", [False, True])
def test_what_has_outlived_its_ttl_is_not_read_because_vllm_tells_of_a_block_behind_it(late: bool):
    vllm = Vllm()
    vllm.answer(asked([1] * 6))
    vllm.now += 301.0
    reading, found = vllm.answer(asked([1] * 10), late)
    assert (found, reading.cached_tokens) == (SIZE, 0)
    assert len(vllm.directory) == 2
    reading, found = vllm.answer(asked([1] * 14), late)
    assert (found, reading.cached_tokens) == (2 * SIZE, 2 * SIZE)


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_live_mark_is_touched_when_others_have_filled_half_of_the_room(length: int):
    vllm = Vllm(limit=20 * SIZE, keep_warm=4 * SIZE)
    tokens = list(range(length))
    vllm.answer(asked(tokens, {length: "5m"}))
    vllm.answer(asked([50] * 8, {8: "5m"}, tenant=1))
    assert vllm.ledger.to_touch(0.0) is None
    for number in range(10):
        vllm.answer(asked([100 + number] * 4))
    touched = [vllm.ledger.to_touch(0.0) for _ in range(3)]
    assert touched[2] is None
    found = {}
    for prefix, salt in touched[:2]:  # type: ignore[misc]
        found[salt] = prefix.token_ids
        assert vllm.found(salt, prefix.token_ids) == 2 * SIZE  # a touch asks for one token more than these blocks
    assert found[ROOTS[0].hex()][:8] == tuple(range(8))
    assert found[ROOTS[1].hex()] == (50,) * 9
    vllm.now = 301.0  # a touch has prolonged nothing
    for number in range(10):
        vllm.answer(asked([200 + number] * 4))
    assert vllm.ledger.to_touch(0.0) is None
    assert len(vllm.ledger._warm) == 0


def test_the_less_room_running_requests_leave_the_sooner_a_mark_is_touched():
    vllm = Vllm(limit=20 * SIZE, keep_warm=4 * SIZE)
    vllm.answer(asked(list(range(9)), {9: "5m"}))
    for number in range(4):
        vllm.answer(asked([100 + number] * 4))
    assert vllm.ledger.to_touch(0.0) is None
    assert vllm.ledger.to_touch(0.8) is not None


def test_what_is_evicted_or_dropped_is_not_touched():
    for gone in ("evicted", "dropped"):
        vllm = Vllm(limit=20 * SIZE, keep_warm=4 * SIZE)
        vllm.answer(asked(list(range(9)), {9: "5m"}))
        if gone == "evicted":
            vllm.evict(vllm.ends()[0])
        else:
            vllm.ledger.drop("t0")
        for number in range(20):
            vllm.answer(asked([100 + number] * 4, tenant=1))
        assert vllm.ledger.to_touch(0.0) is None


def test_a_tail_goes_with_the_block_that_it_follows():
    """Else it would be billed as read when others have computed its blocks again."""
    vllm, tokens = Vllm(), list(range(11))
    vllm.answer(asked(tokens, {10: "1h"}))
    assert vllm.answer(asked(tokens, {10: "1h"}))[0].hit == 10
    for end in (8, 4):
        vllm.evict(("GPU", ROOTS[0].hex(), tuple(tokens[:end])))
    assert (vllm.ledger._tails, vllm.ledger._before) == ({}, {})
    vllm.answer(asked(tokens))
    reading, found = vllm.answer(asked(tokens, {10: "1h"}))
    assert (found, reading.hit, reading.cached_tokens, reading.written) == (8, 0, 8, 10)
