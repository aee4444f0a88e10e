"""The rule against Ray Serve's own code, tick by tick."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import AutoscalingConfig, ConfigError, load
from warmkv.simulator.cluster.autoscaler import Scaling, decide

serve = pytest.importorskip("ray.serve.autoscaling_policy", reason="needs the extra `serve`")
ray_config = pytest.importorskip("ray.serve.config")

SETTINGS = st.builds(
    lambda least, more, target, up, down: AutoscalingConfig(
        min_replicas=least,
        max_replicas=least + more,
        target_ongoing_requests=target,
        upscale_delay_seconds=up,
        downscale_delay_seconds=down,
    ),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([0.5, 1, 4]),
    st.sampled_from([0, 0.5, 3]),
    st.sampled_from([0, 2, 5]),
)
LOADS = st.lists(st.tuples(st.integers(0, 40).map(lambda half: half / 2), st.integers(1, 12)), max_size=12)


def of_serve(loads, config, target, monkeypatch):
    """The target after each tick of half a second, as Serve's controller would have it."""
    settings = ray_config.AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing_requests,
        upscale_delay_s=config.upscale_delay_seconds,
        downscale_delay_s=config.downscale_delay_seconds,
    )
    policy, state, targets = serve._apply_autoscaling_config(serve._core_replica_queue_length_policy), {}, []
    for tick, ongoing in enumerate(loads):
        monkeypatch.setattr(serve.time, "time", lambda tick=tick: tick / 2)
        context = SimpleNamespace(
            current_num_replicas=1,  # the ratio to those that run cancels out; one of them is exact
            target_num_replicas=target,
            total_num_requests=ongoing,
            config=settings,
            policy_state=state,
        )
        wanted, state = policy(context)
        target = min(max(wanted, config.min_replicas), config.max_replicas)
        targets.append(target)
    return targets


@given(SETTINGS, LOADS, st.integers(0, 5))
def test_targets_are_those_of_serve(config, phases, more):
    target = min(config.min_replicas + more, config.max_replicas)
    loads = [ongoing for ongoing, ticks in phases for _ in range(ticks)]
    scaling, targets = Scaling(target), []
    for tick, ongoing in enumerate(loads):
        scaling = decide(scaling, ongoing, config, tick / 2)
        targets.append(scaling.target)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert targets == of_serve(loads, config, target, monkeypatch)


@given(SETTINGS, LOADS)
def test_nothing_happens_between_a_change_of_load_and_the_time_that_is_told(config, phases):
    """So a simulation need not look at every tick."""
    scaling, now = Scaling(config.min_replicas), 0.0
    for ongoing, ticks in phases:
        scaling = often = decide(scaling, ongoing, config, now)
        end = now + ticks
        while (due := scaling.due(config)) < end and scaling.direction:
            changed = decide(scaling, ongoing, config, due)
            if changed.target == scaling.target:
                break
            scaling = changed
        while now < end:
            now += 1 / 8
            often = decide(often, ongoing, config, now) if now < end else often
        assert scaling.target == often.target
        scaling = often


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("cluster.autoscaling={max_replicas: 0}", "greater than or equal to 1"),
        ("cluster.autoscaling={min_replicas: 2, max_replicas: 3}", "replicas must lie between"),
        ("cluster.autoscaling={max_replicas: 3, target_ongoing_requests: 0}", "greater than 0"),
    ],
)
def test_faults_in_the_settings_are_told(flag, message):
    with pytest.raises(ConfigError, match=message):
        load(flags=[flag], environ={})
