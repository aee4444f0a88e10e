import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.unit.simulator.published import published
from warmkv.config import load
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator import traces
from warmkv.simulator.studies import cachesim
from warmkv.simulator.traces import mooncake
from warmkv.simulator.traces.warmkv import trace_of
from warmkv.simulator.workload import access_log, generator
from warmkv.simulator.workload.sessions import PRESETS, Workload, WorkloadError

CONFIG = load(environ={})
MANY = Workload(sessions=20_000)


def rng():
    return np.random.default_rng(7)


def generate(settings, seed=3, config=CONFIG):
    return generator.generate(settings, np.random.SeedSequence(seed), config)


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
    turns = generator.session_turns(MANY, rng())
    assert turns.min() == 1
    assert turns.mean() == pytest.approx(3.5, rel=0.02)
    assert np.percentile(turns, [50, 90]).tolist() == [3, 7]
    assert np.percentile(turns, 99) == pytest.approx(13, abs=1)


def test_think_times_have_the_published_percentiles():
    times = generator.think_times(MANY, 100_000, rng())
    assert np.percentile(times, [10, 50, 90]) == pytest.approx([17, 124, 2331], rel=0.04)


@pytest.mark.parametrize(("mean", "sigma"), [(161.0, 1.1), (338.0, 0.8), (95.0, 1.1)])
def test_lengths_are_lognormal_with_these_means(mean, sigma):
    counts = generator.lengths(np.full(20_000, mean), sigma, rng())
    assert counts.mean() == pytest.approx(mean, rel=0.03)
    assert counts.min() >= 1
    assert kolmogorov(counts, lognormal_cdf(mean, sigma)) < 0.02


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_sessions_begin_at_the_rate_and_with_the_burstiness_asked_for(cv):
    starts = generator.session_starts(replace(MANY, cv=cv, hours=2.0), rng())
    gaps = np.diff(starts)
    assert starts[0] == 0
    assert gaps.mean() == pytest.approx(2 * 3600 / 20_000, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08, abs=1e-9)
    if cv == 1:
        assert kolmogorov(gaps, lambda gap: 1 - math.exp(-gap / 0.36)) < 0.02


def test_first_exchanges_and_later_turns_have_their_means():
    records = generate(Workload(sessions=1500, system_prompts=0))
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
    settings = Workload(sessions=4000, system_prompts=10, turns_mean=1, zipf=1.0)
    first_blocks = [record.hashes[0] for record in generate(settings) if record.hashes]
    counts = sorted((first_blocks.count(key) for key in set(first_blocks)), reverse=True)[:10]
    harmonic = sum(1 / n for n in range(1, 11))
    assert [count / len(first_blocks) for count in counts] == pytest.approx(
        [1 / n / harmonic for n in range(1, 11)], rel=0.25
    )


def test_a_session_resends_its_history_and_thinks_after_the_answer():
    settings = Workload(sessions=50)
    for turns in sessions(generate(settings)):
        for before, after in pairwise(turns):
            assert after.hashes[: len(before.hashes)] == before.hashes
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.arrival > before.arrival + before.output_tokens / settings.tokens_per_second


def test_a_turn_reads_what_the_turn_before_it_wrote():
    for turns in sessions(generate(Workload(sessions=50))):
        for before, after in pairwise(turns):
            if before.marks:
                assert before.marks[-1].position == before.input_tokens
                assert before.marks[-1].key in [read.key for read in after.reads]


def test_marks_respect_the_configuration():
    config = load(flags=["prefix_cache.min_tokens=300"], environ={})
    for record in generate(Workload(sessions=50), config=config):
        assert all(mark.position >= 300 for mark in record.marks)
        assert {mark.position for mark in record.marks} <= {read.position for read in record.reads}
        assert [mark.ttl for mark in record.marks] in (["1h", "5m"], ["5m"], [])


