"""Step times fitted to a log: those of the cluster that wrote it come out again."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from tests.unit.simulator.conversations import config, record, run, with_timings
from warmkv.config import load
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies.replays import log_fit
from warmkv.simulator.studies.replays.replay import recorded_policy, replay
from warmkv.simulator.studies.replays.step_times import choose_cost
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload import generator
from warmkv.simulator.workload.sessions import Workload

PREFILL, DECODE = StepCost(0.005, 1e-4, 5e-7), StepCost(0.003, 4e-4, 1e-6)
TRUE = UniformCosts(PhaseCosts(PREFILL, DECODE))


def busy_log(sessions, settings):
    shape = Workload(sessions=sessions, hours=1.0, think_scale=0.05, length_scale=2)
    return generator.generate(shape, np.random.SeedSequence(2), settings)


@pytest.mark.parametrize("policy", ["full", "streaming_llm@0.3"])
def test_a_linear_fit_finds_the_step_times_of_a_busy_log(policy):
    settings = load(flags=[f"compression.policy={policy}", "cluster.replicas=2"], environ={})
    jobs, _ = run(busy_log(150, settings), settings, cost=TRUE)
    fitted = log_fit.linear_fit(with_timings(jobs), settings, recorded_policy()).costs
    for cost, true in ((fitted.prefill, PREFILL), (fitted.decode, DECODE)):
        for tokens, context in ((1, 500), (4, 8000)) if true is DECODE else ((64, 500), (512, 3000)):
            assert cost.seconds(tokens, context) == pytest.approx(true.seconds(tokens, context), rel=0.15)


def test_a_replay_with_fitted_step_times_has_the_latencies_of_the_log():
    settings = load(flags=["cluster.replicas=2"], environ={})
    records = busy_log(50, settings)
    jobs, _ = run(records, settings, cost=TRUE)
    log = with_timings(jobs, outside=0.03)
    fitted = log_fit.fit(log, settings, recorded_policy())
    assert fitted.overhead == pytest.approx(0.03, rel=0.1)
    truth, again = (
        replay(records, settings, [Variant()], cost)[0] for cost in (UniformCosts(TRUE.costs, 0.03), fitted)
    )
    for figure in ("ttft", "tpot", "e2e"):
        assert astuple(getattr(again, figure)) == pytest.approx(astuple(getattr(truth, figure)), rel=0.05)


def test_requests_alone_are_fitted_exactly():
    settings = config()
    prompts = [record(100.0 * n, [n] * (9 + 7 * n), output=2 + 3 * n) for n in range(12)]
    jobs, _ = run(prompts, settings, cost=TRUE)
    fitted = log_fit.linear_fit(with_timings(jobs, 0.0, outside=0.02), settings, recorded_policy())
    assert astuple(fitted.costs.prefill) == pytest.approx(astuple(PREFILL), rel=1e-6)
    alone = replace(DECODE, a=DECODE.a + DECODE.b, b=0.0)  # a step and its one sequence cannot be told apart
    assert astuple(fitted.costs.decode) == pytest.approx(astuple(alone), rel=1e-6)
    assert fitted.overhead == pytest.approx(0.02)
    scaled = log_fit.fit(with_timings(jobs, 0.0, outside=0.02), settings, recorded_policy())
    assert scaled.overhead == pytest.approx(0.02, rel=0.02)
    assert scaled.costs.decode.a == pytest.approx(alone.a, rel=0.02)


def test_no_scale_is_simulated_twice_and_time_outside_never(monkeypatch):
    seen = []

    def counted(records, config, variant, times, **options):
        seen.append((times.costs.prefill, times.costs.decode, times.overhead))
        return replay_once(records, config, variant, times, **options)

    replay_once = log_fit.run
    monkeypatch.setattr(log_fit, "run", counted)
    settings = config()
    jobs, _ = run([record(n / 8, [n] * (9 + 7 * n), output=2 + 3 * n) for n in range(12)], settings, cost=TRUE)
    log_fit.fit(with_timings(jobs, outside=0.5), settings, recorded_policy())
    assert len(seen) == len(set(seen)) > 10
    assert {outside for _, _, outside in seen} == {0.0}


def test_times_of_an_api_behind_a_proxy_are_those_of_no_replica():
    settings = config()
    jobs, _ = run([record(10.0 * n, [n] * 30, output=4) for n in range(30)], settings, cost=TRUE)
    log = with_timings(jobs, outside=0.02)
    assert choose_cost(log, settings, recorded_policy())[1] == "fitted to 30 measured requests of the log"
    passed_through = [replace(one, replica="") for one in log]
    assert choose_cost(passed_through, settings, recorded_policy())[1] == "configuration (simulator.step_*)"
    with pytest.raises(log_fit.LogFitError, match="timings of a replica"):
        choose_cost(passed_through, settings, recorded_policy(), "log")


def test_a_log_without_timings_is_refused():
    with pytest.raises(ValueError, match="no record of the log carries timings"):
        log_fit.fit([record(0.0, [1] * 9)], config(), recorded_policy())


def test_what_was_written_before_the_log_begins_does_not_make_prefill_cheap():
    """Send thirty prompts twice; the log has the second half of the first time, and all of the second."""
    settings = config()
    prompts = [record(5.0 * n, [n % 30] * (9 + 7 * (n % 30)), output=2 + n % 5, name=str(n)) for n in range(60)]
    jobs, _ = run(prompts, settings, cost=TRUE)
    log = with_timings(jobs, outside=0.02)
    assert [job.reused > 0 for job in jobs] == [False] * 30 + [True] * 30
    fitted = log_fit.fit(log[15:], settings, recorded_policy())
    assert fitted.costs.prefill.seconds(64, 64) == pytest.approx(PREFILL.seconds(64, 64), rel=0.03)
    assert fitted.overhead == pytest.approx(0.02, rel=0.03)
    warm = log_fit.linear_fit(log[30:], settings, recorded_policy())
    assert log_fit.fit(log[30:], settings, recorded_policy()) == warm  # no request is as warm in a simulation


def test_requests_that_ran_beside_others_that_are_not_simulated_are_not_compared(monkeypatch):
    """Send thirty requests alone, then many at once, of which a part is simulated."""
    monkeypatch.setattr(log_fit, "MOST_SIMULATED", 60)
    settings = config()
    times = [100.0 * min(n, 30) for n in range(150)]
    prompts = [record(at, [n] * (9 + 7 * (n % 30)), output=2 + n % 5, name=str(n)) for n, at in enumerate(times)]
    jobs, _ = run(prompts, settings, cost=TRUE)
    fitted = log_fit.fit(with_timings(jobs, outside=0.02), settings, recorded_policy())
    truth, again = (
        replay(prompts[:30], settings, [Variant()], cost)[0] for cost in (UniformCosts(TRUE.costs, 0.02), fitted)
    )
    assert (again.ttft.p50, again.e2e.p90) == pytest.approx((truth.ttft.p50, truth.e2e.p90), rel=0.03)
