"""The what-if service on Ray: gateways feed it, it replays beside the service, and its results are metrics."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from tests.e2e.conftest import metrics
from tests.polling import until
from tests.unit.platform.whatif.traffic import logged, prompts, settings
from warmkv import telemetry
from warmkv.platform import named_actors
from warmkv.platform.control import control_name, start_control
from warmkv.platform.whatif.actor import (
    RemoteWhatIf,
    contents_of_replicas,
    replayed_on_ray,
    start_whatif,
    whatif_name,
)
from warmkv.platform.whatif.candidates import NOW, proposals
from warmkv.platform.whatif.feed import Feed
from warmkv.platform.whatif.replays import Basis, Default, Round
from warmkv.platform.whatif.warm_start import Start

pytestmark = pytest.mark.cluster


def test_the_actor_replays_what_gateways_send_and_keeps_candidates(cluster):
    import ray

    own = settings("control.whatif={}", "cluster.application=what-if-alone")
    name = own.cluster.application
    start_control(name, own.control)
    start_whatif(own, [])
    try:
        remote, log = RemoteWhatIf(name, "gateway"), logged(prompts()[:121], own)
        feed = Feed(remote.send, lambda: 0, lambda lost: None)
        for record in log[:-1]:
            feed.write(record)
        asyncio.run(feed.flush())
        added = asyncio.run(remote.add({"prefix_cache.default_ttl": "1h"}))["candidate"]

        def replayed() -> Any:
            table = asyncio.run(remote.table())
            rows = {row["candidate"]: row for row in table["candidates"] if row["figures"]}
            return (table, rows) if {NOW, added} <= rows.keys() else None

        table, rows = until(replayed, "every candidate is replayed")
        assert (table["fault"], table["autopilot"], table["window"]["seen"]) == (None, None, len(log) - 1)
        assert abs(table["model_error"]["error"]["hit_rate"]) < 0.02
        assert {"hit_rate", "slot_bytes"} <= rows[added]["difference"].keys()
        shown = set(telemetry.WHATIF) - {telemetry.WHATIF_QUALITY}  # no evaluation was given
        until(lambda: all(metric.exported in metrics() for metric in shown), "the results are metrics")
        ray.kill(ray.get_actor(whatif_name(name), namespace=named_actors.NAMESPACE), no_restart=False)

        def restarted() -> Any:
            try:
                table = asyncio.run(remote.table())
            except named_actors.ActorAwayError:
                return None
            return table if table["window"]["seen"] == 0 else None

        (kept,) = until(restarted, "it is there again, with an empty window")["candidates"]
        assert (kept["candidate"], kept["changes"]) == (added, {"prefix_cache.default_ttl": "1h"})
        feed.write(log[-1])
        asyncio.run(feed.flush())  # as gateways do with the next request
        assert asyncio.run(remote.table())["window"]["seen"] == len(log)
        asyncio.run(remote.remove(added))
    finally:
        named_actors.end(whatif_name(name))
        named_actors.end(control_name(name))


def test_every_replica_tells_what_it_holds(cluster):
    begun, text = time.time(), "for position in range(length):\n    total += position\n" * 30
    cluster.anthropic("held").messages.create(
        model=cluster.config.model.name, max_tokens=1, messages=[{"role": "user", "content": text}]
    )
    told = asyncio.run(contents_of_replicas(cluster.config.cluster.application, ("",), 1000))
    assert len(told) == cluster.config.cluster.replicas
    held = [block for replica in told for block in replica.tiers["device"]]
    ttl = cluster.config.prefix_cache.ttls[cluster.config.prefix_cache.default_ttl]
    assert any(block.ttl == ttl and begun + ttl - 1 < block.expires_at < time.time() + ttl + 1 for block in held)


def test_a_replay_is_of_lowest_priority_and_ends_when_it_is_given_up(cluster):
    now = settings()
    records = logged(prompts(), now)[:10]  # too few for step times of their own, which take long to fit
    work = Round(Start(records), now, [Default.of(0.0, now)], 0.0, [*proposals(now)] * 1000)  # no end is in sight

    others = set(replaying())  # of another cluster, or about to end

    async def scenario() -> int:
        steps = replayed_on_ray(work)
        assert isinstance(await anext(steps), Basis)
        (process,) = set(replaying()) - others
        assert os.sched_getscheduler(process) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, process) == 19
        await steps.aclose()
        return process

    process = asyncio.run(scenario())
    until(lambda: process not in replaying(), "the process has ended")


def replaying() -> list[int]:
    """Return processes that replay."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline") as file:
                    if "ray::_replay" in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found
