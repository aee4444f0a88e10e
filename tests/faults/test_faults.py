"""Parts of the cluster die under load, one after the other; nobody gets a wrong or a short answer, and it recovers."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import pytest
import requests

from tests.faults.conftest import Service
from tests.faults.network import Network
from tests.faults.nodes import CONTROL, DIRECTORY, GATEWAY
from tests.polling import PATIENCE, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


class Found(NamedTuple):
    """A replica, its process, and the node that it is on."""

    name: str
    pid: int
    node: str


def a_replica(service: Service) -> Found:
    """Return one that runs: for a moment, a gateway may still tell of one that the fault before has ended."""

    def found() -> Found | None:
        try:
            told = service.get("replicas")["replicas"]
        except requests.RequestException:
            return None
        pids = {status["pid"]: name for name, status in told.items() if "pid" in status}
        running = ((node, process.pid) for node, its in service.cluster.nodes.items() for process in its.processes())
        return min((Found(pids[pid], pid, node) for node, pid in running if pid in pids), default=None)

    return until(found, "a replica runs on one of the nodes")


def test_a_replica_is_killed(service: Service):
    name, pid, _ = a_replica(service)
    service.survives("replica killed", lambda: os.kill(pid, signal.SIGKILL), replica=name, loses=["replicas"])


def test_a_replica_hangs(service: Service):
    name, pid, _ = a_replica(service)
    service.survives("replica hung", lambda: os.kill(pid, signal.SIGSTOP), replica=name, loses=["replicas"])


def test_the_directory_is_killed(service: Service):
    (actor,) = service.cluster.find(DIRECTORY)
    blocks = until(service.blocks, "the directory answers")

    def restored() -> dict[str, float]:
        until(lambda: service.cluster.find(DIRECTORY), "the actor returns")
        returned = time.monotonic()
        until(lambda: service.blocks() >= blocks, "it knows as much as before")
        return {"restored_seconds": round(time.monotonic() - returned, 1)}

    service.survives("directory killed", lambda: actor.signal(signal.SIGKILL), restored, hold=0)


def test_the_policy_control_is_killed(service: Service):
    (actor,) = service.cluster.find(CONTROL)
    service.survives("policy control killed", lambda: actor.signal(signal.SIGKILL))


def test_a_gateway_is_killed(service: Service):
    gateway = service.cluster.find(GATEWAY)[0]
    service.survives("gateway killed", lambda: gateway.signal(signal.SIGKILL), loses=["gateways"], breaks_streams=True)


def test_the_gcs_is_killed_and_started_again(service: Service):
    needs_redis(service)
    cluster = service.cluster
    service.survives("GCS killed, and started again with Redis", cluster.kill_gcs, cluster.start_gcs)


def test_a_node_is_drained_and_stopped(service: Service):
    """As a pod ends whose place another one takes: its preStop hook, then SIGTERM. Not even a stream breaks."""
    needs_network(service)  # by its address the hook knows its node
    replica, _, name = a_replica(service)
    cluster, node = service.cluster, service.cluster.nodes[name]
    cluster.add(f"{name}2", 1)

    def stop() -> None:
        cluster.run(name, "warmkv", "k8s", "drain", "--config", str(service.settings), "--seconds", f"{PATIENCE}")
        for process in node.processes():
            process.signal(signal.SIGTERM)

    def replaced() -> None:
        until(lambda: not node.find_program("raylet"), "the node ends")
        cluster.remove(name)

    service.survives("node drained", stop, replaced, hold=0, replica=replica, loses=["replicas"])


@pytest.mark.soak(least=0.5)  # the tests above kill the same parts one by one
def test_a_node_is_removed(service: Service):
    """Whatever is on it goes at once; a new node takes its place, as an autoscaler would have it."""
    replica, _, node = a_replica(service)
    service.survives(
        "node removed",
        lambda: service.cluster.remove(node),
        lambda: service.cluster.add(node, 1),
        replica=replica,
        loses=["replicas"],
        breaks_streams=True,
    )


def test_a_link_is_cut_for_a_moment(service: Service):
    network = needs_network(service)
    node = a_replica(service).node
    service.survives("link cut for 2 s", lambda: network.cut(node), lambda: network.heal(node), breaks_streams=True)


@pytest.mark.soak(least=0.5)  # unit tests hold the rules: the silent are forgotten, their streams go on elsewhere
def test_a_link_is_cut_until_the_node_is_given_up(service: Service):
    network = needs_network(service)
    replica, _, name = a_replica(service)
    node = service.cluster.nodes[name]

    def mend() -> None:
        service.cluster.wait_until_given_up(name)
        network.heal(name)
        until(lambda: not node.find_program("raylet"), "the node ends itself")
        service.cluster.remove(name)
        service.cluster.add(name, 1)

    service.survives(
        "link cut", lambda: network.cut(name), mend, replica=replica, loses=["replicas"], breaks_streams=True
    )


def test_the_head_is_started_anew(service: Service):
    needs_redis(service)
    cluster = service.cluster
    service.survives(
        "head restarted with Redis", lambda: cluster.remove("head"), lambda: cluster.add("head", 0), breaks_all=True
    )


FAULTS = [
    test_a_replica_is_killed,
    test_a_replica_hangs,
    test_the_directory_is_killed,
    test_the_policy_control_is_killed,
    test_a_gateway_is_killed,
    test_the_gcs_is_killed_and_started_again,
    test_a_node_is_drained_and_stopped,
    test_a_node_is_removed,
    test_a_link_is_cut_for_a_moment,
    test_a_link_is_cut_until_the_node_is_given_up,
]


@pytest.mark.soak(least=1)  # below that there is hardly time for one, and `make test` has each
@pytest.mark.timeout(0)
def test_faults_come_in_any_order_for_as_long_as_is_asked(service: Service, soak_minutes: float):
    end, chance = time.monotonic() + 60 * soak_minutes, random.Random(0)
    while time.monotonic() < end:
        with suppress(pytest.skip.Exception):  # this machine cannot
            chance.choice(FAULTS)(service)
        service.make_whole()


def needs_network(service: Service) -> Network:
    if service.cluster.network is None:
        pytest.skip("this machine does not let us make network namespaces, whose links could be cut")
    return service.cluster.network


def needs_redis(service: Service) -> None:
    if not service.store:
        pytest.skip("redis-server is not installed: without it, what the head knew dies with it")
