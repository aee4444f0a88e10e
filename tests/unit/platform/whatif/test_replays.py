"""A round of replays: the settings that are known to be best come first, and the model's error is that of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.platform.whatif.traffic import CYCLES, GAP, OFFSET, evaluated, logged, prompts, settings
from tests.unit.simulator.conversations import run
from warmkv.config import Config, ConfigError, load
from warmkv.platform.whatif.candidates import BEST, NOW, WhatIfCandidate, check, proposals
from warmkv.platform.whatif.replays import Basis, Default, Replayed, Round, named_no_policy, replays
from warmkv.platform.whatif.warm_start import Start
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cluster.memory import pool_bytes
from warmkv.simulator.studies.replays.whatif import Prediction, measure, ranked, warm_up

ALWAYS_FULL = [Default.of(0.0, settings())]
TTL = {"prefix_cache.ttls": {"5m": 600.0, "1h": 3600.0}}


def replayed(
    log: Sequence[RequestRecord],
    now: Config,
    candidates: Sequence[WhatIfCandidate] | None = None,
    *,
    defaults: Sequence[Default] = ALWAYS_FULL,
    changed: float = 0.0,
    **more: Any,
) -> tuple[Basis, dict[str, Replayed]]:
    """What a round yields: its basis, and the results by name."""
    tried = proposals(now) if candidates is None else candidates
    basis, *results = replays(Round(Start(log), now, defaults, changed, tried, **more))
    assert isinstance(basis, Basis)
    return basis, {one.candidate.name: one for one in results if isinstance(one, Replayed)}


def order(results: dict[str, Replayed]) -> list[str]:
    return ranked({name: one.prediction for name, one in results.items() if one.prediction}, NOW)


def figure(results: dict[str, Replayed], name: str, of: str) -> float:
    prediction = results[name].prediction
    assert prediction is not None
    value = prediction.figures[of]
    assert value is not None
    return value


def test_the_ttl_that_is_known_to_be_best_is_first_and_comes_true():
    before = settings()
    log = logged(prompts(), before)
    _, results = replayed(log, before)
    assert order(results)[0] == "ttl-double"  # an hour finds as much, and keeps more
    assert figure(results, "ttl-1h", "hit_rate") == figure(results, "ttl-double", "hit_rate") > 0.4
    assert figure(results, NOW, "hit_rate") == 0
    after = settings("prefix_cache.ttls={5m: 600, 1h: 3600}")
    live = measure(logged(prompts(), after)[160:], after)
    for name in ("hit_rate", "ttft_p50", "ttft_p99"):
        assert figure(results, "ttl-double", name) == pytest.approx(live[name], rel=0.1)
    _, outcome = run(prompts(), after)
    assert figure(results, "ttl-double", "resident_bytes_end") == pytest.approx(outcome.stored.value, rel=0.1)


def test_requests_whose_ttl_is_no_more_are_left_out():
    before = settings("prefix_cache.ttls={5m: 300, 1h: 3600}")
    log = logged(prompts(), before)
    old = [replace(one, marks=(Mark(one.block_size, "1h", one.hashes[0]),)) for one in log[:40]]
    now = settings("prefix_cache.ttls={5m: 300}")
    basis, results = replayed([*old, *log[40:]], now, [])
    assert basis.requests == len(log) - 40
    assert basis.notes == ("40 requests name TTLs that are no more, and are left out",)
    assert figure(results, NOW, "hit_rate") >= 0


def test_the_budget_that_is_known_to_be_best_is_first_where_quality_was_measured(tmp_path):
    file = evaluated(tmp_path)
    now = settings("prefix_cache.enabled=false")
    log = logged(prompts()[:120], now)
    given = load(flags=[f"control.whatif={{quality: {file}}}"], environ={}).control.whatif
    assert given is not None
    _, results = replayed(log, now, quality=given.quality)
    assert order(results)[0] == "snapkv-0.5"
    assert figure(results, "snapkv-0.2", "quality") == pytest.approx(0.6, abs=0.01)
    assert figure(results, "snapkv-0.5", "slot_bytes") < figure(results, NOW, "slot_bytes")
    basis, unknown = replayed(log, now, quality=tmp_path / "nothing.parquet")
    assert order(unknown)[0] == NOW  # what nobody has measured is no advice
    assert "quality is unknown" in basis.notes[0]


def test_the_error_of_the_settings_in_force_is_small_and_grows_with_what_the_model_does_not_know():
    now = settings()
    log = logged(prompts(), now)
    held = 3840  # bytes at the end: 300 s of prompts
    basis, results = replayed(log, now, [], stored_bytes=held)
    assert (basis.requests, basis.warm_up, basis.step_times) == (320, 160, "fitted to 320 measured requests of the log")
    error = results[NOW].error
    assert error is not None
    assert results[NOW].judged == 160
    assert {name: value for name, value in error.items() if value and abs(value) > 0.01} == {}
    surprised = [replace(line, cached_tokens=60) for line in log]
    error = replayed(surprised, now, [], stored_bytes=2 * held)[1][NOW].error
    assert error is not None
    assert error["hit_rate"] == pytest.approx(-60 / 64)
    assert error["resident_bytes_end"] == pytest.approx(-0.5)


def test_only_requests_since_the_last_change_judge_the_model():
    now = settings()
    log = logged(prompts(), now)
    late = replayed(log, now, [], changed=log[200].arrival)[1][NOW]
    assert late.judged == 120
    assert late.error is not None
    few = replayed(log, now, [], changed=log[310].arrival)[1][NOW]
    assert (few.judged, few.error) == (10, None)
    assert few.measured is not None


def test_the_model_is_judged_by_the_ttls_that_were_in_force_meanwhile():
    """Let what was written before a longer TTL came into force expire as it was said then."""
    before, now = settings(), settings("prefix_cache.ttls={5m: 3600, 1h: 3600}")
    at = GAP * CYCLES / 2 + 200  # seconds since the first request
    log = logged(prompts(), before, later=[(at, Lifetimes.of(now.prefix_cache))])
    changed = OFFSET + at
    judged = dict[str, float | None]()
    for name, defaults in (
        ("told", [Default.of(0.0, before), Default.of(changed, now)]),
        ("not told", [Default.of(0.0, now)]),
    ):
        error = replayed(log, now, [], defaults=defaults, changed=changed)[1][NOW].error
        assert error is not None
        judged[name] = error["hit_rate"]
    assert judged["told"] == pytest.approx(0, abs=0.001)
    assert judged["not told"] == pytest.approx(0.14, abs=0.01)


def test_caches_are_filled_by_the_first_requests_and_these_are_not_counted():
    now = settings("prefix_cache.ttls={5m: 600, 1h: 3600}")
    log = logged(prompts(), now)
    counted = replayed(log, now, [])[1]
    # As long as the service has run already: from an empty cache the first use of each prompt would be a miss.
    assert figure(counted, NOW, "hit_rate") == pytest.approx(0.5, abs=0.01)
    assert warm_up(log, 100.0) == sum(line.arrival < OFFSET + 100 for line in log)
    assert warm_up(log, 1e9) == len(log) // 2
    assert warm_up([], 100.0) == 0


def test_requests_that_named_a_policy_keep_it():
    log = [replace(line, policy="snapkv@0.5" if n % 2 else "full") for n, line in enumerate(prompts()[:60])]
    assert named_no_policy(log, ALWAYS_FULL) == [n % 2 == 0 for n in range(60)]
    switched = [*ALWAYS_FULL, Default.of(log[31].arrival, settings("compression.policy=snapkv@0.5"))]
    assert named_no_policy(log, switched) == [(n % 2 == 0) if n < 31 else (n % 2 == 1) for n in range(60)]
    now = settings("prefix_cache.enabled=false")
    served = logged(log, now)
    policy = [WhatIfCandidate("1", {"compression.policy": "streaming_llm@0.2"})]
    all_free = figure(replayed(logged(prompts()[:60], now), now, policy)[1], "1", "slot_bytes")
    half_free = figure(replayed(served, now, policy)[1], "1", "slot_bytes")
    assert all_free < half_free < figure(replayed(served, now, policy)[1], NOW, "slot_bytes")


def test_what_cannot_be_replayed_is_a_fault_of_its_candidate_alone():
    now = settings()
    log = logged(prompts()[:60], now)
    wrong, right = WhatIfCandidate("1", {"prefix_cache.default_ttl": "2m"}), WhatIfCandidate("2", TTL)
    _, results = replayed(log, now, [wrong, right])
    assert "default_ttl" in results["1"].fault
    assert results["1"].prediction is None
    assert results["2"].prediction is not None


def test_a_service_of_two_kinds_is_predicted_as_a_whole():
    now = settings("cluster.groups={vllm: {engine: {kind: vllm}}}")
    log = logged(prompts()[:160], now)
    assert len({record.replica for record in log}) == 2
    fewer = WhatIfCandidate("fewer", {"compression.policy": "snapkv@0.5"})
    _, results = replayed(log, now, [fewer])
    error = results[NOW].error
    assert error is not None
    assert error["hit_rate"] == 0
    assert results["fewer"].fault == ""
    assert figure(results, "fewer", "slot_bytes") < figure(results, NOW, "slot_bytes")


def test_prefixes_kept_warm_over_vllm_are_judged():
    now = settings("engine.kind=vllm")
    kept = {"prefix_cache.keep_warm": pool_bytes(now) // 2}
    too_many = {"prefix_cache.keep_warm": pool_bytes(now) // 2 + 1}
    for changes in (kept, too_many):
        check(now, changes)
    tried = [WhatIfCandidate("kept", kept), WhatIfCandidate("too-many", too_many)]
    _, results = replayed(logged(prompts(), now), now, tried)
    assert results["kept"].prediction is not None
    assert "half of vLLM's cache" in results["too-many"].fault
    with pytest.raises(ConfigError, match="keep_warm cannot be had from an engine of kind warmkv"):
        check(settings(), kept)


def test_the_search_combines_what_is_better_alone():
    now = settings("compression.policy=streaming_llm@0.8")
    log = logged([replace(line, policy="streaming_llm@0.8") for line in prompts()], now)
    price = WhatIfCandidate("1", {"pricing.output": 5.0})
    _, results = replayed(log, now, [WhatIfCandidate("2", TTL), price], defaults=[Default.of(0.0, now)])
    assert order(results)[0] == BEST
    assert results[BEST].candidate.changes == {**TTL, "pricing.output": 5.0}


def prediction(policy: str = "full", **figures: float | None) -> Prediction:
    usual = {"in_slo": 1.0, "dollars_per_million_tokens": 2.0, "bytes": 100.0, "ttft_p99": 1.0, "quality": None}
    return Prediction(policy, {**usual, "gpu_dollars_per_million_tokens": 1.0, **figures}, 100)


def test_the_order_is_quality_then_slo_then_dollars_then_bytes_then_ttft():
    now = prediction()
    others = {
        "lossy": prediction("snapkv@0.5", dollars_per_million_tokens=0.1),
        "late": prediction(in_slo=0.5, dollars_per_million_tokens=0.5),
        "cheap": prediction(dollars_per_million_tokens=1.5, bytes=500.0),
        "small": prediction(dollars_per_million_tokens=2.01, bytes=50.0),  # dollars within 1% are alike
        "fast": prediction(bytes=102.0, ttft_p99=0.5),  # bytes within 5% are
        "alike": prediction(),
        "dear": prediction(gpu_dollars_per_million_tokens=2.0, dollars_per_million_tokens=0.1),
    }
    found = ranked({**others, NOW: now}, NOW)
    assert found == ["cheap", "small", "fast", NOW, "alike", "dear", "late", "lossy"]
