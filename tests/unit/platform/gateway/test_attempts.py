"""Attempts at an answer through the real sender: who waits keeps its place, and what cannot go on begins anew."""

from __future__ import annotations

import asyncio

from tests import clocks
from tests.clocks import SkippingLoop, skip
from tests.unit.platform.wires import Cluster
from tests.unit.replicas.conftest import make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import load
from warmkv.platform.gateway.resume import resumed

STALL = 1000.0  # seconds of silence, which are skipped


async def turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_who_waits_in_line_for_long_keeps_its_place():
    async def scenario() -> None:
        config = load(flags=[f"gateway.stall_seconds={STALL}"], environ={})
        cluster = Cluster(0, config)
        tasks = []
        for name in "ab":
            events = resumed(make_request(prompt(4), name=name), cluster.sender.send, config.gateway, print)
            tasks.append(asyncio.create_task(anext(events)))
            await turns()
            skip(STALL * 0.6)
            await turns()
        assert [attempt.request.id for attempt in cluster.sender._line.values()] == ["a", "b"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert cluster.idle
        cluster.replies.close()

    clocks.run(scenario(), SkippingLoop)
