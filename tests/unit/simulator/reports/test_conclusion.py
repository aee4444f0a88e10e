"""How reports show lifetimes, and what they conclude."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.simulator.conversations import EXACT, config, record
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.reports.conclusion import conclude, duration
from warmkv.simulator.studies.replays.replay import replay
from warmkv.simulator.studies.replays.variants import Variant


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (300.0, "5m"),
        (5400.0, "90m"),
        (86400.0, "24h"),
        (90.5, "90.5s"),
        (1e14, "100000000000000s"),
        (1e300, "1e+300s"),
        (float("inf"), "unlimited"),
    ],
)
def test_a_lifetime_is_shown_as_settings_have_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_variants_that_refused_other_requests_are_compared_no_further() -> None:
    small = PolicySpec.model_validate("streaming_llm@8")
    variants = [Variant(300.0, PolicySpec()), Variant(300.0, small)]
    full, least = replay([record(0.0, [1] * 100, 9)], config(), variants, EXACT)
    (alike,) = conclude([full, least])
    assert alike.endswith(" slot memory (answers: `warmkv eval`).")
    (apart,) = conclude([replace(full, refused=3), least])
    assert apart.endswith(" slot memory, but other requests were refused: compare nothing else.")
    (apart,) = conclude([replace(full, refused=3), replace(full, ttl=600.0, token_hit_rate=0.5)])
    assert (
        apart == "TTL 10m instead of 5m: +50.0 points hit rate, but other requests were refused: compare nothing else."
    )
