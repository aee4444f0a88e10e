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

LOOK_SECONDS = (
    2.0  # that Serve looks for requests of its own, before it lets a replica end (graceful_shutdown_wait_loop_s)
)


class Stopped:
    """Hold what a replica ends: an answer that never does by itself, and blocks that take `seconds` to hand over."""

    def __init__(self, here: Setup, seconds: float) -> None:
        self._config = load(flags=["cluster.drain_seconds=30"], environ={})
        self._answers, self._engine, self._seconds = here.answers, self, seconds
        self._recorder = self
        self.told: list[tuple[Any, ...]] = []

    def tell(self, *what: Any) -> None:
        self.told.append((asyncio.get_running_loop().time(), *what))

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
        (2.5, [(30, "hands over"), (32.5, "has handed over"), (32.5, "writes to disk for", 7.5)]),
        (1000, [(30, "hands over"), (40, "writes to disk for", 0)]),
    ],
)
def test_blocks_are_handed_over_and_written_though_an_answer_does_not_end(monkeypatch, seconds, told):
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