def test_turns_think_times_and_bursty_gaps_have_their_distributions():
    shape, more = MANY.turns_shape, MANY.turns_mean - 1
    p = shape / (shape + more)
    terms = [
        math.exp(math.lgamma(n + shape) - math.lgamma(shape) - math.lgamma(n + 1)) * p**shape * (1 - p) ** n
        for n in range(200)
    ]
    below = np.cumsum(terms)
    turns = generator.session_turns(MANY, rng())
    counts = np.bincount(turns, minlength=200)[1:200]
    assert np.abs(np.cumsum(counts) / len(turns) - below[: len(counts)]).max() < 0.01

    def think_cdf(value):
        z = math.log(value / MANY.think_p50) / math.log(
            MANY.think_p50 / MANY.think_p10 if value < MANY.think_p50 else MANY.think_p90 / MANY.think_p50
        )
        return 0.5 * (1 + math.erf(z * generator.Z90 / math.sqrt(2)))

    assert kolmogorov(generator.think_times(MANY, 20_000, rng()), think_cdf) < 0.01

    def erlang_cdf(gap):  # a CV of 0.5 is a shape of 4
        x = 4 * gap / 0.18
        return 1 - math.exp(-x) * sum(x**n / math.factorial(n) for n in range(4))

    gaps = np.diff(generator.session_starts(replace(MANY, cv=0.5), rng()))
    assert kolmogorov(gaps, erlang_cdf) < 0.02


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_counts_in_windows_have_the_fano_factor_of_the_cv(cv):
    """Of a renewal process the variance of counts over their mean tends to CV squared."""
    starts = generator.session_starts(replace(MANY, sessions=100_000, cv=cv, hours=10.0), rng())
    counts = np.histogram(starts, bins=np.arange(0, starts[-1], 60.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(cv**2, rel=0.15)


@pytest.mark.parametrize("swing", [0.3, 1.0])
def test_the_rate_swings_over_the_day(swing):
    starts = generator.session_starts(replace(MANY, sessions=200_000, hours=48.0, swing=swing, peak_hour=9.0), rng())
    hours = np.histogram(starts[starts < 48 * 3600] / 3600 % 24, bins=np.arange(25))[0]
    middle = np.arange(24) + 0.5
    expected = 200_000 / 24 * (1 + swing * np.cos(2 * np.pi * (middle - 9) / 24))
    assert hours == pytest.approx(expected, rel=0.05, abs=150)


def test_an_unlimited_cache_finds_exactly_what_is_resent():
    """Without anything shared, a prompt begins with the full blocks of the one before it, and with nothing else."""
    records = generate(Workload(sessions=200, system_prompts=0))
    resent = sum(len(before.hashes) for turns in sessions(records) for before in turns[:-1])
    found = cachesim.lru(trace_of(records)).hits(math.inf)
    assert found.blocks == resent
    assert found.tokens == resent * CONFIG.prefix_cache.block_size
    shared = cachesim.lru(trace_of(generate(Workload(sessions=200, system_prompts=3)))).hits(math.inf)
    assert shared.token_rate > found.token_rate


def test_sessions_share_tools_then_system_prompt_then_document():
    settings = Workload(sessions=300, turns_mean=1, tool_sets=2, system_prompts=2, documents=3, system_tokens=640)
    records = generate(settings)
    heads = {record.hashes[0] for record in records}
    assert len(heads) == 2  # tools come first
    assert {len(record.marks) for record in records} == {3}
    first_marks = {record.marks[0].key for record in records}
    documents = {record.marks[1].key for record in records}
    assert 2 < len(first_marks) <= 4
    assert len(first_marks) < len(documents) <= 12
    assert all(record.marks[0].position < record.marks[1].position < record.input_tokens for record in records)


def test_passages_stand_before_each_question_and_stay_in_the_history():
    bare = generate(Workload(sessions=40, system_prompts=0))
    found = generate(Workload(sessions=40, system_prompts=0, passages=3, passage_pool=7, passage_tokens=50.0))
    for plain, rich in zip(sessions(bare), sessions(found), strict=True):
        added = [more.input_tokens - less.input_tokens for less, more in zip(plain, rich, strict=True)]
        assert all(after > before for before, after in pairwise([0, *added]))
        assert added[-1] == pytest.approx(150 * len(added), rel=0.6)
        for before, after in pairwise(rich):
            assert after.hashes[: len(before.hashes)] == before.hashes


def test_what_is_shared_leaves_the_other_concerns_as_they_were():
    base, rich = (
        generate(Workload(sessions=30, **more)) for more in ({}, {"tool_sets": 2, "documents": 2, "passages": 1})
    )
    assert [r.output_tokens for r in base] == [r.output_tokens for r in rich]
    assert [r.arrival for r in base] == [r.arrival for r in rich]


def test_every_preset_makes_a_log_that_can_be_replayed():
    for name, preset in PRESETS.items():
        records = generate(replace(preset, sessions=4, length_scale=0.2))
        assert trace_of(records).block_size == 64, name
        assert [r.arrival for r in records] == sorted(r.arrival for r in records)
        for record in records:
            assert RequestRecord.from_json(record.to_json()) == record


def test_the_agentic_preset_is_like_the_published_sessions():
    """Kolmogorov distances; with 60 sessions chance alone gives up to 0.18 for turns, 0.03 for requests."""
    trace = traces.read(published("agentic_coding_60_sessions.jsonl.gz"))
    made = replace(PRESETS["agentic"], sessions=400)
    turns = generator.session_turns(made, rng())
    answers = generator.lengths(np.full(20_000, made.answer), made.answer_sigma, rng())
    thoughts = generator.think_times(made, 20_000, rng())

    def distance(ours, theirs):
        places = np.concatenate([ours, theirs])
        below = [np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (ours, theirs)]
        return np.abs(below[0] - below[1]).max()

    assert distance(turns, np.bincount(trace.session)) < 0.15
    assert distance(answers, trace.output_tokens) < 0.15
    assert distance(thoughts, trace.think[trace.think > 0]) < 0.15


def test_a_mix_has_the_sessions_of_all_its_parts():
    parts = {"chat": Workload(sessions=5), "rag": replace(PRESETS["rag"], sessions=7)}
    records = generator.mix(parts, np.random.SeedSequence(3), CONFIG)
    names = {record.id.rsplit("-", 1)[0] for record in records}
    assert sum(name.startswith("chat-") for name in names) == 5
    assert sum(name.startswith("rag-") for name in names) == 7
    assert [r.arrival for r in records] == sorted(r.arrival for r in records)
    more = generator.mix({**parts, "rag": replace(parts["rag"], cv=3)}, np.random.SeedSequence(3), CONFIG)
    assert [r for r in more if r.id.startswith("chat")] == [r for r in records if r.id.startswith("chat")]


def test_a_workload_is_a_mooncake_trace(tmp_path):
    ours = trace_of(generate(Workload(sessions=20)))
    assert mooncake.write(ours, tmp_path / "trace") == len(ours)
    theirs = traces.read(tmp_path / "trace", strict=True, reading=traces.Reading(block_size=64))
    assert theirs.format == "mooncake"
    assert theirs.arrival == pytest.approx(ours.arrival, abs=1e-6)
    assert np.array_equal(theirs.input_tokens, ours.input_tokens)
    assert np.array_equal(theirs.offsets, ours.offsets)
    assert theirs.blocks[0] == 0
    for capacity in (1e3, 1e4, 1e5):
        assert cachesim.lru(theirs).hits(capacity) == cachesim.lru(ours).hits(capacity)


def test_the_same_seed_gives_the_same_records_and_another_does_not():
    settings = Workload(sessions=20)
    assert generate(settings) == generate(settings)
    assert generate(settings) != generate(settings, seed=4)


def test_concerns_draw_from_streams_of_their_own():
    settings = Workload(sessions=30)
    base = {record.id: record for record in generate(settings)}
    patient = {record.id: record for record in generate(replace(settings, think_scale=2, cv=3))}
    assert base.keys() == patient.keys()
    assert all(base[name].hashes == patient[name].hashes for name in base)
    chatty = {record.id: record for record in generate(replace(settings, turns_mean=5))}
    assert [base[f"{n:06d}-0"].arrival for n in range(30)] == [chatty[f"{n:06d}-0"].arrival for n in range(30)]


def test_scales_make_small_demos():
    base, small = (generate(Workload(sessions=100, length_scale=scale, think_scale=scale)) for scale in (1.0, 0.1))
    assert len(small) == len(base)
    assert sum(r.input_tokens for r in small) == pytest.approx(0.1 * sum(r.input_tokens for r in base), rel=0.05)
    assert small[-1].arrival < base[-1].arrival


def test_a_workload_is_a_log(tmp_path):
    records = generate(Workload(sessions=10))
    assert generator.write(records, tmp_path / "log") == len(records)
    assert list(access_log.read(tmp_path / "log", strict=True).requests) == records


def test_no_sessions_and_no_system_prompts():
    assert generate(Workload(sessions=0)) == []
    assert all(len(record.marks) <= 1 for record in generate(Workload(sessions=5, system_prompts=0)))


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": -1},
        {"cv": -1.0},
        {"turns_mean": 0.5},
        {"length_scale": 0.0},
        {"think_p10": 200.0},
        {"hours": math.nan},
        {"swing": 1.5},
        {"documents": -1},
        {"passage_pool": 0},
    ],
)
def test_settings_that_describe_no_workload_are_refused(change):
    with pytest.raises(WorkloadError, match=next(iter(change)).split("_")[0]):
        Workload(**change)


def test_ttls_that_the_service_does_not_know_are_refused():
    with pytest.raises(WorkloadError, match="'2h' is not one of"):
        generate(Workload(sessions=1, history_ttl="2h"))
    with pytest.raises(WorkloadError, match="must not come after"):
        generate(Workload(sessions=1, system_ttl="5m", history_ttl="1h"))
