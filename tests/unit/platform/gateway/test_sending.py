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
from tests.tokenizers import of_words
from tests.unit.platform.exchanges import until
from tests.unit.platform.wires import Cluster, Wire, ignore
from tests.unit.replicas.conftest import VOCABULARY, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import EngineConfig, PrefixCacheConfig, load
from warmkv.platform.gateway.apis.errors import ApiError, ReplicaFailedError
from warmkv.platform.gateway.resume import Attempt
from warmkv.policies.transfer import Fetch
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.mask_table import pack
from warmkv.replicas.answers import Answers
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.frames import LONGEST_ORDER, Orders, encode_order
from warmkv.replicas.links import Link
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import (
    Admitted,
    Constraint,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    QueueFullError,
    Refused,
    Started,
    UnservableRequestError,
)

LETTERS = of_words([chr(0x4E00 + token) for token in range(VOCABULARY)])


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
        router = cluster.router
        await settle(cluster)
        cluster.sender.admitted(cluster.replicas[0].connection, 40)
        assert router._queues(["0", "1"]) == {"0": 40}
        for number in range(3):
            cluster.sender.send(attempt(str(number)))
        await settle(cluster)
        assert loads(cluster) == {"0": 0, "1": 3}
        cluster.now = 11.0
        assert not router._queues(["0"])

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


# --- in the replica


