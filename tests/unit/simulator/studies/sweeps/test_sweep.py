"""Sweeps: every point is a replay of its own, whoever does it and whenever."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from tests.unit.simulator.conversations import config, record, with_timings
from tests.unit.simulator.conversations import run as replayed
from tests.unit.simulator.steps.test_step_profile import profile
from warmkv.config import load
from warmkv.simulator.reports import sweep_page
from warmkv.simulator.steps import step_profile
from warmkv.simulator.steps.costs import StepCost, times_of
from warmkv.simulator.studies.replays.replay import replay
from warmkv.simulator.studies.replays.summary import figures
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.sweeps import grid, sweep
from warmkv.simulator.studies.sweeps.figures import sense
from warmkv.simulator.studies.sweeps.sweep_folder import SweepError, SweepFolder, changes, flat
from warmkv.simulator.traces import mooncake
from warmkv.simulator.traces.warmkv import trace_of
from warmkv.simulator.workload import generator
from warmkv.simulator.workload.sessions import Workload
from warmkv.simulator.workload.source import Source, read

GRID = {"ttl": ["1m", "1h"], "prefix_cache.memory_bytes": ["1MiB", "1GiB"], "cluster.replicas": [1, 2]}
BASE = load(environ={})


def points_of(axes):
    configure = lambda flags: load(flags=flags, environ={})  # noqa: E731
    settings = [{}]
    for path, values in axes.items():
        settings = [{**one, path: value} for one in settings for value in values]
    return [grid.point(one, configure) for one in settings]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    settings = Workload(sessions=15, hours=0.1, length_scale=0.3, think_scale=0.2)
    file = tmp_path_factory.mktemp("trace") / "log.jsonl"
    generator.write(generator.generate(settings, np.random.SeedSequence(4), BASE), file)
    return read(Source(file), BASE)


def run(trace, folder, axes=GRID, runner=None, base=BASE, as_recorded=False, source="auto"):
    """The rows of a sweep, and the tasks that the runner was given."""
    points = points_of(axes)
    tasks = sweep.tasks_of(points, trace, base, source, as_recorded)
    asked = []

    def told(tasks):
        asked.extend(task.key for task in tasks)
        return (runner or sweep.serial(trace.requests))(tasks)

    meta = sweep.meta_of(trace, base, source, as_recorded)
    results = sweep.sweep(points, tasks, SweepFolder(folder, meta), told)
    prompts = sweep.prompt_lengths(trace.requests)
    return sweep.rows_of(points, tasks, results, {}, prompts), asked


def test_a_point_is_a_replay_with_its_settings(trace, tmp_path):
    rows, _ = run(trace, tmp_path)
    assert len(rows) == 8
    settings = load(flags=["prefix_cache.memory_bytes=1GiB", "cluster.replicas=2"], environ={})
    cost = StepCost(settings.simulator.step_a, settings.simulator.step_b, settings.simulator.step_c)
    (alone,) = replay(trace.requests.records, settings, [Variant(60.0, settings.compression.policy)], cost)
    (row,) = [r for r in rows if r.values == {"ttl": 60, "prefix_cache.memory_bytes": 1 << 30, "cluster.replicas": 2}]
    assert row.figures == {**figures(alone), "quality": None}
    assert row.policy == "full"


def test_any_number_of_workers_gives_the_same(trace, tmp_path):
    one, _ = run(trace, tmp_path / "one")
    with sweep.processes(trace, BASE, 2) as runner:
        two, _ = run(trace, tmp_path / "two", runner=runner)
    assert one == two
    names = sorted(file.name for file in (tmp_path / "one").rglob("*.json"))
    assert len(names) == 9
    for file in (tmp_path / "one").rglob("*.json"):
        assert file.read_text() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_text()


def test_a_public_trace_is_read_alike_by_every_worker(tmp_path):
    settings = Workload(sessions=6, hours=0.1, length_scale=0.3, think_scale=0.2)
    records = generator.generate(settings, np.random.SeedSequence(4), BASE)
    mooncake.write(trace_of(records), tmp_path / "trace")
    public = read(Source(tmp_path / "trace", block_size=BASE.prefix_cache.block_size), BASE)
    axes = {"ttl": ["1s", "1h"], "simulator.slo.tpot": [math.inf]}
    base = load(flags=["simulator.slo.tpot=.inf"], environ={})  # of which workers and JSON must know
    here, _ = run(public, tmp_path / "here", axes, base=base)
    with sweep.processes(public, base, 1) as runner:
        there, _ = run(public, tmp_path / "there", axes, runner=runner, base=base)
    assert here == there
    for file in (tmp_path / "here").rglob("*.json"):
        assert json.loads(file.read_text(), parse_constant=pytest.fail)["config"]["simulator"]["slo"]["tpot"] is None
    assert here[0].figures["hit_rate_tokens"] < here[1].figures["hit_rate_tokens"]
    with pytest.raises(SweepError, match=r"reading\.scope: global there, session here"):
        run(replace(public, source=replace(public.source, scope="session")), tmp_path / "here", axes, base=base)


def test_turns_wait_for_the_answer_before_them_unless_times_are_as_recorded(tmp_path):
    turns = [{"t": t, "in": 8, "out": 3, "hash_ids": [1, 2], "think_time": 100.0} for t in (0.0, 1.0)]
    (tmp_path / "trace").write_text(json.dumps({"id": "s", "block_size": 4, "requests": turns}))
    seconds = []
    for open_loop in (False, True):
        public = read(Source(tmp_path / "trace", open_loop=open_loop), BASE)
        (row,), _ = run(public, tmp_path / str(open_loop), {"ttl": ["1h"]})
        seconds.append(row.figures["seconds"])
    assert seconds[0] > 100 > 5 > seconds[1]


def test_what_is_done_is_not_done_again(trace, tmp_path):
    def dies_after(count, tasks):
        for number, done in enumerate(sweep.serial(trace.requests)(tasks)):
            if number == count:
                raise KeyboardInterrupt
            yield done

    with pytest.raises(KeyboardInterrupt):
        run(trace, tmp_path, runner=partial(dies_after, 3))
    rows, asked = run(trace, tmp_path)
    assert len(asked) == 5
    again, asked = run(trace, tmp_path)
    assert asked == []
    assert again == rows == run(trace, tmp_path.with_name("fresh"))[0]


def test_a_grid_can_be_extended(trace, tmp_path):
    run(trace, tmp_path, {"ttl": ["1m"]})
    rows, asked = run(trace, tmp_path, {"ttl": ["1m", "10m"]})
    assert len(asked) == 1
    assert [row.values["ttl"] for row in rows] == [60, 600]


def test_a_damaged_point_is_done_again(trace, tmp_path):
    rows, asked = run(trace, tmp_path, {"ttl": ["1m"]})
    (tmp_path / "points" / f"{asked[0]}.json").write_text('{"figures":')
    again, asked_again = run(trace, tmp_path, {"ttl": ["1m"]})
    assert (again, asked_again) == (rows, asked)


def test_another_trace_or_configuration_is_refused(trace, tmp_path):
    run(trace, tmp_path, {"ttl": ["1m"]})
    changed = trace.source.path.with_name("changed.jsonl")
    changed.write_text(trace.source.path.read_text() + record(9e9, [1] * 70).to_json() + "\n")
    with pytest.raises(SweepError, match=r"trace.file: log.jsonl there, changed.jsonl here; trace.sha256"):
        run(read(Source(changed), BASE), tmp_path, {"ttl": ["1m"]})
    with pytest.raises(SweepError, match=r"config.engine.max_slots: 16 there, 3 here"):
        run(trace, tmp_path, {"ttl": ["1m"]}, base=load(flags=["engine.max_slots=3"], environ={}))
    with pytest.raises(SweepError, match="as_recorded: False there, True here"):
        run(trace, tmp_path, {"ttl": ["1m"]}, as_recorded=True)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(SweepError, match=r"meta.json is damaged"):
        run(trace, tmp_path, {"ttl": ["1m"]})


def test_a_folder_of_something_else_is_left_alone(trace, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SweepError, match="is not empty and holds no sweep"):
        run(trace, tmp_path)


def test_a_trace_that_changes_during_the_sweep_is_noticed(trace, tmp_path):
    copy = tmp_path / "log.jsonl"
    copy.write_bytes(trace.source.path.read_bytes())
    moving = read(Source(copy), BASE)
    copy.write_text(record(0, [1] * 9).to_json() + "\n")
    with (
        sweep.processes(moving, BASE, 1) as runner,
        pytest.raises(SweepError, match="has changed since the sweep began"),
    ):
        run(moving, tmp_path / "out", {"ttl": ["1m"]}, runner=runner)


def test_a_point_that_cannot_be_replayed_is_named_and_the_others_kept(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text(record(0.0, [1] * 10, 1, ends=[10], ttls=["1h"], name="x").to_json() + "\n")
    axes = {"ttl": ["1m", None], "prefix_cache.ttls": [{"5m": 300}]}
    with pytest.raises(SweepError, match=r"ttl null, ttls \{5m: 300\}: request x: TTL '1h' is not one of"):
        run(read(Source(file), BASE), tmp_path / "out", axes)
    assert len(list((tmp_path / "out" / "points").iterdir())) == 1


def test_step_times_are_the_points_own_where_they_vary(trace, tmp_path):
    rows, _ = run(trace, tmp_path, {"simulator.step_a": [0.004, 0.04]})
    fast, slow = (row.figures["tpot_p50"] for row in rows)
    assert slow > 2 * fast
    with pytest.raises(SweepError, match="--step-times log takes them from the log"):
        run(trace, tmp_path, {"simulator.step_a": [0.04]}, source="log")


def test_time_outside_replicas_is_the_points_own_where_it_varies(trace, tmp_path):
    rows, _ = run(trace, tmp_path, {"simulator.overhead_seconds": [0.25, 0.5]})
    near, far = (row.figures["ttft_p50"] for row in rows)
    assert far - near == pytest.approx(0.25)


def test_gpus_are_compared_by_the_roofline_of_a_model_and_by_price(trace, tmp_path):
    sizes = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype_bytes": 2}
    model, gpus = {**sizes, "intermediate": 2048, "vocabulary": 9}, ["L4", "H100-SXM"]
    rows, _ = run(trace, tmp_path / "model", {"simulator.gpu": gpus, "simulator.model": [model]})
    slow, fast = (row.figures["ttft_p50"] for row in rows)
    assert slow > 1.2 * fast
    rows, _ = run(trace, tmp_path / "price", {"simulator.gpu": gpus})
    (cheap, dear) = (row.figures for row in rows)
    assert cheap["ttft_p50"] == dear["ttft_p50"]
    assert cheap["gpu_dollars"] < dear["gpu_dollars"]


def test_a_point_that_does_not_fit_its_gpu_has_no_figures_and_a_reason(trace, tmp_path, capsys):
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    model = {**sizes, "intermediate": 14336, "vocabulary": 128256}
    gpus = [{"name": "L4", "memory": memory} for memory in (12e9, 22e9)]
    axes = {"simulator.model": [model], "simulator.gpu": gpus}
    for _ in range(2):  # the second goes on with what is there
        rows, asked = run(trace, tmp_path / "run", axes)
        assert [row.unfit.partition(":")[0] for row in rows] == ["the model does not fit the memory of a replica", ""]
        assert rows[0].figures == {"quality": None}
        assert rows[1].figures["requests"] > 0
    assert asked == []
    rows = sweep.with_front(rows, ["dollars", "ttft_p99"])
    assert [row.front for row in rows] == [False, True]
    assert "simulator.gpu" not in sweep.without_effect(rows), "nothing was compared"
    sweep_page.show(rows, ["dollars", "ttft_p99"], [], Console(width=200))
    meta = {"trace": {"file": "log", "requests": 9, "sha256": ""}, "step_times": {"source": "auto"}, "warmkv": ""}
    for shown in (capsys.readouterr().out, sweep_page.render(meta, rows, ["dollars", "ttft_p99"], [], [])):
        assert f"not replayed, #1: {rows[0].unfit}" in shown
    small = points_of(axes)[0].config
    assert sweep.known_figures([small]) == list(rows[1].figures)


def test_where_step_times_come_from_and_what_is_amiss_is_told(trace, tmp_path):
    step_profile.write(profile(full=((1, 1, 1, 1), (1, 1, 1), (1, 1, 1))), tmp_path / "profile.json")
    axes = {"simulator.profile": [str(tmp_path / "profile.json")], "compression.policy": ["full", "snapkv"]}
    source, stand_in = sweep.step_times_of(sweep.tasks_of(points_of(axes), trace, BASE, "auto", False))
    assert source.startswith(f"measured, {tmp_path / 'profile.json'} (small on a CPU")
    assert source.endswith("its model's KV shape is not that of simulator.model")
    assert stand_in == "not measured: snapkv gets the times of full"

    sizes = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype_bytes": 2}
    model = {**sizes, "intermediate": 2048, "vocabulary": 9}
    axes = {"simulator.model": [model], "engine.kv_bytes": ["90GB"], "prefix_cache.memory_bytes": ["1GB"]}
    tasks = sweep.tasks_of(points_of({**axes, "engine.step_tokens": [512]}), trace, BASE, "auto", False)
    origin, crowding = sweep.step_times_of(tasks)
    assert origin == "roofline of the model on H100-SXM"
    assert crowding.endswith("take 91 GB, and a replica has 80")


def test_groups_alone_leave_step_times_as_the_log_has_them(tmp_path):
    """Fit the log for a group that it does not have; only settings of the simulator end the fit, for all points."""
    bare = [record(float(n), [n] * 9, output=5) for n in range(30)]
    log = with_timings(replayed(bare, config(), cost=StepCost(0.005, 1e-4, 5e-7))[0])
    (tmp_path / "log").write_text("".join(one.to_json() + "\n" for one in log))
    measured = read(Source(tmp_path / "log"), BASE)

    def tasks_of(*trees, others=()):
        points = [points_of({"cluster.groups": [tree]})[0] for tree in (*trees, *others)]
        return sweep.tasks_of(points[: len(trees)], measured, BASE, "auto", False, points[len(trees) :])

    fitted = "fitted to 30 measured requests of the log"
    more = {"b": {"engine": {"max_slots": 8}}}
    present, two, three = tasks_of({}, more, {"b": {**more["b"], "cluster": {"replicas": 3}}})
    assert present.step_times == (fitted,)
    assert two.step_times == (f"replica: {fitted}; b: {fitted}",)
    assert times_of(two.times, "") == present.times == times_of(tasks_of({})[0].times, "")
    assert two.times is three.times

    own = {"b": {"simulator": {"step_a": 0.5}}}
    configured = "configuration (simulator.step_*)"
    assert [task.step_times for task in tasks_of({}, own)] == [
        (configured,),
        (f"replica: {configured}; b: {configured}",),
    ]
    (alone,) = tasks_of({}, others=[own])
    assert alone.step_times == (configured,), "what is compared with others has their kind of step times"


def test_the_policy_is_that_of_the_point_unless_it_is_kept_as_recorded(trace, tmp_path):
    rows, _ = run(trace, tmp_path, {"compression.policy": ["full", "streaming_llm@0.1"]})
    full, small = rows
    assert (full.policy, small.policy) == ("full", "streaming_llm@0.1")
    assert small.figures["slot_bytes_max"] < full.figures["slot_bytes_max"]
    recorded, _ = run(trace, tmp_path / "recorded", {"ttl": [None]}, as_recorded=True)
    assert recorded[0].policy == "as recorded"
    assert recorded[0].figures["quality"] is None


def test_settings_without_effect_are_told(trace, tmp_path):
    axes = {"gateway.port": [1, 2], "ttl": ["1s", "1h"], "cluster.replicas": [1]}
    rows, _ = run(trace, tmp_path, axes)
    assert sweep.without_effect(rows) == ["gateway.port"]
    assert sweep.without_effect([]) == []


def test_the_front_needs_figures_that_have_a_better_side(trace, tmp_path):
    known = sweep.known_figures([BASE])
    rows, _ = run(trace, tmp_path, {"ttl": ["1m", "1h"]})
    assert known == list(rows[0].figures)
    sweep.check_axes(["dollars", "quality"], known)
    for names, says in [
        (["dollars"], "at least two"),
        (["dollars", "dollars"], "at least two"),
        (["dollars", "ttft_p9"], "did you mean 'ttft_p99'?"),
        (["dollars", "requests"], "neither more nor less"),
    ]:
        with pytest.raises(SweepError, match=says.replace("?", r"\?")):
            sweep.check_axes(names, known)
    better = rows[0] if rows[0].figures["dollars"] < rows[1].figures["dollars"] else rows[1]
    marked = sweep.with_front(rows, ["dollars", "dollars_per_million_tokens"])
    assert [row.front for row in marked] == [row is better for row in rows]
    partly = [replace(rows[0], figures={"dollars": 1.0}), rows[1]]  # as where only some points have a tier
    assert sweep.names_of(partly) == ["dollars", *[name for name in known if name != "dollars"]]
    assert [row.front for row in sweep.with_front(partly, ["dollars", "ttft_p50"])] == [False, True]
    unknown = [replace(row, figures={**row.figures, "dollars": None}) for row in rows]
    assert not any(row.front for row in sweep.with_front(unknown, ["dollars", "ttft_p50"]))


def test_what_is_refused_is_an_axis_of_the_front_where_points_differ_in_it(trace, tmp_path):
    rows, _ = run(trace, tmp_path, {"engine.kv_bytes": ["1MiB", "1GiB"]})
    assert sweep.with_refusals(["dollars", "ttft_p99"], rows) == ["dollars", "ttft_p99", "refused"]
    assert sweep.with_refusals(["refused", "dollars"], rows) == ["refused", "dollars"]
    assert sweep.with_refusals(["dollars", "ttft_p99"], rows[:1]) == ["dollars", "ttft_p99"]
    few, all_served = rows
    assert few.figures["refused"] == few.figures["refused_too_large"] > 0
    assert few.figures["dollars"] < all_served.figures["dollars"]
    assert [row.front for row in sweep.with_front(rows, ["dollars", "refused"])] == [True, True]


def test_where_no_request_was_served_there_are_no_figures_of_answers(trace, tmp_path, capsys):
    rows, _ = run(trace, tmp_path, {"engine.max_context": [16, 100_000]})
    none, served = sweep.with_front(rows, ["dollars", "ttft_p99"])
    assert none.figures["refused"] == none.figures["requests"] > 0
    answers = {name for name, value in none.figures.items() if value is None}
    assert answers >= {"dollars", "saving", "hit_rate_tokens", "ttft_p50", "e2e_p99", "gpu_dollars_per_million_tokens"}
    assert none.figures["gpu_dollars"] is not None  # replicas cost what they cost
    assert (none.front, served.front) == (False, True)
    sweep_page.show(rows, ["dollars", "ttft_p99"], [], Console(width=200))
    assert "nothing can be concluded of it: #1" in capsys.readouterr().out


def test_every_figure_is_a_number_and_knows_its_side(trace, tmp_path):
    (row,), _ = run(trace, tmp_path, {"ttl": ["1h"]})
    found = {name: value for name, value in row.figures.items() if name != "quality"}
    assert all(isinstance(value, int | float) for value in found.values())
    json.dumps(found, allow_nan=False)
    assert found["dollars"] == pytest.approx((1 - found["saving"]) * found["dollars_uncached"])
    tokens = found["prompt_tokens"] + found["output_tokens"]
    assert found["dollars_per_million_tokens"] == pytest.approx(found["dollars"] / tokens * 1e6)
    assert [sense(name) for name in ("hit_rate_tokens", "saving", "quality", "dollars", "ttft_p99", "requests")] == [
        *(1, 1, 1),
        *(-1, -1, 0),
    ]


def test_trees_are_compared_leaf_by_leaf():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert changes({"a": {"b": 1}, "d": 2}, {"a": {"b": 3}, "e": 4}) == {"a.b": (1, 3), "d": (2, None), "e": (None, 4)}
