import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from warmkv.config import load
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator import access_log, workloads
from warmkv.simulator.sessions import ShareGPTLike, WorkloadError

CONFIG = load(environ={})
MANY = ShareGPTLike(sessions=20_000)


def rng():
    return np.random.default_rng(7)


def generate(settings, seed=3, config=CONFIG):
    return workloads.generate(settings, np.random.SeedSequence(seed), config)


def sessions(records):
    grouped: dict[str, list[RequestRecord]] = {}
    for record in records:
        grouped.setdefault(record.id.split("-")[0], []).append(record)
    return list(grouped.values())


def kolmogorov(values, cdf):
    """Largest distance between the empirical distribution and `cdf`."""
    ordered = np.sort(values)
    steps = np.arange(1, len(ordered) + 1) / len(ordered)
    return np.abs(steps - np.array([cdf(value) for value in ordered])).max()


def lognormal_cdf(mean, sigma):
    mu = math.log(mean) - sigma**2 / 2
    return lambda value: 0.5 * (1 + math.erf((math.log(value + 0.5) - mu) / (sigma * math.sqrt(2))))


def test_turns_have_the_published_percentiles():
    turns = workloads.session_turns(MANY, rng())
    assert turns.min() == 1
    assert turns.mean() == pytest.approx(3.5, rel=0.02)
    assert np.percentile(turns, [50, 90]).tolist() == [3, 7]
    assert np.percentile(turns, 99) == pytest.approx(13, abs=1)


def test_think_times_have_the_published_percentiles():
    times = workloads.think_times(MANY, 100_000, rng())
    assert np.percentile(times, [10, 50, 90]) == pytest.approx([17, 124, 2331], rel=0.04)


@pytest.mark.parametrize(("mean", "sigma"), [(161.0, 1.1), (338.0, 0.8), (95.0, 1.1)])
def test_lengths_are_lognormal_with_these_means(mean, sigma):
    counts = workloads.lengths(np.full(20_000, mean), sigma, rng())
    assert counts.mean() == pytest.approx(mean, rel=0.03)
    assert counts.min() >= 1
    assert kolmogorov(counts, lognormal_cdf(mean, sigma)) < 0.02


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_sessions_begin_at_the_rate_and_with_the_burstiness_asked_for(cv):
    starts = workloads.session_starts(replace(MANY, cv=cv, hours=2.0), rng())
    gaps = np.diff(starts)
    assert starts[0] == 0
    assert gaps.mean() == pytest.approx(2 * 3600 / 20_000, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08, abs=1e-9)
    if cv == 1:
        assert kolmogorov(gaps, lambda gap: 1 - math.exp(-gap / 0.36)) < 0.02


def test_first_exchanges_and_later_turns_have_their_means():
    records = generate(ShareGPTLike(sessions=1500, system_prompts=0))
    first = [r for r in records if r.id.endswith("-0")]
    assert np.mean([r.input_tokens for r in first]) == pytest.approx(161, rel=0.1)
    assert np.mean([r.output_tokens for r in first]) == pytest.approx(338, rel=0.1)
    added = [
        after.input_tokens - before.input_tokens - before.output_tokens
        for turns in sessions(records)
        for before, after in pairwise(turns)
    ]
    assert np.mean(added) == pytest.approx(95, rel=0.1)


def test_system_prompts_follow_zipf():
    settings = ShareGPTLike(sessions=4000, system_prompts=10, turns_mean=1, zipf=1.0)
    first_blocks = [record.hashes[0] for record in generate(settings) if record.hashes]
    counts = sorted((first_blocks.count(key) for key in set(first_blocks)), reverse=True)[:10]
    harmonic = sum(1 / n for n in range(1, 11))
    assert [count / len(first_blocks) for count in counts] == pytest.approx(
        [1 / n / harmonic for n in range(1, 11)], rel=0.25
    )


def test_a_session_resends_its_history_and_thinks_after_the_answer():
    settings = ShareGPTLike(sessions=50)
    for turns in sessions(generate(settings)):
        for before, after in pairwise(turns):
            assert after.hashes[: len(before.hashes)] == before.hashes
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.arrival > before.arrival + before.output_tokens / settings.tokens_per_second


def test_a_turn_reads_what_the_turn_before_it_wrote():
    for turns in sessions(generate(ShareGPTLike(sessions=50))):
        for before, after in pairwise(turns):
            if before.marks:
                assert before.marks[-1].position == before.input_tokens
                assert before.marks[-1].key in [read.key for read in after.reads]


def test_marks_respect_the_configuration():
    config = load(flags=["prefix_cache.min_tokens=300", "prefix_cache.lookback=0"], environ={})
    for record in generate(ShareGPTLike(sessions=50), config=config):
        assert all(mark.position >= 300 for mark in record.marks)
        assert [read.position for read in record.reads] == [mark.position for mark in reversed(record.marks)]
        assert [mark.ttl for mark in record.marks] in (["1h", "5m"], ["5m"], [])


def test_the_same_seed_gives_the_same_records_and_another_does_not():
    settings = ShareGPTLike(sessions=20)
    assert generate(settings) == generate(settings)
    assert generate(settings) != generate(settings, seed=4)


def test_concerns_draw_from_streams_of_their_own():
    settings = ShareGPTLike(sessions=30)
    base = {record.id: record for record in generate(settings)}
    patient = {record.id: record for record in generate(replace(settings, think_scale=2, cv=3))}
    assert base.keys() == patient.keys()
    assert all(base[name].hashes == patient[name].hashes for name in base)
    chatty = {record.id: record for record in generate(replace(settings, turns_mean=5))}
    assert [base[f"{n:06d}-0"].arrival for n in range(30)] == [chatty[f"{n:06d}-0"].arrival for n in range(30)]


def test_scales_make_small_demos():
    base, small = (generate(ShareGPTLike(sessions=100, length_scale=scale, think_scale=scale)) for scale in (1.0, 0.1))
    assert len(small) == len(base)
    assert sum(r.input_tokens for r in small) == pytest.approx(0.1 * sum(r.input_tokens for r in base), rel=0.05)
    assert small[-1].arrival < base[-1].arrival


def test_a_workload_is_a_log(tmp_path):
    records = generate(ShareGPTLike(sessions=10))
    assert workloads.write(records, tmp_path / "log") == len(records)
    assert list(access_log.read(tmp_path / "log", strict=True).requests) == records


def test_no_sessions_and_no_system_prompts():
    assert generate(ShareGPTLike(sessions=0)) == []
    assert all(len(record.marks) <= 1 for record in generate(ShareGPTLike(sessions=5, system_prompts=0)))


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": -1},
        {"cv": -1.0},
        {"turns_mean": 0.5},
        {"length_scale": 0.0},
        {"think_p10": 200.0},
        {"hours": math.nan},
    ],
)
def test_settings_that_describe_no_workload_are_refused(change):
    with pytest.raises(WorkloadError, match=next(iter(change)).split("_")[0]):
        ShareGPTLike(**change)


def test_ttls_that_the_service_does_not_know_are_refused():
    with pytest.raises(WorkloadError, match="'2h' is not one of"):
        generate(ShareGPTLike(sessions=1, history_ttl="2h"))
    with pytest.raises(WorkloadError, match="must not come after"):
        generate(ShareGPTLike(sessions=1, system_ttl="5m", history_ttl="1h"))
