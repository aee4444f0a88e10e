"""Both ways to form batches in a cluster of replicas with prefixes, and the same engine by itself."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import BLOCK, EXACT, TWO_ROOFS, config, logs, record, run, uniform
from warmkv.policies import batching
from warmkv.policies.transfer import TransferTerms
from warmkv.simulator.cluster.mixed_limits import mixed_limits
from warmkv.simulator.engine.limits import BatchingError, Limits
from warmkv.simulator.latency.server import ServedRequest, Server
from warmkv.simulator.steps.costs import StepCost

# Sums of times, work and preemptions that a `Server` for calibrations gave when it had an engine of its own. Times of
# steps are sums of powers of two, so these are exact.
SERVER = (1219.1372528076172, 1264.82568359375, (644, 9182, 118827), 8)
MIXED = "simulator.batching=mixed"
FORMATIONS = pytest.mark.parametrize("flags", [(), (MIXED,)], ids=["shortest_first", "mixed"])
TIGHT = ("engine.kv_bytes=256", "engine.step_tokens=16", "prefix_cache.memory_bytes=200")  # 8 blocks of 16 tokens


def conversations(count=60, seed=1):
    """Requests of a few conversations, every one of which repeats all that was said before it."""
    chance, said, arrival, records = random.Random(seed), [[topic] * 9 for topic in range(4)], 0.0, []
    for number in range(count):
        topic = chance.randrange(4)
        said[topic] = [*said[topic], *[10 + number] * chance.randrange(1, 20)]
        arrival += chance.randrange(64) / 1024
        records.append(record(arrival, said[topic], chance.randrange(1, 30), name=f"r{number}"))
    return records


def outcomes(jobs):
    return [(job.replica, job.started, job.first, job.finished, job.reused) for job in jobs]


@FORMATIONS
def test_a_trace_is_replayed_in_a_cluster_of_two_with_prefixes(flags):
    records = conversations()
    jobs, outcome = run(records, config("cluster.replicas=2", *flags))
    assert {job.replica for job in jobs} == {"replica-0", "replica-1"}
    assert sum(job.reused for job in jobs) > 0.5 * sum(job.record.input_tokens for job in jobs)
    for job in jobs:
        assert job.arrival <= job.started < job.first <= job.finished <= outcome.end
    assert outcome.slots.value == 0
    assert outcomes(jobs) == outcomes(run(records, config("cluster.replicas=2", *flags), fast_forward=False)[0])
    one, _ = run(records, config(*flags))
    assert sum(job.finished for job in jobs) < sum(job.finished for job in one)


@given(
    logs(policies=["full"]),
    st.sampled_from([(), TIGHT, ("cluster.replicas=2", *TIGHT)]),
    st.booleans(),
    st.sampled_from(["simulator.batching=mixed", "engine.kind=vllm"]),
)
def test_fast_forward_equals_stepping(records, flags, roofs, kind):
    settings, cost = config(kind, *flags), uniform(TWO_ROOFS) if roofs else EXACT
    (fast, fast_outcome), (slow, slow_outcome) = (
        run(records, settings, cost=cost, fast_forward=forward) for forward in (True, False)
    )
    assert outcomes(fast) == outcomes(slow)
    assert (fast_outcome.slots.peak, fast_outcome.end) == (slow_outcome.slots.peak, slow_outcome.end)
    assert [job.num_preemptions for job in fast] == [job.num_preemptions for job in slow]
    for job in fast:
        room = 128 if kind == MIXED else 128 + 100 - BLOCK
        fits = job.record.input_tokens + max(1, job.record.output_tokens) - 1 <= room or TIGHT[0] not in flags
        assert bool(job.replica) == fits


def test_a_calibrated_server_is_the_replica_of_a_cluster_of_one():
    records = conversations()
    jobs, _ = run(records, config(MIXED, "prefix_cache.enabled=false", *TIGHT[:2]))
    served = [ServedRequest(r.arrival - records[0].arrival, r.input_tokens, r.output_tokens) for r in records]
    served = [one for one, job in zip(served, jobs, strict=True) if job.replica]
    Server(EXACT, Limits(4, 16, kv_tokens=128)).serve(served)
    found = [(job.started, job.first, job.finished, job.num_preemptions) for job in jobs if job.replica]
    expected = [(one.scheduled, one.first, one.finished, one.num_preemptions) for one in served]
    assert [times[1:] for times in found] == [times[1:] for times in expected]
    assert sum(one.num_preemptions for one in served) > 0
    # A request that was preempted before its first token counts as started when it began for good.
    assert all(ours >= theirs for (ours, *_), (theirs, *_) in zip(found, expected, strict=True))


def test_a_short_prompt_waits_for_a_long_one_only_first_come_first_served():
    records = [record(0.0, [1] * 64, 2, name="long"), record(0.125, [2] * 4, 2, name="short")]
    ours, vllm = (run(records, config(*flags), cost=StepCost(2**-4, 0.0, 0.0))[0] for flags in ((), (MIXED,)))
    assert ours[1].first < ours[0].first == vllm[1].first
    assert ours[0].first == vllm[0].first + 2**-4  # half a step later, for the short one


def test_what_replicas_did_once_is_what_they_do_now(caplog):
    settings = config("simulator.batching=prefill_first")
    assert settings.simulator.batching == "shortest_first"
    assert "prefill_first is shortest_first now" in caplog.text


def test_requests_of_a_replica_that_dies_go_on_elsewhere():
    records = conversations()
    flags = ("cluster.replicas=2", "simulator.failures=[{at: 0.5, replica: 0}]", *TIGHT[1:])
    jobs, _ = run(records, config(MIXED, *flags))
    assert all(job.replica for job in jobs)
    assert sum(job.retries + job.resumptions for job in jobs) > 0


def test_what_vllm_does_not_do_is_refused():
    with pytest.raises(BatchingError, match=r"keeps the whole cache.*request r has snapkv.*choose the policy full"):
        run([record(0.0, [1] * 40, 5, policy="snapkv@6", name="r")], config(MIXED))


VLLM = "engine.kind=vllm"


def test_replicas_batch_as_the_engine_of_their_kind_and_vllm_s_move_no_blocks(monkeypatch):
    monkeypatch.setattr(batching, "delay", lambda lacking, step_tokens: 0)  # the service's priorities for vLLM
    two = ("cluster.replicas=2", "prefix_cache.block_size=16", *TIGHT)
    more = "engine.kv_bytes=288"  # a block, which vLLM sets aside
    cold = [
        run(conversations(), config("prefix_cache.enabled=false", *two, *flags))[0]
        for flags in ((VLLM, more), (MIXED,))
    ]
    assert outcomes(cold[0]) == outcomes(cold[1])
    jobs, outcome = run(conversations(), config(VLLM, *two))
    assert sum(job.reused for job in jobs) > 0
    assert (outcome.moved.fetches, TransferTerms.of(config(VLLM)).handover_seconds) == (0, 0.0)
    assert TransferTerms.of(config()).handover_seconds > 0
    ours, as_ours = (
        run(conversations(), config("prefix_cache.enabled=false", *flags))[0]
        for flags in ((), (VLLM, "simulator.batching=shortest_first"))
    )
    assert outcomes(ours) == outcomes(as_ours)


@pytest.mark.parametrize(("length", "mark", "vllm", "ours"), [(11, 10, 8, 10), (12, 12, 8, 11), (13, 12, 12, 12)])
def test_vllm_finds_whole_blocks_and_computes_the_last_token_in_its_own(length, mark, vllm, ours):
    """What is billed is the same."""
    records = [record(at, range(length), ends=[mark], ttls=["5m"]) for at in (0.0, 9.0)]
    again = [run(records, config(*flags))[0][1] for flags in ((VLLM,), ())]
    assert [job.reused for job in again] == [vllm, ours]
    assert [job.hit for job in again] == [mark, mark]


def test_vllm_s_cache_is_taken_in_its_blocks_and_its_format():
    settings = [VLLM, "prefix_cache.enabled=false", "prefix_cache.block_size=32", "simulator.model.dtype_bytes=2"]
    in_fp8 = [*settings, "prefix_cache.storage=fp8", "compression.policy=full+fp8"]
    jobs, _ = run(conversations(4), config(*in_fp8))  # of a log that was recorded with another format
    assert all(job.replica for job in jobs)
    plain, fp8 = (mixed_limits(jobs, config(*flags), 4) for flags in (settings, in_fp8))
    assert (plain.kv_block, fp8.kv_block) == (32, 32)
    assert (plain.kv_tokens, fp8.kv_tokens) == ((1 << 30) // 4 - 32, (1 << 30) // 2 - 32)  # one is set aside
    pool = mixed_limits(jobs, config(VLLM), 4)  # of requests and prefixes, in blocks of the log's
    assert (pool.kv_block, pool.kv_tokens) == (BLOCK, ((1 << 30) + (512 << 20)) // 4 - BLOCK)


def test_a_server_gives_what_it_always_gave():
    served = [ServedRequest(r.arrival, min(64, r.input_tokens), r.output_tokens) for r in conversations(120)]
    Server(EXACT, Limits(8, 24, kv_tokens=256)).serve(served)
    sums = sum(one.first for one in served), sum(one.finished for one in served), served[-1].work_finished
    assert (*sums, sum(one.num_preemptions for one in served)) == SERVER
