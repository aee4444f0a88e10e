"""The service on a cluster of several nodes, with what a fault test needs to break it and to see that it is whole."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import requests

from tests.faults.load import LONG, QUESTIONS, Load, Outcome, Reply, ask
from tests.faults.network import Network, can_make_namespaces
from tests.faults.nodes import Cluster, redis
from tests.polling import until
from warmkv.config import Config, parse
from warmkv.platform.document import serve_document
from warmkv.platform.local import free_port
from warmkv.platform.operator_key import with_operator

# Ray and Serve notice faults within seconds here, so that the tests need not wait for minutes; but none so short that a
# part of a slow, busy machine passes for a broken one. What hangs or is cut off here stays so, however long it takes.
QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",  # replicas count as much as their clients
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # each turn costs processor time, of which the tests have little
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # as `warmkv serve` and the manifests have it
}
SETTINGS: dict[str, Any] = {
    "engine": {"threads": 1},
    "cluster": {
        "replicas": 2,
        "gateways": 2,
        "drain_seconds": 2.0,
    },
    "gateway": {"stall_seconds": 10.0, "allow_open": True},  # health checks have half of it
}
OPERATOR = {"x-api-key": "operator of the tests"}  # headers
NODES = {"head": 0, "a": 1, "b": 1}  # with CPUs, of which a replica takes one
POLICIES = ["full", "snapkv@0.5"]  # that are in force in turn


@dataclass
class Service:
    """The service under test; `expected` has the answers of the undisturbed cluster."""

    cluster: Cluster
    url: str
    config: Config
    records: Path
    store: str | None  # the address of the Redis
    settings: Path  # a file with those of `config` that say how long draining takes
    expected: dict[tuple[int, str], Reply] = field(default_factory=dict)
    policy: str = POLICIES[0]

    def learn(self) -> None:
        """Ask everything under each policy that will be in force, and note what a warm cluster reads."""
        for policy, questions in zip(POLICIES, (QUESTIONS, [*QUESTIONS, *LONG]), strict=True):
            for question in questions:
                reply = ask(self.url, question, question.policy or policy)
                assert reply.end is not None
                self.expected[question.number, reply.policy] = reply

    def get(self, path: str) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/v1/warmkv/{path}", headers=OPERATOR, timeout=30)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def blocks(self) -> int:
        """Return distinct blocks that the directory knows; 0 while it does not answer."""
        with suppress(requests.RequestException):
            return int(self.get("replicas")["blocks"])
        return 0

    def names(self) -> dict[str, set[str]]:
        """Return the parts that are there; empty while nobody can tell."""
        with suppress(requests.RequestException):
            replicas = {name for name, known in self.get("replicas")["replicas"].items() if "phase" not in known}
            return {"replicas": replicas, "gateways": set(self.get("policy")["parts"])}
        return {"replicas": set(), "gateways": set()}

    def is_whole(self, but: Mapping[str, set[str]] = MappingProxyType({})) -> bool:
        """Whether as many replicas and gateways are there as there should be, `but` not the very same."""
        wanted, found = self.config.cluster, self.names()
        counts = (len(found["replicas"]), len(found["gateways"]))
        return counts == (wanted.replicas, wanted.gateways) and not any(found[kind] == but[kind] for kind in but)

    def make_whole(self) -> None:
        """Give every test a cluster with all its nodes, whatever became of the one before."""
        for name, node in list(self.cluster.nodes.items()):
            if self.cluster.network:
                self.cluster.network.heal(name)
            if not node.find_program("raylet"):
                self.cluster.remove(name)
                self.cluster.add(name, NODES.get(name, 1))
        until(self.is_whole, "all replicas and gateways are there")

    def change_policy(self) -> int:
        """Bring the other policy into force, as an operator would who tries again if it fails; the version."""
        self.policy = POLICIES[1 - POLICIES.index(self.policy)]
        body = {"changes": {"compression.policy": self.policy}, "why": "in the middle of a fault"}

        def change() -> Any:
            with suppress(requests.RequestException):
                answer = requests.put(f"{self.url}/v1/warmkv/policy", json=body, headers=OPERATOR, timeout=30)
                return answer.ok and answer.json()["version"]

        version: int = until(change, "the policy is changed")
        return version

    def check_books(self) -> None:
        """Nothing is billed twice; and once nobody asks any more, no slot, pinned block or booking is left."""
        assert self.config.gateway.access_log is not None
        billed = [json.loads(line)["id"] for line in self.config.gateway.access_log.read_text().splitlines()]
        assert len(billed) == len(set(billed))

        def idle() -> bool:
            try:
                found = self.get("replicas")
            except requests.RequestException:  # too busy to answer
                return False
            for replica in found["replicas"].values():
                if any(replica[name] for name in ("waiting", "decoding", "slots", "workspace_bytes", "pinned_bytes")):
                    return False
            routers = found["routers"].values()
            return len(routers) > 0 and not any(router["booked"] for router in routers)

        until(idle, "nothing is held for requests that have ended")

    def survives(
        self,
        name: str,
        strike: Callable[[], None],
        mend: Callable[[], dict[str, float] | None] = lambda: None,
        *,
        hold: float = 2.0,
        replica: str | None = None,
        loses: Sequence[str] = (),
        breaks_streams: bool = False,
        breaks_all: bool = False,
    ) -> None:
        """Load before, during and after a fault, in the middle of which the policy is changed; everything is checked.

        Streams from `replica` are half read when it strikes. Every answer is right, whole and billed once, or an error,
        and an error only where the fault takes the client's own connection along. `loses` are the kinds of parts that
        do not survive. It is mended after `hold` seconds; what `mend` returns is recorded with the figures.
        """
        with Load(self.url, self.expected) as load, ThreadPoolExecutor(1) as operator:
            load.wait(lambda seen: len(seen) >= 6, "answers before the fault")
            until(self.is_whole, "all replicas and gateways are there")
            names = until(lambda: all((found := self.names()).values()) and found, "their names are known")

            def half_read() -> int:  # on a busy machine they may be over before the last one is begun
                streams = [load.stream(question, replica or min(names["replicas"])) for question in LONG]
                return sum(stream.is_alive() for stream in streams)

            halfway = until(half_read, "streams are half read")
            before, begun = len(load.outcomes), time.monotonic()
            strike()
            changing = operator.submit(self.change_policy)
            time.sleep(hold)
            measured = mend() or {}
            version = changing.result()
            until(lambda: self.is_whole({kind: names[kind] for kind in loses}), "all replicas and gateways are back")
            whole = time.monotonic() - begun
            load.wait(lambda seen: self._is_warm(seen, version), "the hit rate is back")
            warm = time.monotonic() - begun
        during = load.outcomes[before:]
        failed = {streamed: load.failed(streams=streamed) for streamed in (True, False)}
        figures = {
            "fault": name,
            "requests": len(during),
            "streams_half_read": halfway,
            "wrong": len(load.wrong()),
            "failed": len(failed[False]),
            "broken_streams": len(failed[True]),
            "slowest_seconds": round(max(outcome.ended - outcome.begun for outcome in during), 1),
            "whole_seconds": round(whole, 1),
            "warm_seconds": round(warm, 1),
            **measured,
        }
        print(json.dumps(figures))
        with self.records.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        assert not load.wrong(), load.wrong()[0]
        assert breaks_all or not failed[False], failed[False][0]
        assert breaks_all or breaks_streams or not failed[True], failed[True][0]
        self.check_books()

    def _is_warm(self, seen: list[Outcome], version: int) -> bool:
        """Whether the last answer to every question read what a warm cluster reads, under the new policy."""
        last = {outcome.question.number: outcome.reply for outcome in seen if outcome.question in QUESTIONS}
        replies = {number: reply for number, reply in last.items() if reply is not None}
        if len(replies) < len(QUESTIONS):
            return False
        expected = sum(self.expected[number, reply.policy].cached for number, reply in replies.items())
        read = sum(reply.cached for reply in replies.values())
        return read >= 0.9 * expected and all(reply.version >= version for reply in replies.values())


@pytest.fixture(scope="session")
def network() -> Iterator[Network | None]:
    """Yield a network of our own, with its head's end open to this process; None where the machine does not let us."""
    if not can_make_namespaces():
        yield None
        return
    made = Network()
    try:
        made.join("head")
        yield made
    finally:
        made.remove()


