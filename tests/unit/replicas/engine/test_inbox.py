"""The way into the engine: nothing overtakes anything, whatever the interleaving."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas.conftest import make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.platform.gateway.apis.errors import retry_after
from warmkv.replicas.completions import WINDOW, Completions
from warmkv.replicas.engine.inbox import ClosedError, Inbox
from warmkv.replicas.protocol import Finished, QueueFullError


def test_a_request_that_is_cancelled_while_the_inbox_is_drained_does_not_run(driver):
    busy = driver()

    def submit_and_cancel() -> None:  # as other threads do, between two looks of the engine into its queue
        busy.submit(make_request(prompt(9), new=400, name="left"))
        busy.engine.cancel("left")

    busy.engine.call(submit_and_cancel)
    busy.run()
    assert busy.finished("left").reason == "cancelled"
    assert busy.tokens("left") == []


def test_a_request_that_is_cancelled_at_once_does_not_run(driver):
    busy = driver()
    busy.submit(make_request(prompt(9), new=400, name="left"))
    busy.engine.cancel("left")
    busy.run()
    assert busy.finished("left").reason == "cancelled"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 3)), max_size=30))
def test_arrivals_and_actions_come_in_the_order_in_which_they_were_put(puts):
    """Some of them while others are taken: `depth` says from within how many actions."""
    put: list[tuple[int, bool]] = []
    taken: list[tuple[int, bool]] = []
    inbox: Inbox[tuple[int, bool]] = Inbox(taken.append)

    def insert(item: int, arrival: bool, depth: int) -> None:
        if depth:
            inbox.put(lambda: insert(item, arrival, depth - 1))
            return
        put.append((item, arrival))
        if arrival:
            inbox.submit((item, arrival), lambda arriving: None)
        else:
            inbox.put(lambda: taken.append((item, arrival)))

    for each in puts:
        insert(*each)
    inbox.drain()
    assert taken == put
    assert inbox.arriving == 0


def test_an_arrival_that_is_checked_counts_those_before_it_and_is_not_taken_if_refused():
    taken: list[str] = []
    inbox: Inbox[str] = Inbox(taken.append)
    seen: list[int] = []

    def full(arriving: int) -> None:
        seen.append(arriving)
        if arriving >= 2:
            raise QueueFullError("2 wait")

    for name in "ab":
        inbox.submit(name, full)
    with pytest.raises(QueueFullError):
        inbox.submit("c", full)
    inbox.drain()
    inbox.submit("d", full)
    inbox.close()
    assert (taken, seen) == (["a", "b", "d"], [0, 1, 2, 0])
    with pytest.raises(ClosedError):
        inbox.submit("e", full)
    with pytest.raises(ClosedError):
        inbox.put(lambda: None)


def test_an_action_that_fails_does_not_stop_the_others():
    taken: list[str] = []
    inbox: Inbox[str] = Inbox(taken.append)
    inbox.put(lambda: 1 / 0)  # type: ignore[arg-type]
    inbox.submit("next", lambda arriving: None)
    inbox.drain()
    assert taken == ["next"]


def test_the_time_until_there_is_room_follows_from_the_latest_ends():
    ends = Completions()
    ends.begin(100.0)
    assert ends.seconds(1, 105.0) is None
    ends.ended(102.0)
    ends.ended(104.0)
    assert ends.seconds(1, 104.0) == 2.0
    assert ends.seconds(3, 110.0) == 15.0  # none has ended for a while
    for number in range(2 * WINDOW):
        ends.ended(200.0 + number)
    assert ends.seconds(4, 200.0 + 2 * WINDOW - 1) == 4.0  # the slow ones are forgotten
    ends.begin(1000.0)
    assert ends.seconds(1, 1001.0) is None


def test_who_finds_no_room_is_told_when_there_will_be_some(driver):
    now = [0.0]
    busy = driver(clock=lambda: now[0], max_slots=1, max_queue=1)
    busy.submit(make_request(prompt(5), new=2, name="0"))
    busy.submit(make_request(prompt(5, seed=1), new=400, name="1"))
    while not any(isinstance(event, Finished) for event in busy.told["0"]):
        busy.engine.step()
        now[0] += 0.5
    took = now[0]
    busy.engine.step()
    busy.submit(make_request(prompt(5), name="2"))
    with pytest.raises(QueueFullError) as caught:
        busy.submit(make_request(prompt(5), name="3"))
    assert caught.value.waiting == 1
    assert caught.value.retry_after == pytest.approx(took, abs=0.5)


@settings(max_examples=5)
@given(st.none() | st.floats(0, 1000))
def test_the_estimate_survives_the_way_through_ray(seconds):
    from ray.exceptions import RayTaskError

    error = pickle.loads(pickle.dumps(QueueFullError("3 requests wait", 3, seconds)))
    assert (str(error), error.waiting, error.retry_after) == ("3 requests wait", 3, seconds)
    wrapped = RayTaskError("generate", "traceback", error).as_instanceof_cause()
    assert isinstance(wrapped, QueueFullError)
    assert retry_after(wrapped) == retry_after(error) == seconds