class Fetches:
    """Brings nothing, when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    def helps(self, request: GenerateRequest) -> bool:
        return request.fetch is not None

    async def prepare(self, request: GenerateRequest) -> None:
        await self.may_end.wait()

    def started(self, request: GenerateRequest, started: Started) -> None: ...


class Heard(Link):
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(ignore, ignore)
        self.events: dict[int, list[Event]] = {}

    def send(self, stream: int, event: Event) -> None:
        self.events.setdefault(stream, []).append(event)

    def kinds(self, stream: int) -> list[type]:
        return [type(event) for event in self.events.get(stream, ())]


class Setup:
    def __init__(self, most: int = 9, **limits: Any) -> None:
        self.engine = Engine(
            prepare(random_model("llama")), EngineConfig(**limits), PrefixCacheConfig(), clock=lambda: 0.0
        )
        self.fetches, self.link = Fetches(), Heard()
        self.hung: Exception | None = None
        self.answers = Answers(OutputProcessor(self.engine, LETTERS, 1e9), self.fetches, self.check, most)

    def check(self) -> None:
        if self.hung is not None:
            raise self.hung

    def take(self, stream: int, new: int = 3, **more: Any) -> None:
        request = make_request(prompt(5, seed=stream), new=new, name=str(stream))
        self.answers.take(self.link, stream, replace(request, **more))

    async def finish(self) -> None:
        while self.engine.step():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)


def within(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_replica_answers_what_it_is_sent_and_takes_no_more_than_its_limit():
    async def scenario() -> None:
        here = Setup(most=2)
        for stream in range(3):
            here.take(stream)
        assert [here.link.events[stream][0] for stream in range(3)] == [Admitted(1), Admitted(2), Refused("busy")]
        assert here.answers.ongoing == 2
        await here.finish()
        assert here.answers.ongoing == 0
        for stream in range(2):
            assert here.link.kinds(stream)[:2] == [Admitted, Started]
            assert here.link.events[stream][-1] == Finished("length", 3)
        here.take(4)
        assert here.link.events[4] == [Admitted(1)]

    within(scenario)


def test_what_the_engine_refuses_is_said_to_the_gateway():
    async def scenario() -> None:
        here = Setup(max_slots=1, max_queue=1, max_context=64)
        for stream in range(3):
            here.take(stream)
        (full,) = [events[0] for events in here.link.events.values() if isinstance(events[0], Refused)]
        assert (full.reason, full.waiting) == ("full", 1)
        here.take(7, new=1000)
        assert isinstance(refused := here.link.events[7][0], Refused)
        assert refused.reason == "unservable"
        assert "64" in refused.message
        here.hung = RuntimeError("the engine has been in one step for 99 s")
        here.take(8)
        assert here.link.events[8] == [Failed("RuntimeError: the engine has been in one step for 99 s")]
        before = here.answers.ongoing
        assert before == 2
        await here.finish()
        assert here.answers.ongoing == 0

    within(scenario)


@pytest.mark.parametrize("fetches", [False, True])
def test_a_cancelled_request_is_told_ended_and_leaves_the_engine(fetches):
    async def scenario() -> None:
        here = Setup()
        here.take(1, new=400, **({"fetch": Fetch("other", 1)} if fetches else {}))
        await asyncio.sleep(0)
        if not fetches:
            here.engine.step()
        here.answers.take(here.link, 1, None)
        here.answers.take(here.link, 1, None)  # and again, as it is gone
        here.answers.take(here.link, 99, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [event for event in here.link.events[1] if isinstance(event, Finished)] == [Finished("cancelled", 0)]
        assert 99 not in here.link.events
        assert here.answers.ongoing == 0
        here.engine.step()
        assert here.engine.stats().decoding == here.engine.stats().waiting == 0

    within(scenario)


def test_a_prefix_is_fetched_before_the_request_is_submitted():
    async def scenario() -> None:
        here = Setup()
        here.take(1, fetch=Fetch("other", 1))
        await asyncio.sleep(0)
        assert 1 not in here.link.events
        here.fetches.may_end.set()
        await until(lambda: here.link.kinds(1) == [Admitted])
        await here.finish()
        assert isinstance(here.link.events[1][-1], Finished)

    within(scenario)


def test_a_lost_link_cancels_what_came_over_it_and_nothing_else():
    async def scenario() -> None:
        here, other = Setup(), Heard()
        here.take(1, new=400)
        here.answers.take(other, 1, make_request(prompt(6), new=3, name="other"))
        here.answers.lost(here.link)
        await here.finish()
        assert here.answers.ongoing == 0
        assert other.events[1][-1] == Finished("length", 3)

    within(scenario)


def test_a_replica_that_is_stopped_ends_what_it_has_and_takes_no_more():
    async def scenario() -> None:
        here = Setup()
        here.take(1)
        draining = asyncio.ensure_future(here.answers.drain())
        await asyncio.sleep(0)
        here.take(2)
        assert here.link.events[2] == [Refused("busy")]
        assert not draining.done()
        await here.finish()
        assert draining.done()
        assert here.link.events[1][-1] == Finished("length", 3)
        await here.answers.drain()  # at once

    within(scenario)


def test_an_answer_whose_text_cannot_be_made_fails_alone():
    async def scenario() -> None:
        here = Setup()
        here.take(1)
        here.take(2)
        (output, *_) = here.answers._outputs._outputs

        def no_text(token: int) -> str:
            raise ValueError("no text")

        output.detokenizer.push = no_text  # type: ignore[method-assign]
        await here.finish()
        assert here.link.events[1][-1] == Failed("ValueError: no text")
        assert here.link.events[2][-1] == Finished("length", 3)
        assert here.answers.ongoing == 0

    within(scenario)


def test_a_request_costs_a_replica_few_calls_outside_its_engine():
    """Of Python functions, from the bytes of an order to those of its end; nothing of it is a task. None is called for
    each token of a prompt.
    """
    called: list[CodeType] = []
    outside = ("/warmkv/replicas/answers", "/warmkv/replicas/links", "/warmkv/replicas/frames", "/asyncio/", "/ray/")
    submitting: list[CodeType] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            submitting.append(frame.f_code)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in outside):
            called.append(frame.f_code)

    async def scenario() -> None:
        here, wire = Setup(most=99), Wire()
        link = Link(here.answers.take, here.answers.lost)
        link.connection_made(wire)
        orders = [encode_order(number, make_request(prompt(5), new=2, name=str(number))) for number in range(16)]
        here.take(99)  # what is made once is made
        long = encode_order(98, make_request(prompt(200), new=2, name="98"))
        sys.setprofile(count)
        link.data_received(long)
        sys.setprofile(note)
        link.data_received(b"".join(orders))
        while here.engine.step():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sys.setprofile(None)
        assert wire.data.count(b'"finished"') == 17
        assert here.answers.ongoing == 0

    within(scenario)
    assert len(submitting) < 200, Counter(code.co_qualname for code in submitting)
    ours = [code for code in called if "/warmkv/" in code.co_filename]
    assert len(ours) / 16 <= 13, Counter(code.co_qualname for code in ours)
    assert "create_task" not in {code.co_name for code in called}
    assert not [code for code in called if "/ray/" in code.co_filename]