@pytest.fixture
def service(cluster: Service) -> Service:
    cluster.make_whole()
    return cluster


@pytest.fixture(scope="module")
def cluster(network: Network | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield two replicas on two nodes, two gateways, and a head that computes nothing; its state in Redis if there is
    one.
    """
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        if network:
            stack.enter_context(network.entered("head"))
        host = network.join("head") if network else "127.0.0.1"
        store = stack.enter_context(redis(host))
        cluster = Cluster({**QUICK, **({"RAY_REDIS_ADDRESS": store} if store else {})}, network)
        stack.callback(cluster.stop)
        cluster.add_all(NODES)
        port = free_port(host)
        reached = {"host": host, "port": port, "access_log": str(folder / "access.jsonl")}
        config = parse({**SETTINGS, "gateway": {**SETTINGS["gateway"], **reached}})
        config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
        document = {**serve_document(config), "proxy_location": "HeadOnly"}
        file = folder / "document.json"
        file.write_text(json.dumps(document))
        cluster.start(file)
        settings = folder / "warmkv.yaml"
        settings.write_text(json.dumps({"cluster": SETTINGS["cluster"]}))
        made = Service(cluster, f"http://{host}:{port}", config, folder / "recovery.jsonl", store, settings)
        until(made.is_whole, "the service is there")
        made.learn()
        yield made
