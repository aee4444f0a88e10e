"""Replays begin with what the replicas held: then prefixes that were written before the window are found in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.platform.whatif.traffic import OFFSET, PROMPTS, logged, prompts, settings
from tests.unit.simulator.conversations import BLOCK, logs, record
from warmkv.config import Config
from warmkv.platform.whatif.candidates import NOW, WhatIfCandidate
from warmkv.platform.whatif.replays import Basis, Default, Replayed, Round, replays
from warmkv.platform.whatif.warm_start import PART, Snapshots, Start
from warmkv.platform.whatif.window import RequestWindow
from warmkv.policies.contents import Contents, contents_of
from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.layout import layout
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache
from warmkv.simulator.cache.warm_start import prompts_of
from warmkv.simulator.studies.replays.whatif import measure

TTLS = {"5m": 300.0, "1h": 3600.0}
MOST = 1000


def serve(cache: PrefixCache, line: RequestRecord, now: float) -> Match:
    """Do with a request what a replica's store does."""
    cache.expire(now)
    match = cache.match(line.hashes, line.reads, line.block_size, now)
    list(cache.store(line.hashes, line.marks, line.block_size, now, line.tenant, match))
    cache.release(match)
    return match


def traffic(now: Config) -> list[RequestRecord]:
    """Return four cycles of prompts as logged, without times of their prefill, to which step times would be fitted."""
    return [replace(line, prefill=0.0) for line in logged(prompts()[: 4 * PROMPTS], now)]


def replica(now: Config, log: Sequence[RequestRecord]) -> Contents:
    """What a replica with these settings holds after a log, whose times are Unix time; its own clock shows others."""
    cache = PrefixCache(tiers_of(now.prefix_cache, kv_shape(now)), 2, Lifetimes.of(now.prefix_cache))
    for line in log:
        serve(cache, line, line.arrival + line.ttft - OFFSET)
    last = log[-1].arrival + log[-1].ttft
    return contents_of(cache.tree, MOST, last - OFFSET, last)


def test_prefixes_that_were_written_before_the_window_are_predicted_as_they_are_found():
    now = settings("prefix_cache.ttls={5m: 600, 1h: 3600}")
    log = traffic(now)
    before, window = log[: 2 * PROMPTS], log[2 * PROMPTS :]  # a cycle each: in the window no prompt comes twice
    measured = measure(window[PROMPTS:], now)
    assert measured["hit_rate"] == pytest.approx(0.5, abs=0.01)

    def hit_rate(start: Start) -> tuple[Basis, float | None]:
        basis, present = replays(Round(start, now, [Default.of(0.0, now)], 0.0, []))
        assert isinstance(basis, Basis)
        assert isinstance(present, Replayed)
        assert present.prediction is not None
        assert present.candidate.name == NOW
        return basis, present.prediction.figures["hit_rate"]

    basis, cold = hit_rate(Start(window))
    assert (basis.held_blocks, cold) == (None, 0.0)
    held = replica(now, before)
    basis, warm = hit_rate(Start(window, held=[held]))
    assert basis.held_blocks == sum(map(len, held.tiers.values())) > 0
    assert warm == measured["hit_rate"]  # exactly
    late = replica(settings(), before)  # whose blocks lived 300 s, and have expired when their prompts come again
    assert hit_rate(Start(window, held=[late]))[1] == 0.0


def test_a_candidate_begins_with_as_much_as_fits_it_and_with_the_lives_that_blocks_have():
    now = settings("prefix_cache.ttls={5m: 600, 1h: 3600}")
    log = traffic(now)
    start = Start(log[2 * PROMPTS :], held=[replica(now, log[: 2 * PROMPTS])])
    tried = {
        "1": {"prefix_cache.memory_bytes": 1 << 30},
        "2": {"prefix_cache.memory_bytes": 8 * BLOCK * 2},
        "3": {"prefix_cache.enabled": False},
        "4": {"prefix_cache.ttls": {"5m": 60.0, "1h": 3600.0}},  # a block keeps the TTL it was written with
        "5": {"cluster.replicas": 2, "prefix_cache.host": {"memory_bytes": 1 << 20}},
    }
    candidates = [WhatIfCandidate(name, changes) for name, changes in tried.items()]
    steps = replays(Round(start, now, [Default.of(0.0, now)], 0.0, candidates))
    found = {one.candidate.name: one.prediction for one in steps if isinstance(one, Replayed)}
    rates = {name: one.figures["hit_rate"] for name, one in found.items() if one is not None}
    assert rates.pop("best", rates[NOW]) == rates[NOW]
    assert rates == {NOW: rates[NOW], "1": rates[NOW], "2": 0.0, "3": 0.0, "4": rates[NOW], "5": rates[NOW]}


