"""Jobs that are made when they arrive, and what is left of them."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, logs, record, run
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cluster.jobs import FIELDS
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

MOST_KEPT = 500
"""Bytes that a replay keeps of a request that is over and of its prompt's runs, beside its record."""

FAILING = "simulator.failures=[{at: 0.5, replica: 0}]"


@given(logs(), st.sampled_from([(), ("engine.kv_bytes=160",), (FAILING, "cluster.replicas=2")]))
def test_what_is_kept_is_what_became_of_the_job(records, flags):
    jobs, _ = run(records, config(*flags))
    assert len(jobs.outcomes) == len(records)
    for job, row in zip(jobs, jobs.outcomes, strict=True):
        assert row["is_over"]
        assert jobs.replicas[row["replica"]] == job.replica
        assert (row["hit"], row["blocks"]) == (job.match.hit, job.match.blocks)
        for name in FIELDS.keys() - {"is_over", "replica", "hit", "blocks"}:
            assert row[name] == getattr(job, name)
        if job.replica:
            assert job.arrival <= job.started < job.first <= job.finished


def test_jobs_that_have_not_arrived_have_no_outcome():
    jobs, _ = prepare([record(1.7e9 + at, [1] * 8, 3, name=str(at)) for at in range(3)], config(), Variant())
    assert [job.number for job in jobs] == [0, 1, 2]
    assert [(job.arrival, job.replica) for job in jobs] == [(0.0, ""), (1.0, ""), (2.0, "")]
    assert not jobs.outcomes["is_over"].any()
    assert jobs[-1].record.id == "2"


def test_a_replay_keeps_little_of_a_request_that_is_over():
    """Compare replays of few and of many requests, after one that has loaded what they need."""
    held = []
    for count in (20, 500, 1500):
        records = columns_of([record(8.0 * at, [at] * 12, 3, name=str(at)) for at in range(count)])
        tracemalloc.start()
        _, outcome = done = run(records, config("prefix_cache.memory_bytes=96"))
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert outcome.removals.evicted
        del done
    assert (held[2] - held[1]) / 1000 < MOST_KEPT
