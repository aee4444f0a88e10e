"""Warm prefixes move between real replicas: fetched under load, replicated when hot, handed over by one that leaves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.conftest import Application, Cluster, application, metrics
from tests.polling import PATIENCE, until
from warmkv import telemetry
from warmkv.replicas.protocol import BlocksWanted
from warmkv.replicas.transfer import BlockPayloads

pytestmark = pytest.mark.cluster

NUMBERS = itertools.count()
TEXT = "class Window:\n    def __init__(self, size):\n        self.size = size\n" * 40
# Whether blocks move here does not depend on the machine: 30 s for a fetch, PATIENCE to hand over, and no comparison.
OWN: dict[str, dict[str, Any]] = {
    "routing": {"overload": 2, "transfer": "always"},
    "gateway": {"stall_seconds": 900},
    "cluster": {"drain_seconds": 3 * PATIENCE},
}


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[Application]:
    with application(cluster, "transfer", **OWN | {"cluster": OWN["cluster"] | {"replicas": 2}}) as started:
        yield started


def write(two: Application, replica: str, text: str) -> Any:
    """Have a replica compute a prompt, and the directory know of it."""
    before = two.replicas()[replica]["blocks"]
    answer = two.ask(text, replica=replica)
    assert answer.usage.warmkv["replica"] == replica
    until(lambda: two.replicas()[replica]["blocks"] > before, "the directory hears of the blocks")
    return answer


def fetched(two: Application, a: str, b: str) -> tuple[Any, Any]:
    """Return the usage of an answer by `b`, which fetched what `a` wrote, and of that by `a`.

    The gateway's router hears of blocks a moment after the directory: from now on it knows of all that were written.
    """

    def fetch() -> Any:
        text = f"{next(NUMBERS)} {TEXT}"
        there = write(two, a, text)
        here = two.ask(text, replica=b)
        assert here.usage.warmkv["replica"] == b
        assert here.content[0].text == there.content[0].text
        return here.usage.cache_read_input_tokens and (here.usage, there.usage)

    usages: tuple[Any, Any] = until(fetch, "the second replica reads what the first wrote")
    return usages


def test_a_replica_fetches_what_another_holds_and_bills_it_as_a_read(two):
    a, b = sorted(until(lambda: len(found := two.replicas()) == 2 and found, "both replicas report"))
    here, there = fetched(two, a, b)
    assert here.cache_read_input_tokens == there.cache_creation_input_tokens > 8 * 64
    assert here.cache_creation_input_tokens == 0
    assert sum(here.warmkv["tiers"].values()) >= here.cache_read_input_tokens
    counted = (telemetry.FETCHES, telemetry.FETCHED_BYTES, telemetry.FETCH_SECONDS)
    until(lambda: all(metric.exported in metrics() for metric in counted), "fetches are measured")


def test_a_hot_prefix_comes_to_all_replicas_and_stays_a_hit(two):
    text = "hot " + TEXT
    a, b = sorted(two.replicas())
    write(two, a, text)
    fetched(two, a, b)  # the router knows of the hot prefix, too
    barrier = threading.Barrier(8)

    def one(number: int) -> Any:
        barrier.wait()
        return two.ask(text, f"question {number}?", max_tokens=40).usage

    with ThreadPoolExecutor(8) as pool:
        usages = [usage for _ in range(3) for usage in pool.map(one, range(8))]
    used = [usage.warmkv["replica"] for usage in usages]
    assert min(used.count(name) for name in two.replicas()) >= 3
    warm = [usage for usage in usages if usage.cache_read_input_tokens > 0]
    assert len(warm) >= len(usages) - 2  # whoever comes before the router knows of the blocks


def test_who_asks_for_a_replica_that_is_gone_hears_of_it_at_once(two):
    from ray import serve

    lend = serve.get_deployment_handle("replica", app_name=two.name).options(method_name="lend")
    wanted = BlocksWanted(min(two.replicas()), {}, (), 0, (), False)
    assert lend.remote(wanted).result(timeout_s=PATIENCE) == BlockPayloads()  # its KV is of another kind
    with pytest.raises(LookupError, match="replica nobody is gone"):
        lend.remote(replace(wanted, replica="nobody")).result(timeout_s=PATIENCE)


def test_a_donor_that_is_gone_costs_no_answer(two):
    import ray

    a, b = sorted(two.replicas())
    text = "gone " + TEXT
    expected = write(two, a, text).content[0].text
    ray.kill(ray.get_actor(f"SERVE_REPLICA::{two.name}#replica#{a}", namespace="serve"))
    answers = [two.ask(text, replica=b).content[0].text for _ in range(3)]
    assert answers == [expected] * 3


def test_replicas_come_and_go_with_the_load_and_leave_their_prefixes(cluster):
    """1 -> 2 -> 1: no request fails, and what the replica that left had computed is warm on the other one."""
    scaling = {
        "max_replicas": 2,
        "target_ongoing_requests": 0.5,
        "upscale_delay_seconds": 0,
        "downscale_delay_seconds": 2,
    }
    with application(cluster, "scaling", **OWN | {"cluster": OWN["cluster"] | {"autoscaling": scaling}}) as scaled:
        until(lambda: scaled.running() == 1, "the application has settled at one replica")
        enough, done = threading.Event(), threading.Event()

        def load(text: str, share: float, end: threading.Event) -> int:
            """Have a request going on for a share of the time, however long an answer takes on this machine."""
            asked = 0
            while not end.is_set():
                begun = time.monotonic()
                scaled.ask(text, max_tokens=100)
                asked += 1
                end.wait((time.monotonic() - begun) * (1 / share - 1))
            return asked

        with ThreadPoolExecutor(2) as pool:
            heavy = pool.submit(load, "heavy", 1, enough)
            light = pool.submit(load, "light", 0.2, done)  # goes on while a replica is stopped
            try:
                until(lambda: scaled.running() == 2, "there are two replicas under load")
                names = until(lambda: len(found := scaled.replicas()) == 2 and sorted(found), "both report")
                texts: list[str] = []

                def written_by(replica: str) -> bool:
                    """Have a prompt computed, by this replica unless the load had it go to the other one."""
                    texts.append(f"{len(texts)} {TEXT}")
                    usage = scaled.ask(texts[-1], replica=replica).usage
                    return usage.warmkv["replica"] == replica

                for name in names * 3:
                    until(lambda name=name: written_by(name), "either replica computes three prompts")
                enough.set()
                assert heavy.result() > 0  # raises what a request raised
                until(lambda: scaled.running() == 1, "there is one replica under little load")
            finally:
                enough.set()
                done.set()
            assert light.result() > 0
        usages = {text: scaled.ask(text, "warm?").usage for text in texts}
        (stayed,) = {usage.warmkv["replica"] for usage in usages.values()}
        assert stayed in names
        assert all(usage.cache_read_input_tokens > 8 * 64 for usage in usages.values())
        until(lambda: telemetry.HANDED_BYTES.exported in metrics(), "what was handed over is measured")