@given(logs(policies=("full",)), st.data())
def test_a_restored_cache_goes_on_as_the_one_it_was_taken_of(log, data):
    """Whatever the tiers, and wherever the log is cut: what is found and held is the same block by block."""
    capacity, below = data.draw(st.sampled_from([64, 120, 10_000])), data.draw(st.sampled_from([0, 80, 10_000]))
    tiers = [Tier("device", capacity), *([Tier("host", below)] if below else [])]
    lifetimes = Lifetimes({"5m": 8.0, "1h": 60.0}, 4.0, data.draw(st.booleans()))
    live = PrefixCache(tiers, 2, lifetimes)
    cut = data.draw(st.integers(0, len(log)))
    for line in log[:cut]:
        serve(live, line, line.arrival)
    at = log[cut - 1].arrival if cut else 0.0
    live.expire(at)
    held = contents_of(live.tree, MOST, at, OFFSET + at)
    gauge, laid_out = TimeWeightedGauge(), layout([*log[cut:], *prompts_of([held], BLOCK)])
    simulated = ReplicaCache("a", laid_out, tiers, 2, lifetimes, gauge, Removals())
    simulated.restore(held, 0.0, OFFSET + at)
    assert gauge.value == sum(space.bytes for space in live.tree.spaces)
    for line, prompt in zip(log[cut:], laid_out.prompts, strict=False):
        truth = serve(live, line, line.arrival)
        now = line.arrival - at
        simulated.expire(now)
        found = simulated.match(prompt, now)
        assert (found.hit, found.blocks, found.tokens) == (truth.hit, truth.blocks, truth.tokens)
        simulated.store(prompt, line.marks, now, found, now)
        simulated.release(found)
        assert gauge.value == sum(space.bytes for space in live.tree.spaces)


def test_of_many_blocks_those_used_last_are_told_with_all_before_them():
    cache = PrefixCache([Tier("device", 10_000)], 2, Lifetimes(TTLS, 300.0, True))
    for at, start in enumerate((0, 100, 0, 200)):
        serve(cache, record(at, range(start, start + 4 * BLOCK)), float(at))
    held = contents_of(cache.tree, 6, 4.0, OFFSET).tiers["device"]
    assert [one.used_at - OFFSET for one in held] == [-1.0] * 4 + [-2.0] * 2  # what came third was read then
    told = {b"", *(one.key for one in held)}
    assert all(one.parent in told for one in held)
    assert held[0].parent == b""
    assert held[0].expires_at == OFFSET + 299


def lines(first: int, count: int) -> list[RequestRecord]:
    """Return requests a second apart, which have their first token after two."""
    plain = replace(record(0, [1]), status="ok", ttft=2.0, e2e=3.0)
    return [replace(plain, id=f"{n}", arrival=float(n)) for n in range(first, first + count)]


def told(at: float, *since: float) -> list[Contents]:
    block = contents_of_one()
    return [Contents(at, {"device": [block._replace(since=one) for one in since]})]


def contents_of_one():
    cache = PrefixCache([Tier("device", 100)], 2, Lifetimes(TTLS, 300.0, True))
    serve(cache, record(0, range(BLOCK)), 0.0)
    return contents_of(cache.tree, 1, 0.0, 0.0).tiers["device"][0]


def since(start: Start) -> list[float]:
    assert start.held is not None
    return [held.since for each in start.held for held in each.tiers["device"]]


def test_the_first_snapshot_stands_for_the_moment_before_the_first_request():
    window, snapshots = RequestWindow(requests=16), Snapshots()
    assert snapshots.start(window) == Start([])
    window.add(lines(10, 3))
    assert snapshots.start(window).held is None
    assert snapshots.due(window)
    snapshots.add(told(14.0, 5.0, 12.5), window)  # one was there, the other the first request has written
    assert not snapshots.due(window)
    start = snapshots.start(window)
    assert ([line.arrival for line in start.records], start.early, since(start)) == ([10, 11, 12], 0, [5.0])


def test_a_window_that_slides_begins_at_the_oldest_snapshot_it_reaches_back_to():
    window, snapshots = RequestWindow(requests=16), Snapshots()
    taken = []
    for n in range(64):
        window.add(lines(n, 1))
        if snapshots.due(window):
            taken.append(n)
            snapshots.add(told(n + 0.5, n - 5.0, n + 0.4), window)
        start = snapshots.start(window)
        if n < 16:
            assert len(start.records) == n + 1
            continue
        begin = next(at for at in taken if at + 0.5 >= window.records()[0].arrival + 3)  # who left had ended by then
        assert start.records[0].arrival == begin - 1  # its first token came half a second after the snapshot
        assert (start.early, start.records[2].arrival) == (2, begin + 1)
        assert since(start) == [begin - 5.0, begin + 0.4]  # all that it has
        assert len(start.records) > 16 // 2
    assert taken == [0, *range(3, 64, 16 // PART)]


def test_replicas_that_never_tell_leave_the_replays_with_empty_caches():
    window = RequestWindow(requests=4)
    window.add(lines(0, 9))
    assert Snapshots().start(window) == Start(window.records())
