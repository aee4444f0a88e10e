"""`--cpu-durations N`: report the N tests and fixtures that took most processor time.

Wall-clock durations (`--durations`) say little on a machine that others use too. This counts the seconds of processor
time of this process and of the children that it has waited for; what a Ray cluster does is not in it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its ended children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class CpuDurations:
    """Collect processor seconds by test and by fixture."""

    def __init__(self, shown: int) -> None:
        self.shown = shown
        self.tests: Counter[str] = Counter()
        self.fixtures: Counter[str] = Counter()
        self._of_fixtures = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun, of_fixtures = cpu_seconds(), self._of_fixtures
        result = yield
        self.tests[item.nodeid] += cpu_seconds() - begun - (self._of_fixtures - of_fixtures)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        begun, of_fixtures = cpu_seconds(), self._of_fixtures
        try:
            return (yield)
        finally:
            own = cpu_seconds() - begun - (self._of_fixtures - of_fixtures)  # less those that it asked for
            self.fixtures[f"{fixturedef.baseid or '.'}::{fixturedef.argname} ({fixturedef.scope})"] += own
            self._of_fixtures += own

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for kind, spent in (("tests", self.tests), ("fixtures", self.fixtures)):
            terminalreporter.section(f"processor seconds of {kind}: {spent.total():.1f}")
            for name, seconds in spent.most_common(self.shown):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")
