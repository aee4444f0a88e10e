"""From an attempt to a replica's queue: who gets it, who waits, what is cancelled, and what that costs."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import pytest

from tests import clocks
from tests.clocks import SkippingLoop
from tests.unit.platform.exchanges import until
from tests.unit.platform.wires import Cluster
from tests.unit.replicas.conftest import make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import load
from warmkv.platform.gateway.apis.errors import ApiError, ReplicaFailedError
from warmkv.platform.gateway.resume import Attempt
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.mask_table import pack
from warmkv.replicas.frames import LONGEST_ORDER, Orders, encode_order
from warmkv.replicas.links import Link
from warmkv.replicas.protocol import (
    Admitted,
    Constraint,
    Finished,
    GenerateRequest,
    QueueFullError,
    Refused,
    UnservableRequestError,
)


def play(scenario: Callable[[Cluster], Coroutine[Any, Any, None]], *flags: str, replicas: int = 2) -> None:
    async def run() -> None:
        cluster = Cluster(replicas, load(flags=flags, environ={}))
        try:
            await scenario(cluster)
        finally:
            cluster.replies.close()

    clocks.run(run(), SkippingLoop)


def attempt(name: str = "r", **more: Any) -> Attempt:
    return Attempt(replace(make_request(prompt(4), name=name), **more))


async def settle(cluster: Cluster) -> None:
    """Have everything that was sent arrive."""
    for _ in range(6):
        await asyncio.sleep(0)
        for replica in cluster.replicas:
            replica.deliver(1 << 20)


def loads(cluster: Cluster) -> dict[str, int]:
    return {replica.name: len(replica.answers) for replica in cluster.replicas}


def test_orders_come_out_as_they_went_in_however_the_bytes_are_cut():
    sent = [(7, make_request(prompt(40))), (8, None), (1 << 40, make_request(prompt(3), name="b"))]
    data = b"".join(encode_order(*order) for order in sent)
    for size in (1, 5, 11, 1000):
        orders, came = Orders(), list[Any]()
        for at in range(0, len(data), size):
            came += orders.feed(data[at : at + size])
        assert came == sent
    with pytest.raises(ValueError, match="more than"):
        Orders().feed(b"\0" * 8 + (LONGEST_ORDER + 1).to_bytes(4, "big"))


def test_requests_of_one_turn_are_one_message_and_no_call_of_ray():
    """On the way to the replica and back; the routers of Serve, its handle and its replicas have no part in it."""
    called: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code)

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        attempts = [attempt(str(number)) for number in range(16)]
        sys.setprofile(note)
        try:
            boxes = [cluster.sender.send(each) for each in attempts]
            await settle(cluster)
            cluster.replicas[0].step(9)
            await settle(cluster)
        finally:
            sys.setprofile(None)
        assert cluster.replicas[0].connection.messages == 1
        assert [type(await box.__anext__()) for box in boxes] == [Admitted] * 16

    play(scenario, replicas=1)
    assert not [code for code in called if "/ray/" in code.co_filename]
    ours = [code for code in called if "/warmkv/" in code.co_filename]
    assert len(ours) / 16 <= 64, Counter(code.co_qualname for code in ours)


def test_a_replica_without_room_lets_the_next_one_have_it():
    """Its word of that is between it and the gateway: no attempt is over, and it is asked again a little later."""

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        first = cluster.replicas[0]
        take, asked = first.link._take, []

        def full(link: Link, stream: int, request: GenerateRequest | None) -> None:
            asked.append(stream)
            link.send(stream, Refused("busy"))

        first.link._take = full
        boxes = [cluster.sender.send(attempt(str(number))) for number in range(6)]
        await settle(cluster)
        assert asked
        assert loads(cluster) == {"0": 0, "1": 6}
        for box in boxes:
            assert isinstance(await box.__anext__(), Admitted)
        assert cluster.router._dispatcher.in_flight.load == {"1": 6}
        before = len(asked)
        cluster.sender.send(attempt("later"))
        await settle(cluster)
        assert len(asked) == before  # not within BUSY_SECONDS
        first.link._take, cluster.now = take, 1.0
        for number in range(6):
            cluster.sender.send(attempt(f"again {number}"))
        await settle(cluster)
        assert loads(cluster)["0"] > 0

    play(scenario)


def test_where_all_are_full_requests_wait_in_line_and_the_line_has_an_end():
    flags = ("engine.max_slots=1", "engine.max_queue=1", "cluster.max_queued_requests=3")

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        boxes = [cluster.sender.send(attempt(str(number))) for number in range(8)]
        await settle(cluster)
        assert loads(cluster) == {"0": 2, "1": 2}
        with pytest.raises(ApiError, match="Too many requests are waiting") as refused:
            await boxes[7].__anext__()
        assert (refused.value.status, refused.value.reason) == (529, "gateway_queue")
        await boxes[5].aclose()  # its client leaves
        for _ in range(8):
            for replica in cluster.replicas:
                replica.step(9)
            await settle(cluster)
            for box in boxes:
                if box._events and isinstance(box._events[-1], Finished):
                    await box.aclose()
        assert [box.ended for box in boxes] == [True] * 5 + [False, True, False]
        await until(lambda: cluster.idle)

    play(scenario, *flags)


def test_what_goes_on_when_a_gateway_must_stop_ends_with_an_error_that_nobody_retries():
    """One is in a replica, one in line, and one comes later: as from a replica that has just failed."""

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        boxes = [cluster.sender.send(attempt(str(number))) for number in range(2)]
        await settle(cluster)
        cluster.replies.stop()
        for box in (*boxes, cluster.sender.send(attempt("later"))):
            while box._events:
                await box.__anext__()
            with pytest.raises(ApiError, match="being stopped") as ended:
                await box.__anext__()
            assert (ended.value.type, ended.value.status) == ("overloaded_error", 529)
            await box.aclose()
        await settle(cluster)
        assert loads(cluster) == {"0": 0}

    play(scenario, "engine.max_slots=1", "engine.max_queue=1", replicas=1)


def test_who_waits_in_line_is_routed_once_when_a_replica_has_room_for_it():
    """Its free replica has failed it, or its circuit is open: events of others must not make it decide again."""
    flags = ("engine.max_slots=1", "engine.max_queue=1")

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        full = [cluster.sender.send(attempt(str(number), replica="0")) for number in range(2)]
        await settle(cluster)
        assert loads(cluster) == {"0": 2, "1": 0}
        failed = Attempt(make_request(prompt(4), name="failed"), replica="1")
        waiting = cluster.sender.send(Attempt(make_request(prompt(4), name="again"), (failed,)))
        for _ in range(5):
            cluster.sender.follow({"0": "", "1": ""})
        assert waiting in cluster.sender._line
        before = cluster.router._dispatcher._turn
        assert before == 2  # the first two
        cluster.replicas[0].step(9)
        await settle(cluster)
        await full[0].aclose()  # it has ended
        await settle(cluster)
        assert waiting not in cluster.sender._line
        assert cluster.router._dispatcher._turn == before + 1
        for box in (*full, waiting):
            await box.aclose()

    play(scenario, *flags)


def test_a_request_waits_for_a_replica_that_runs_and_is_connected():
    async def scenario(cluster: Cluster) -> None:
        cluster.sender.follow({})
        await settle(cluster)
        assert cluster.sender.taking() == 0
        box = cluster.sender.send(attempt())
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 0}
        cluster.sender.follow({"1": "", "2": ""})
        assert cluster.sender.missing
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 1}
        assert cluster.sender.taking() == 1
        cluster.sender.follow({"0": ""})  # "1" is drained: what it has goes on
        other = cluster.sender.send(attempt("other"))
        await settle(cluster)
        assert loads(cluster) == {"0": 1, "1": 1}
        for _ in range(3):
            for replica in cluster.replicas:
                replica.step(9)
            await settle(cluster)
        assert box.ended
        assert other.ended

    play(scenario)


def test_a_request_goes_where_its_policy_is_served_and_waits_there():
    """Replica "1" is of a group that serves `full` alone, and takes one request at a time."""
    small = "cluster.groups={small: {engine: {kind: vllm, max_slots: 1, max_queue: 1}}}"

    async def scenario(cluster: Cluster) -> None:
        cluster.sender.follow({"1": "small"})
        await settle(cluster)
        waiting = cluster.sender.send(attempt("compressed", policy=PolicySpec.model_validate("snapkv@4")))
        full = [cluster.sender.send(attempt(f"full {number}")) for number in range(3)]
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 2}  # two of those that it can compute
        cluster.sender.follow({"0": "", "1": "small"})
        await settle(cluster)
        assert loads(cluster) == {"0": 2, "1": 2}
        assert [cluster.sender.group_of(name) for name in "01"] == ["", "small"]
        assert {request.policy.name for request, _ in cluster.replicas[1].answers.values()} == {"full"}
        for box in (waiting, *full):
            await box.aclose()
        await settle(cluster)
        assert cluster.idle

    play(scenario, small)


def test_who_waits_for_one_group_takes_no_place_of_those_that_wait_for_another():
    """Keep replica "1" of vLLM's group busy; no replica of the own engine's runs."""
    flags = ("engine.kind=vllm", "engine.max_slots=1", "engine.max_queue=1", "cluster.max_queued_requests=1")

    async def scenario(cluster: Cluster) -> None:
        cluster.sender.follow({"1": ""})
        await settle(cluster)
        boxes = [cluster.sender.send(attempt(str(number))) for number in range(2)]
        compressed = PolicySpec.model_validate("snapkv@4")
        boxes += [cluster.sender.send(attempt(f"compressed {number}", policy=compressed)) for number in range(2)]
        boxes += [cluster.sender.send(attempt(f"more {number}")) for number in range(2)]
        await settle(cluster)
        assert [box in cluster.sender._line for box in boxes] == [False, False, True, False, True, False]
        for box in (boxes[3], boxes[5]):
            with pytest.raises(ApiError, match="Too many requests are waiting"):
                await box.__anext__()
        for box in boxes:
            await box.aclose()
        await settle(cluster)
        assert cluster.idle

    play(scenario, *flags, "cluster.groups={own: {engine: {kind: warmkv}}}")


def test_a_circuit_is_that_of_its_replica_until_it_is_gone():
    """Route for another group: the circuit stays open; what fails behind the end of a replica is forgotten later."""

    async def scenario(cluster: Cluster) -> None:
        breaker = cluster.router._dispatcher.breaker
        cluster.sender.follow({"0": "", "1": "own", "2": ""})
        await settle(cluster)
        for number in range(3):
            breaker.ended(number, "0", "failed")
        box = cluster.sender.send(attempt(policy=PolicySpec.model_validate("snapkv@4")))
        await settle(cluster)
        assert (loads(cluster)["1"], breaker.shut()) == (1, {"0"})
        cluster.sender.follow({"1": "own", "2": ""})
        assert breaker.shut() == {"0"}  # it is drained
        cluster.replicas[0].connection.connection_lost(None)
        assert len(breaker) == 0
        breaker.ended(3, "0", "failed")
        cluster.replicas[2].connection.connection_lost(None)
        cluster.sender.follow({"1": "own"})
        assert len(breaker) == 0
        await box.aclose()

    play(scenario, "engine.kind=vllm", "cluster.groups={own: {engine: {kind: warmkv}}}", replicas=3)


@pytest.mark.parametrize(("policy", "moves"), [("full", False), ("snapkv@4", True)])
def test_blocks_are_fetched_only_where_all_that_may_compute_a_request_can(policy, moves):
    async def scenario(cluster: Cluster) -> None:
        cluster.sender.follow({"0": "", "1": "own", "2": "own"})
        await settle(cluster)
        hashes = tuple(bytes([block]) * 16 for block in range(40))
        cluster.router._dispatcher.index.add("1", pack(hashes))
        asked = attempt(policy=PolicySpec.model_validate(policy), hashes=hashes)
        box = cluster.sender.send(asked)
        assert (asked.request.fetch is not None) == moves
        await box.aclose()

    play(scenario, "engine.kind=vllm", "cluster.groups={own: {engine: {kind: warmkv}}}", replicas=3)


def test_what_no_replica_can_compute_is_refused():
    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        sampling = replace(attempt().request.sampling, constraint=Constraint("regex", "a+"))
        box = cluster.sender.send(attempt(sampling=sampling, resume=(5,)))
        with pytest.raises(UnservableRequestError, match="the rest of a constrained answer that another replica began"):
            await box.__anext__()
        assert cluster.idle

    play(scenario, "engine.kind=vllm")


def test_a_request_that_is_given_up_counts_until_its_replica_has_ended_it():
    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        box = cluster.sender.send(attempt())
        await settle(cluster)
        await box.aclose()
        await asyncio.sleep(0)
        assert sum(cluster.router._dispatcher.in_flight.load.values()) == 1
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 0}
        assert cluster.idle

    play(scenario)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_replica_that_is_lost_fails_what_it_had_and_comes_again(deaf):
    """`deaf`: it connects anew before the gateway has heard that the connection before is lost."""

    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        (replica,) = cluster.replicas
        box = cluster.sender.send(attempt())
        await settle(cluster)
        assert isinstance(await box.__anext__(), Admitted)
        if deaf:
            before = replica.connection
            replica.answers = {}
            replica.connect()
            await settle(cluster)
            before.connection_lost(None)
        else:
            replica.cut(0)
        with pytest.raises(ReplicaFailedError, match="connection was lost"):
            await box.__anext__()
        await box.aclose()
        again = cluster.sender.send(attempt("again"))
        await settle(cluster)
        assert isinstance(await again.__anext__(), Admitted)
        await again.aclose()
        await settle(cluster)
        assert cluster.idle

    play(scenario, replicas=1)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (Refused("full", "64 wait", 64, 3.5), QueueFullError),
        (Refused("unservable", "too long"), UnservableRequestError),
    ],
)
def test_a_refusal_is_raised_as_the_engine_said_it(refusal, error):
    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        for replica in cluster.replicas:
            replica.link._take = lambda link, stream, request: link.send(stream, refusal)
        sent = attempt()
        box = cluster.sender.send(sent)
        await settle(cluster)
        assert sent.others == 1
        with pytest.raises(error, match=refusal.message) as raised:
            await box.__anext__()
        assert getattr(raised.value, "retry_after", None) == refusal.retry_after
        await box.aclose()
        await settle(cluster)
        assert cluster.idle

    play(scenario)


def test_other_gateways_requests_count_as_load_for_a_while():
    async def scenario(cluster: Cluster) -> None:
        in_flight = cluster.router._dispatcher.in_flight
        await settle(cluster)
        cluster.sender.admitted(cluster.replicas[0].connection, 40)
        assert in_flight.known_load(["0", "1"]) == {"0": 40, "1": 0}
        for number in range(3):
            cluster.sender.send(attempt(str(number)))
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 3}
        cluster.now = 11.0
        assert in_flight.known_load(["0"]) == {"0": 0}

    play(scenario, "cluster.gateways=2", "routing.policy=prefix_cost")


def test_a_fault_of_routing_takes_the_shortest_queue(monkeypatch):
    async def scenario(cluster: Cluster) -> None:
        await settle(cluster)
        cluster.sender.send(attempt("first"))
        monkeypatch.setattr(cluster.router._dispatcher, "choose", lambda *_, **__: 1 / 0)
        for number in range(3):
            cluster.sender.send(attempt(str(number)))
        await settle(cluster)
        assert loads(cluster) == {"0": 2, "1": 2}
        assert [labels for name, labels in cluster.recorded.added if labels == {"reason": "fault"}] != []

    play(scenario)
