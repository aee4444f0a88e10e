"""Changes of the policy as values: what is refused, what a version says, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import Config, ConfigError, load, parse
from warmkv.platform import live_config
from warmkv.platform.live_config import (
    LIVE,
    History,
    StaleVersionError,
    UnknownVersionError,
    Version,
    change,
    in_force,
    roll_back,
    values,
)

START = Config()


def changed(history: History, changes: dict[str, Any], start: Config = START, keep: int = 10) -> History:
    return history.with_next(change(start, history, changes, None, who="ann", why="test"), keep)


def now(history: History, start: Config = START) -> dict[str, Any]:
    return values(in_force(start, history.current))


def test_nothing_has_changed_at_first():
    assert in_force(START, History().current) == START


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compression.policy": "snapkv@0.2"}, {"compression.policy": "snapkv@0.2"}),
        ({"prefix_cache.ttls": {"5m": 60}}, {"prefix_cache.ttls": {"5m": 60.0}}),
        ({"routing.overload": 3, "routing.policy": "power_of_two"}, {"routing.overload": 3}),
        ({"pricing.input": 5, "pricing.write": {"5m": 2, "1h": 3}}, {"pricing.input": 5.0}),
        ({"pricing.models.tiny.read": 0.5}, {"pricing.models": {"tiny": {"read": 0.5}}}),
    ],
)
def test_a_change_is_in_force_and_leaves_the_rest(changes, expected):
    history = changed(History(), changes)
    found = now(history)
    sections = {".".join(dotted.split(".")[:2]) for dotted in changes}
    assert {key: found[key] for key in found if key not in sections} == {
        key: value for key, value in values(START).items() if key not in sections
    }
    models = found["pricing.models"]
    found["pricing.models"] = {n: {k: v for k, v in own.items() if v not in (None, {})} for n, own in models.items()}
    assert {key: found[key] for key in expected} == expected
    assert history.current.changes == changes


def test_changes_add_up_and_a_budget_changes_the_policy_that_is_there():
    history = changed(changed(History(), {"compression.policy": "snapkv@0.2"}), {"routing.overload": 3})
    history = changed(history, {"compression.policy.budget": 0.5})
    assert now(history)["compression.policy"] == "snapkv@0.5"
    assert history.current.settings == {"compression.policy": "snapkv@0.5", "routing.overload": 3}
    assert now(changed(history, {"compression.policy": "full"}))["compression.policy"] == "full"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression.polcy": "full"}, r"compression\.polcy: unknown key; did you mean 'policy'"),
        ({"routin.overload": 3}, r"routin: unknown key; did you mean 'routing'"),
        ({"compression.policy": "magic"}, r"compression\.policy\.name"),
        ({"compression.policy.windw": 3}, r"windw: unknown key; did you mean 'window'"),
        ({"routing.overload": 0}, r"routing\.overload: .*greater than or equal to 1"),
        ({"routing.overload.more": 0}, r"overload is already 8"),
        ({"routing.load_weight": float("inf")}, "must be finite"),
        ({"prefix_cache.ttls": {"5m": float("nan")}}, "must be finite"),
        ({"prefix_cache.ttls": {"1h": 60}}, "default_ttl '5m' is not one of ttls"),
        ({"prefix_cache.ttls": {"5m": 60, "1d": 600}}, "no multiplier for the TTL '1d'"),
        ({"pricing.write": {"5m": 1}}, "no multiplier for the TTL '1h'"),
        ({"engine.max_slots": 4}, r"engine\.max_slots cannot be changed while the service runs; what can: compression"),
        ({"prefix_cache.memory_bytes": 4}, r"prefix_cache\.memory_bytes cannot be changed"),
        ({"routing": {"overload": 3}}, "routing cannot be changed"),
        ({"": 3}, "unknown key"),
    ],
)
def test_what_could_not_start_is_refused_whole(changes, message):
    history = changed(History(), {"pricing.input": 5})
    with pytest.raises(ConfigError, match=message):
        change(START, history, {"pricing.output": 1, **changes}, None, who="ann", why="test")


def test_a_change_that_is_based_on_another_version_is_refused():
    history = changed(History(), {"pricing.input": 5})
    assert change(START, history, {"pricing.input": 6}, 1, who="bob", why="").number == 2
    for refused in (
        lambda: change(START, history, {"pricing.input": 6}, 0, who="bob", why=""),
        lambda: roll_back(START, history, None, 0, who="bob", why=""),
    ):
        with pytest.raises(StaleVersionError, match=r"version 0 is not in force: version 1 is, by ann \(test\)"):
            refused()


def test_the_way_back():
    history = changed(changed(History(), {"pricing.input": 5}), {"pricing.input": 6, "routing.overload": 2})
    back = history.with_next(roll_back(START, history, None, 2, who="bob", why="worse"), 10)
    assert (back.current.number, back.current.rolled_back_to, back.current.who) == (3, 1, "bob")
    assert now(back) == now(changed(History(), {"pricing.input": 5}))
    again = back.with_next(roll_back(START, back, None, None, who="bob", why=""), 10)
    assert (again.current.rolled_back_to, now(again)) == (2, now(history))
    first = again.with_next(roll_back(START, again, 0, None, who="bob", why=""), 10)
    assert in_force(START, first.current) == START


def test_there_is_no_way_back_to_what_is_not_kept():
    with pytest.raises(UnknownVersionError, match="nothing was changed"):
        roll_back(START, History(), None, None, who="", why="")
    history = History()
    for number in range(5):
        history = changed(history, {"pricing.input": number}, keep=3)
    assert [version.number for version in history.versions] == [3, 4, 5]
    with pytest.raises(UnknownVersionError, match="version 2 is not kept; there are 0, 3, 4, 5"):
        roll_back(START, history, 2, None, who="", why="")
    assert roll_back(START, history, 0, None, who="", why="").settings == {}


def test_a_version_is_over_what_the_service_was_started_with():
    history = changed(History(), {"pricing.input": 5})
    other = load(flags=["pricing.output=1", "pricing.input=2"], environ={})
    assert (now(history, other)["pricing.input"], now(history, other)["pricing.output"]) == (5, 1)
    shorter = changed(History(), {"prefix_cache.ttls": {"5m": 1, "1h": 2}})
    without = load(flags=["prefix_cache.ttls={5m: 1}", "pricing.write={5m: 1}"], environ={})
    with pytest.raises(ConfigError, match="no multiplier for the TTL '1h'"):
        in_force(without, shorter.current)


def test_numbers_must_rise():
    with pytest.raises(ValueError, match="do not rise"):
        History(versions=(Version(number=2), Version(number=1)))
    with pytest.raises(ValueError, match="do not rise"):
        History(versions=(Version(number=0),))


positive = st.floats(0, 1e6)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "compression.policy": st.sampled_from(["full", "snapkv@0.2", "h2o@0.1:heavy=0.25", "streaming_llm@64"]),
        "compression.allow_request_policy": st.booleans(),
        "prefix_cache.ttls": st.sampled_from([{"5m": 300}, {"5m": 1.5, "1h": 10}, {"1h": 3, "5m": 7}]),
        "routing.load_weight": positive,
        "routing.overload": st.integers(1, 100),
        "routing.allow_request_replica": st.booleans(),
        "pricing.input": positive,
        "pricing.models": st.dictionaries(st.sampled_from(["tiny", "a/b", "m.1"]), st.just({"read": 0.5})),
    },
)


@given(st.lists(st.one_of(CHANGES, st.integers(0, 6)), max_size=6))
def test_any_sequence_ends_as_if_every_setting_was_set_once(steps):
    """Against the obvious reference: one tree per version, in which every setting is written where it belongs."""
    history, trees = History(), [START.model_dump(mode="json")]
    for step in steps:
        if isinstance(step, int):
            to = step % len(trees)
            history = history.with_next(roll_back(START, history, to, None, who="", why=""), 100)
            trees.append(trees[to])
        else:
            history = changed(history, step, keep=100)
            tree = {section: dict(fields) for section, fields in trees[-1].items()}
            for dotted, value in step.items():
                section, field = dotted.split(".")
                tree[section][field] = value
            trees.append(tree)
        assert in_force(START, history.current) == parse(trees[-1])
    assert History.model_validate_json(history.model_dump_json()) == history


def test_every_live_setting_is_one_of_the_configuration():
    assert set(values(START)) == set(LIVE)
    assert "prefix_cache.default_ttl" in LIVE
    assert live_config.values(START, ["compression.policy"]) == {"compression.policy": "full"}


def test_a_version_that_knows_settings_of_the_past_can_be_changed_and_rolled_back_to():
    old = Version(number=1, settings={"routing.host_credit": 0.5, "routing.overload": 3})
    assert in_force(Config(), old).routing.overload == 3
    history = changed(History(versions=(old,)), {"pricing.input": 5})
    assert history.current.settings == {"routing.overload": 3, "pricing.input": 5}
    assert roll_back(Config(), history, 1, None).number == 3
    with pytest.raises(ConfigError, match=r"routing\.host_credit cannot be changed"):
        changed(history, {"routing.host_credit": 0.5})
