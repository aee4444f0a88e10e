"""Jobs are objects while they run; before and after they are rows of columns."""

import gc
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, record
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.cluster.jobs import AT_ONCE
from warmkv.simulator.cluster.replica import Job
from warmkv.simulator.studies.replays.replay import kv_shape, prepare
from warmkv.simulator.studies.replays.variants import Variant

ASKED = (
    "number", "tenant", "block_size", "allowed", "marks", "prompt", "output", "kind", "kept", "capacity", "recomputed",
    "slot_bytes", "workspace_bytes", "sum_bytes", "endless", "marked", "shares", "groups",
)  # fmt: skip
TIMES = ("arrival", "submitted", "started", "first", "finished")
COUNTS = ("gateway", "hit", "blocks_found", "reused", "written", "read", "retries", "resumptions", "num_preemptions")
told = attrgetter(*ASKED, *TIMES, *COUNTS, "replica", "failed")


@given(logs(("full", "snapkv@6")), st.data())
def test_what_became_of_a_job_is_kept(records, data):
    jobs, _ = prepare(records, config(), Variant())
    ended = list(jobs.arriving())
    for job in data.draw(st.permutations(ended)):
        for name in TIMES:
            setattr(job, name, data.draw(st.floats(0, 1e6)))
        for name in COUNTS:
            setattr(job, name, data.draw(st.integers(0, 2**31 - 1)))
        job.replica, job.failed = data.draw(st.sampled_from(["", "a", "b"])), data.draw(st.booleans())
        jobs.keep(job)
    assert list(map(told, jobs)) == list(map(told, ended))
    assert told(jobs[-1]) == told(ended[-1])
    assert list(map(told, jobs[1::2])) == list(map(told, ended[1::2]))
    assert jobs.served(1).tolist() == [job.number for job in ended[1:] if job.replica]
    with pytest.raises(IndexError):
        jobs[len(records)]


def test_few_jobs_are_objects_at_a_time():
    def objects(arrived=0):
        alive.append(sum(type(each) is Job for each in gc.get_objects()))

    alive, count, settings = [], 4 * AT_ONCE, config()
    objects()
    jobs, lifetimes = prepare([record(10.0 * at, [at] * 8, 1) for at in range(count)], settings, Variant())
    simulate(jobs, settings, lifetimes, kv_shape(settings).token_bytes, EXACT, progress=objects)
    assert len(jobs.served()) == count
    assert max(alive) - alive[0] < 2 * AT_ONCE
