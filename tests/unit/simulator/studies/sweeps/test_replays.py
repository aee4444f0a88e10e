"""Figures of a replay that was never short of room stand for those with more room."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, uniform
from warmkv.simulator.studies.replays.replay import replay
from warmkv.simulator.studies.replays.summary import figures
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.sweeps import replays
from warmkv.simulator.studies.sweeps.replays import Replays
from warmkv.simulator.studies.sweeps.sweep import SweepTask
from warmkv.simulator.workload.requests import Requests

OTHERS = st.sampled_from(
    [
        (),
        ("cluster.replicas=2", "simulator.index_delay=0.01"),
        ("prefix_cache.host.memory_bytes=120B", "prefix_cache.eviction=cost"),
        ("prefix_cache.tenant_share=0.3", "cluster.replicas=2"),
        ("engine.kind=vllm", "prefix_cache.storage=model"),
    ]
)


def task(flags, room, ttl=None):
    settings = config(*flags, f"prefix_cache.memory_bytes={room}B")
    return SweepTask("", "a point", settings, Variant(ttl), uniform(EXACT))


def alone(requests, one):
    """Return the figures of a point replayed by itself."""
    return figures(replay(requests.records, one.config, [one.variant], one.times)[0])


def counted(monkeypatch):
    calls, done = [], replays.run

    def run(*args, **kwargs):
        calls.append(args)
        return done(*args, **kwargs)

    monkeypatch.setattr(replays, "run", run)
    return calls


@given(
    logs(policies=["full"]),
    OTHERS,
    st.lists(st.tuples(st.sampled_from([8, 40, 60, 100, 150, 240, 1000]), st.sampled_from([None, 1.0])), min_size=2),
)
def test_every_point_has_the_figures_that_it_has_by_itself(records, flags, points):
    requests = Requests([replace(one, tenant="ab"[at % 2]) for at, one in enumerate(records)])
    shared = Replays(requests)
    for room, ttl in points:
        one = task(flags, room, ttl)
        assert shared.figures(one) == alone(requests, one)


def test_more_room_is_not_replayed_once_there_was_enough(monkeypatch):
    from tests.unit.simulator.conversations import record

    requests = Requests([record(at, [at] * 20, 3) for at in range(3)])  # 2 bytes a token: 120 in all
    calls, shared = counted(monkeypatch), Replays(requests)
    for room in (60, 119, 120, 1000, 500):
        shared.figures(task((), room))
    assert len(calls) == 3
    shared.figures(task((), 1000, ttl=math.inf))
    shared.figures(task(("engine.max_slots=1",), 1000))
    assert len(calls) == 5


def test_where_room_stands_for_more_than_prefixes_every_point_is_replayed(monkeypatch):
    from tests.unit.simulator.conversations import record

    requests = Requests([record(0.0, [1] * 20, 3)])
    calls, shared = counted(monkeypatch), Replays(requests)
    for room in (1000, 2000):
        shared.figures(task(("engine.kind=vllm",), room))
    assert len(calls) == 2
