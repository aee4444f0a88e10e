"""Warm prefixes move between real replicas: fetched under load, replicated when hot, handed over by one that leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import pytest
import requests

from tests.e2e.conftest import OPERATOR, Cluster, metrics
from warmkv import telemetry
from warmkv.config import parse
from warmkv.platform.document import serve_document
from warmkv.platform.local import start_document
from warmkv.platform.operator_key import with_operator
from warmkv.replicas.protocol import BlocksWanted
from warmkv.replicas.transfer import BlocksLent

pytestmark = pytest.mark.cluster

TEXT = "class Window:\n    def __init__(self, size):\n        self.size = size\n" * 40
# What the replicas believe of their speed here does not depend on the machine: fetching is faster.
TRANSFER = {"token_seconds": 1.0, "half_life": 1e9, "timeout_seconds": 30.0, "handover_seconds": 30.0}


@dataclass(frozen=True)
class Service:
    """An application of its own on the session's Ray."""

    name: str
    url: str
    model: str

    def ask(self, text: str, question: str = "?", **options: Any) -> Any:
        """The usage of an answer; `text` ends in a breakpoint."""
        marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        client = anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0)
        return client.messages.create(
            model=self.model,
            max_tokens=options.pop("max_tokens", 6),
            messages=[{"role": "user", "content": [marked, {"type": "text", "text": question}]}],
            extra_body={"temperature": 0, "warmkv": {"seed": 1, **options}},
        )

    def replicas(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/v1/warmkv/replicas", headers=OPERATOR, timeout=30)
        found = answer.json()["replicas"]
        return {name: known for name, known in found.items() if "phase" not in known}

    def running(self) -> int:
        from ray import serve

        states = serve.status().applications[self.name].deployments["replica"].replica_states
        return states.get("RUNNING", 0) if set(states) <= {"RUNNING"} else 0


@contextmanager
def service(session: Cluster, name: str, **sections: Any) -> Iterator[Service]:
    from ray import serve

    port = session.config.gateway.port
    config = parse(
        {
            **sections,
            "cluster": {"application": name, "cpus_per_replica": 0, **sections["cluster"]},
            "gateway": {"host": "127.0.0.1", "port": port, "route_prefix": f"/{name}"},
            "engine": {"threads": 1},
            "transfer": TRANSFER,
        }
    )
    config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
    start_document(serve_document(config))
    try:
        yield Service(name, f"http://127.0.0.1:{port}/{name}", config.model.name)
    finally:
        serve.delete(name)


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[Service]:
    with service(cluster, "transfer", cluster={"replicas": 2}, routing={"overload": 2}) as started:
        yield started


Eventually = Callable[..., Any]


def write(two: Service, replica: str, text: str, eventually: Eventually) -> Any:
    """Have a replica compute a prompt, and the directory know of it."""
    before = two.replicas()[replica]["blocks"]
    answer = two.ask(text, replica=replica)
    assert answer.usage.warmkv["replica"] == replica
    eventually(lambda: two.replicas()[replica]["blocks"] > before, "the directory hears of the blocks")
    return answer


def test_a_replica_fetches_what_another_holds_and_bills_it_as_a_read(two, eventually):
    a, b = sorted(eventually(lambda: len(found := two.replicas()) == 2 and found, "both replicas report"))
    tries = iter(range(100))

    def fetched() -> Any:  # the gateway's router may hear of the blocks a moment after the directory
        text = f"{next(tries)} {TEXT}"
        there = write(two, a, text, eventually)
        here = two.ask(text, replica=b)
        assert here.usage.warmkv["replica"] == b
        assert here.content[0].text == there.content[0].text
        return here.usage.cache_read_input_tokens and (here.usage, there.usage)

    here, there = eventually(fetched, "the second replica reads what the first wrote")
    assert here.cache_read_input_tokens == there.cache_creation_input_tokens > 8 * 64
    assert here.cache_creation_input_tokens == 0
    assert sum(here.warmkv["tiers"].values()) >= here.cache_read_input_tokens
    counted = (telemetry.FETCHES, telemetry.FETCHED_BYTES, telemetry.FETCH_SECONDS)
    eventually(lambda: all(metric.exported in metrics() for metric in counted), "fetches are measured")


def test_a_hot_prefix_comes_to_all_replicas_and_stays_a_hit(two, eventually):
    text = "hot " + TEXT
    write(two, min(two.replicas()), text, eventually)
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
    wanted = BlocksWanted(min(two.replicas()), {}, (), (), False)
    assert lend.remote(wanted).result(timeout_s=60) == BlocksLent()  # its KV is of another kind
    with pytest.raises(LookupError, match="replica nobody is gone"):
        lend.remote(replace(wanted, replica="nobody")).result(timeout_s=60)


def test_a_donor_that_is_gone_costs_no_answer(two, eventually):
    import ray

    a, b = sorted(two.replicas())
    text = "gone " + TEXT
    expected = write(two, a, text, eventually).content[0].text
    ray.kill(ray.get_actor(f"SERVE_REPLICA::{two.name}#replica#{a}", namespace="serve"))
    answers = [two.ask(text, replica=b).content[0].text for _ in range(3)]
    assert answers == [expected] * 3


def test_replicas_come_and_go_with_the_load_and_leave_their_prefixes(cluster, eventually):
    """1 -> 2 -> 1: no request fails, and what the replica that left had computed is warm on the other one."""
    scaling = {"max_replicas": 2, "target_ongoing_requests": 2, "look_back_seconds": 11}
    delays = {"upscale_delay_seconds": 0, "downscale_delay_seconds": 3}
    with service(cluster, "scaling", cluster={"autoscaling": {**scaling, **delays}}) as scaled:
        assert scaled.running() == 1
        enough, done = threading.Event(), threading.Event()

        def load(number: int, until: threading.Event) -> int:
            asked = 0
            while not until.is_set():
                scaled.ask(f"load {number}", max_tokens=100)
                asked += 1
            return asked

        with ThreadPoolExecutor(9) as pool:
            loading = [pool.submit(load, number, enough) for number in range(8)]
            light = pool.submit(load, 8, done)  # goes on while a replica is stopped
            try:
                eventually(lambda: scaled.running() == 2, "there are two replicas under load", 120)
                names = eventually(lambda: len(found := scaled.replicas()) == 2 and sorted(found), "both report")
                texts = {f"{name} {number} {TEXT}": name for name in names for number in range(3)}
                for text, name in texts.items():
                    write(scaled, name, text, eventually)
                enough.set()
                assert sum(future.result() for future in loading) > 8  # raises what a request raised
                eventually(lambda: scaled.running() == 1, "there is one replica under little load", 120)
            finally:
                enough.set()
                done.set()
            assert light.result() > 8
        usages = {text: scaled.ask(text, "warm?").usage for text in texts}
        (stayed,) = {usage.warmkv["replica"] for usage in usages.values()}
        assert stayed in names
        assert all(usage.cache_read_input_tokens > 8 * 64 for usage in usages.values())
        eventually(lambda: telemetry.HANDED_BYTES.exported in metrics(), "what was handed over is measured")
