"""How reports show lifetimes."""

from __future__ import annotations

import pytest

from warmkv.simulator.reports.conclusion import duration


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
