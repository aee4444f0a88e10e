"""Stop a replica: its answers, its blocks and its engine each have their time. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests import clocks
from tests.unit.replicas.test_answers import Setup
from warmkv.config import load
from warmkv.replicas.deployment import Replica
from warmkv.replicas.protocol import STOPPING

LOOK_SECONDS = (
    2.0  # that Serve looks for requests of its own, before it lets a replica end (graceful_shutdown_wait_loop_s)
)


class Stopped:
    """Hold what a replica ends: an answer that never does by itself, and blocks that take `seconds` to hand over."""

    def __init__(self, here: Setup, seconds: float) -> None:
        self._config = load(flags=["cluster.drain_seconds=30"], environ={})
        self._answers, self._engine, self._seconds, self._link = here.answers, self, seconds, here.link
        self._recorder = self
        self.told: list[tuple[Any, ...]] = []

    def tell(self, *what: Any) -> None:
        """Note what is done now, and whether the answer has ended."""
        ended = STOPPING in self._link.events[1]
        self.told.append((asyncio.get_running_loop().time(), ended, *what))

    async def _hand_over(self) -> None:
        self.tell("hands over")
        await asyncio.sleep(self._seconds)
        self.tell("has handed over")

    def stop(self, spill_seconds: float) -> None:
        self.tell("writes to disk for", spill_seconds)

    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (
            2.5,
            [(30, False, "hands over"), (32.5, False, "has handed over"), (32.5, True, "writes to disk for", 7.5)],
        ),
        (1000, [(30, False, "hands over"), (40, True, "writes to disk for", 0)]),
    ],
)
def test_blocks_are_handed_over_before_an_answer_that_does_not_end_goes_on_elsewhere(monkeypatch, seconds, told):
    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "to_thread", at_once)
        here = Setup()
        here.take(1, new=400)
        replica, end = Stopped(here, seconds), cast(Any, Replica.__del__)
        await end(replica)
        assert replica.told == told
        assert asyncio.get_running_loop().time() + LOOK_SECONDS < replica._config.cluster.stop_seconds

    clocks.run(scenario())
