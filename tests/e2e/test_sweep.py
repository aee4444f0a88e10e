"""A sweep on a real Ray cluster gives what it gives in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmkv.config import load
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.studies.sweeps import grid, sweep
from warmkv.simulator.studies.sweeps.sweep_folder import SweepError
from warmkv.simulator.studies.sweeps.sweep_ray import on_ray
from warmkv.simulator.workload.requests import Requests
from warmkv.simulator.workload.source import LoadedTrace, Source, read

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def trace(tmp_path: Path) -> LoadedTrace:
    block = 64
    records = [
        RequestRecord(
            id=str(number), arrival=number * 30.0, tenant="t", model="m", api="messages", policy="full",
            block_size=block, input_tokens=block * 3, output_tokens=4,
            hashes=(b"a" * 16, b"b" * 16, bytes([number]) * 16),
        )
        for number in range(6)
    ]  # fmt: skip
    file = tmp_path / "log.jsonl"
    file.write_text("".join(record.to_json() + "\n" for record in records))
    return read(Source(file), load(environ={}))


def test_ray_gives_the_same_as_this_process(cluster, trace: LoadedTrace):
    points = [
        grid.point({"ttl": ttl, "cluster.replicas": replicas}, lambda flags: load(flags=flags, environ={}))
        for ttl in ("10s", "1h")
        for replicas in (1, 2)
    ]
    tasks = sweep.tasks_of(points, trace, load(environ={}), "auto", False)
    requests = trace.requests
    here = {task.key: result for task, result in sweep.serial(requests)(tasks)}
    with on_ray(requests, 2) as runner:
        there = {task.key: result for task, result in runner(tasks)}
        assert list(runner([])) == []
    assert there == here
    assert len({result["hit_rate_tokens"] for result in here.values()}) > 1


def test_a_point_that_fails_on_ray_is_named(cluster, trace: LoadedTrace):
    (point,) = [grid.point({"ttl": None}, lambda flags: load(flags=flags, environ={}))]
    (task,) = sweep.tasks_of([point], trace, load(environ={}), "auto", True)
    broken = RequestRecord(
        id="x", arrival=0.0, tenant="t", model="m", api="chat", policy="magic", block_size=64, input_tokens=1,
        output_tokens=1, hashes=(),
    )  # fmt: skip
    with (
        on_ray(Requests([broken]), 1) as runner,
        pytest.raises(SweepError, match="ttl null: request x: policy 'magic'"),
    ):
        list(runner([task]))
