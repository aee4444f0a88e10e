"""Sizing against trying everything, and what is shown beside the choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulator.conversations import record
from warmkv.config import Config, load
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape
from warmkv.policies.memory_plan import MemoryPlanError
from warmkv.simulator.reports import plan_page
from warmkv.simulator.studies.plans.sizing import (
    LEAST_QUALITY,
    SLOTS,
    STORED,
    UNMEASURED,
    Machine,
    Search,
    Sized,
    SizingError,
    choices,
    evaluator,
    limits_of,
    machine,
    policies_of,
)
from warmkv.simulator.studies.sweeps.sweep_quality import Curve
from warmkv.simulator.studies.sweeps.tune import TuneConstraint, TuneError
from warmkv.simulator.workload.source import Source, read

SHAPE = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=128256, dtype_bytes=2
)
LIMITS = (TuneConstraint("ttft_p99", "<", 1.0), TuneConstraint("refused", "<=", 0.0))
MACHINES = [Machine(Gpu.model_validate(name), {"simulator.gpu": name}) for name in ("H100-SXM", "L4")]


def configure(flags: Any) -> Config:
    return load(flags=["cluster.gpus_per_replica=1", *flags], environ={})


def service(**needed: float) -> Callable[[dict[str, Any]], dict[str, float | None]]:
    """Return a service whose TTFT is its load over its replicas; slots and a policy make it lighter."""

    def evaluate(settings: dict[str, Any]) -> dict[str, float | None]:
        gpu, replicas = settings["simulator.gpu"], settings["cluster.replicas"]
        load = needed[gpu.partition("-")[0]]
        load *= 0.7 if settings.get("engine.max_slots", 16) >= 64 else 1.0
        load *= 0.5 if settings.get("compression.policy", "full") != "full" else 1.0
        config = configure([f"simulator.gpu={gpu}", f"cluster.replicas={replicas}"])
        return {
            "ttft_p99": load / replicas,
            "refused": 0.0 if load < 2 * replicas else 7.0,
            "dollars_month": replicas * config.simulator.gpu.dollars * 730,
            "quality": 1.0 if "compression.policy" not in settings else None,
        }

    return evaluate


def size(
    choice: tuple[dict[str, Any], ...] = (), lower: tuple[str, ...] = (), most: int = 64, **needed: float
) -> Sized:
    search = Search(service(**needed), LIMITS, most)
    return search.run(MACHINES, lambda one: list(choice), list(lower))


@pytest.mark.parametrize("load", [0.5, 1.5, 2.5, 7.9, 8.1, 31.0, 62.5])
def test_the_fewest_replicas_are_found_in_few_replays(load: float) -> None:
    sized = size(H100=load, L4=1000.0)
    best = sized.best["H100-SXM"]
    assert best is not None
    assert best.replicas == next(n for n in range(1, 65) if load / n < 1), "as trying all of them finds"
    assert sum(trial.gpu == "H100-SXM" for trial in sized.trials) <= 13


def test_the_cheapest_gpu_is_chosen_whatever_its_number() -> None:
    sized = size(H100=2.5, L4=7.5)
    assert {gpu: trial and trial.replicas for gpu, trial in sized.best.items()} == {"H100-SXM": 3, "L4": 8}
    assert sized.chosen is sized.best["L4"], "8 x 0.80 an hour are less than 3 x 3.00"
    assert any("H100-SXM needs 3 replicas" in sentence for sentence in plan_page.why(sized))


def test_a_choice_is_taken_where_it_saves_a_replica() -> None:
    tries = ({"engine.max_slots": 32}, {"engine.max_slots": 64}, {"prefix_cache.memory_bytes": "1MiB"})
    sized = size(tries, H100=8.5, L4=1000.0)
    chosen = sized.chosen
    assert chosen is not None
    assert (chosen.replicas, chosen.choice) == (6, {"engine.max_slots": 64})
    assert sized.saved == {"H100-SXM": (({"engine.max_slots": 64}, 3),)}
    assert "With max_slots 64 it is 3 replicas less." in plan_page.why(sized)
    none = size(tries, H100=0.5, L4=1000.0)
    assert none.chosen is not None
    assert none.chosen.choice == {}, "there is nothing to save"


def test_a_choice_may_be_what_makes_it_possible() -> None:
    sized = size(({"engine.max_slots": 64},), most=8, H100=10.0, L4=1000.0)
    assert sized.chosen is not None
    assert (sized.chosen.replicas, sized.chosen.choice) == (8, {"engine.max_slots": 64})


def test_a_policy_of_unknown_quality_is_shown_and_never_chosen() -> None:
    sized = size(lower=(UNMEASURED,), H100=8.5, L4=1000.0)
    chosen, (lower,) = sized.chosen, sized.lower
    assert chosen is not None
    assert (chosen.replicas, chosen.choice) == (9, {})
    assert (lower.replicas, lower.choice) == (5, {"compression.policy": UNMEASURED})
    cheaper = sized.cheaper()
    assert cheaper[-1] is lower
    assert plan_page.misses(lower, LIMITS) == ["quality unknown"]
    assert cheaper[0].replicas == 8, "one fewer is the nearest"
    for one in cheaper[:-1]:
        assert not any(
            other.dollars <= one.dollars and other.excess < one.excess
            for other in sized.trials
            if not other.lowered and not other.met
        )


def test_nothing_that_meets_the_slo_is_said_with_the_nearest() -> None:
    sized = size(most=4, H100=8.0, L4=80.0)
    assert sized.chosen is None
    assert sized.cheaper() == []
    (sentence,) = plan_page.why(sized)
    assert "No deployment that was tried meets the SLO; the nearest, 4 x H100-SXM, has ttft_p99 2,000.0 ms" in sentence


def test_doubling_ends_where_it_does_not_help() -> None:
    constant = Search(lambda settings: {"ttft_p99": 3.0, "refused": 0.0, "dollars_month": 1.0}, LIMITS)
    assert constant.run(MACHINES[:1], lambda one: []).chosen is None
    assert [trial.replicas for trial in constant.trials.values()] == [1, 2]


@pytest.mark.parametrize("text", ["in_slo>0.95", "goodput>9.5"])
def test_doubling_goes_on_while_a_share_is_small_or_zero(text: str) -> None:
    """Find the replicas for a share of requests that overload keeps at 0, then lets grow by less than its limit."""

    def evaluate(settings: dict[str, Any]) -> dict[str, float | None]:
        replicas = settings["cluster.replicas"]
        share = 0.0 if replicas < 4 else min(1.0, 0.005 * replicas if replicas < 13 else 0.06 * replicas)
        return {"in_slo": share, "goodput": 10 * share, "e2e_p50": 60 / replicas, "dollars_month": replicas * 2190.0}

    limits = limits_of(text, configure([]), False)
    chosen = Search(evaluate, limits).run(MACHINES[:1], lambda one: []).chosen
    assert chosen is not None
    assert chosen.replicas == 16


def test_limits_that_grow_with_replicas_are_checked_on_what_the_others_need() -> None:
    def evaluate(settings: dict[str, Any]) -> dict[str, float | None]:
        replicas = settings["cluster.replicas"]
        ttft = (2.0 if settings.get("engine.max_slots") == 64 else 2.7) / replicas
        return {"ttft_p99": ttft, "refused": 0.0, "dollars_month": replicas * 2190.0, "gpu_dollars": replicas * 3.0}

    def chosen(text: str, *choice: dict[str, Any]) -> int | None:
        limits = limits_of(text, configure([]), False)
        found = Search(evaluate, limits).run(MACHINES[:1], lambda one: list(choice)).chosen
        return found and found.replicas

    assert chosen("ttft_p99<1,dollars_month<7000") == 3
    assert chosen("ttft_p99<1,gpu_dollars<=9") == 3
    assert chosen("ttft_p99<1.1,dollars_month<6000") is None
    assert chosen("ttft_p99<1.1,dollars_month<6000", {"engine.max_slots": 64}) == 2


def test_the_same_again_replays_the_same() -> None:
    first, second = (size(({"engine.max_slots": 64},), H100=8.5, L4=30.0) for _ in range(2))
    assert first == second


def test_a_gpu_that_is_too_small_is_not_tried() -> None:
    large = SHAPE.model_copy(update={"layers": 80, "hidden": 8192, "intermediate": 28672})
    refused = machine("L4", None, configure, large)
    assert "the model does not fit: a replica needs" in refused.refused
    assert machine("H100", None, configure, SHAPE).refused == ""
    sized = Search(service(), LIMITS).run([refused], lambda one: [])
    assert sized.trials == ()
    assert plan_page.why(sized) == [f"Nothing can be planned: L4: {refused.refused}."]


def test_what_does_not_fit_its_gpu_is_a_trial_with_the_reason() -> None:
    """Go on with other choices, and with other GPUs where nothing fits, as groups of replicas may not."""

    def evaluate(settings: dict[str, Any]) -> dict[str, float | None]:
        if settings["simulator.gpu"] == "L4" or settings.get("engine.max_slots") == 256:
            raise MemoryPlanError("the model does not fit: needed 3, given 2\n  weights 3")
        return service(H100=8.5)(settings)

    slots: list[dict[str, Any]] = [{"engine.max_slots": 256}, {"engine.max_slots": 64}]
    sized = Search(evaluate, LIMITS).run(MACHINES, lambda one: slots)
    chosen = sized.chosen
    assert chosen is not None
    assert (chosen.gpu, chosen.replicas, chosen.choice) == ("H100-SXM", 6, {"engine.max_slots": 64})
    reason = "the model does not fit: needed 3, given 2"
    unfit = [trial for trial in sized.trials if trial.refused]
    assert {(trial.refused, trial.met, *trial.figures) for trial in unfit} == {(reason, False)}
    assert not set(map(id, unfit)) & set(map(id, sized.cheaper()))
    assert f"L4: {reason}." in plan_page.why(sized)
    nothing = Search(evaluate, LIMITS).run(MACHINES[1:], lambda one: slots)
    assert plan_page.why(nothing) == [f"Nothing can be planned: L4: {reason}."]


def test_every_trial_is_held_to_the_memory_plan_of_its_gpu(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(record(0.0, [1] * 10, 1).to_json() + "\n")
    model = f"simulator.model={json.dumps(SHAPE.model_dump(mode='json'))}"

    def sized_as(flags: Any) -> Config:
        return configure([model, "simulator.gpu={name: L4, memory: 22.0e9}", *flags])

    evaluate = evaluator(read(Source(file), configure([])), sized_as(()), sized_as, {})
    assert evaluate({})["ttft_p99"] is not None
    explicit = {"engine.kv_bytes": "9GiB", "prefix_cache.memory_bytes": "1GiB", "engine.step_tokens": 512}
    for settings in ({"engine.max_slots": 512}, explicit):
        with pytest.raises(MemoryPlanError):
            evaluate(settings)


def test_limits_are_completed() -> None:
    config = configure([])
    assert [limit.text for limit in limits_of("ttft_p99<1", config, False)] == ["ttft_p99<1", "refused<=0"]
    assert [limit.text for limit in limits_of("in_slo>0.9", config, True)] == [
        "in_slo>0.9",
        f"quality>={LEAST_QUALITY}",
    ]
    assert [limit.name for limit in limits_of("dollars_month<9,refused<5", config, False)] == [
        "dollars_month",
        "refused",
    ]
    with pytest.raises(SizingError, match="has no limit"):
        limits_of(" ", config, False)
    with pytest.raises(SizingError, match="give --eval"):
        limits_of("quality>0.9", config, False)
    with pytest.raises(TuneError, match=r"--slo ttft_p9: unknown figure; did you mean 'ttft_p99'"):
        limits_of("ttft_p9<1", config, False)


def test_what_is_set_is_not_varied() -> None:
    gpu = Gpu.model_validate("H100-SXM")
    free = choices(configure([]), SHAPE, gpu, 8 << 30, ["snapkv@0.5"])
    paths = [path for one in free for path in one]
    assert paths == [
        *["engine.max_slots"] * len(SLOTS),
        *["prefix_cache.memory_bytes"] * len(STORED),
        "prefix_cache.host.memory_bytes",
        "compression.policy",
    ]
    fixed = configure(["engine.max_slots=256", "prefix_cache.memory_bytes=1GiB", "prefix_cache.host.memory_bytes=1GiB"])
    assert choices(fixed, SHAPE, gpu, 8 << 30, []) == []
    assert choices(configure(["prefix_cache.enabled=false"]), SHAPE, gpu, 8 << 30, [])[len(SLOTS) :] == []
    mixed = configure(["simulator.batching=mixed", "engine.max_slots=256", "prefix_cache.enabled=false"])
    assert choices(mixed, SHAPE, gpu, 0, ["snapkv@0.5"]) == []


def test_policies_are_those_that_keep_the_quality() -> None:
    """At their smallest budget that was measured, the smallest first; those that do not, beside them."""
    quality = {
        "full": Curve((1.0,), (1.0,)),
        "snapkv": Curve((0.2, 0.5, 1.0), (0.9, 0.995, 1.0)),
        "h2o": Curve((0.1, 0.3, 1.0), (0.99, 1.0, 1.0)),
        "full+kivi4": Curve((1.0,), (0.97,)),
        "streaming_llm": Curve((0.2, 0.5), (0.3, 0.6)),
    }
    within, below = policies_of(quality, {10_000: 5}, 0.99)
    assert within == ["h2o@0.1", "snapkv@0.5"]
    assert below == ["snapkv@0.2", "streaming_llm@0.2", "full+kivi4"]
    assert policies_of({}, {10_000: 5}, 0.99) == ([], [])
