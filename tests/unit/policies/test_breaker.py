"""The circuit breaker of a router, in virtual time."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import RoutingConfig
from warmkv.policies.breaker import FAILURES, LONGEST_SECONDS, Breaker
from warmkv.policies.dispatcher import Dispatcher

REPLICAS = ["a", "b", "c"]


class Routing:
    """A dispatcher whose clock the test sets; requests are named by number."""

    def __init__(self) -> None:
        self.now, self.number = 0.0, 0
        self.dispatcher = Dispatcher(RoutingConfig(), 16, Random(0), lambda: self.now)

    def send(self) -> tuple[int, str]:
        self.number += 1
        return self.number, self.dispatcher.choose(self.number, [], REPLICAS).order[0]

    def end(self, request: int, replica: str | None, outcome: str) -> None:
        self.dispatcher.in_flight.release(request)
        self.dispatcher.ended(request, replica, outcome)  # type: ignore[arg-type]

    def goes_to(self, requests: int) -> set[str]:
        """Where so many requests go that come at once and leave no trace."""
        sent = [self.send() for _ in range(requests)]
        for request, replica in sent:
            self.end(request, replica, "none")
        return {replica for _, replica in sent}


def failing(routing: Routing, replica: str, times: int) -> None:
    for number in range(times):
        routing.dispatcher.ended(f"lost {number}", replica, "failed")


def test_a_replica_that_fails_fast_does_not_draw_the_traffic():
    """It is idle whenever the next request comes, so that load alone would send it nearly everything."""
    routing, got = Routing(), dict.fromkeys(REPLICAS, 0)
    held: list[tuple[int, str]] = []
    for _ in range(60):
        request, replica = routing.send()
        got[replica] += 1
        if replica == "a":
            routing.end(request, replica, "failed")
        else:
            held.append((request, replica))
    assert got["a"] == FAILURES


def test_it_opens_after_so_many_failures_in_a_row():
    routing = Routing()
    failing(routing, "a", FAILURES - 1)
    assert "a" in routing.goes_to(12)
    routing.dispatcher.ended("whole", "a", "ok")
    failing(routing, "a", FAILURES - 1)  # they begin anew
    assert "a" in routing.goes_to(12)
    failing(routing, "a", 1)
    assert routing.goes_to(12) == {"b", "c"}


def test_one_request_tries_it_after_a_while_and_its_answer_closes_it():
    routing = Routing()
    failing(routing, "a", 3)
    routing.now = 4.9
    assert routing.goes_to(12) == {"b", "c"}
    routing.now = 5.1
    sent = [routing.send() for _ in range(12)]
    (trial,) = [request for request, replica in sent if replica == "a"]
    routing.end(trial, "a", "ok")
    assert "a" in routing.goes_to(12)
    assert len(routing.dispatcher.breaker) == 0


def trial(routing: Routing) -> int:
    """Return the request that tries "a"; the others are gone."""
    sent = [routing.send() for _ in range(12)]
    for request, replica in sent:
        if replica != "a":
            routing.end(request, replica, "ok")
    (tried,) = [request for request, replica in sent if replica == "a"]
    return tried


def test_the_while_doubles_with_every_trial_that_fails_up_to_the_limit():
    routing = Routing()
    failing(routing, "a", 3)
    for wait in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        routing.now += wait - 0.1
        assert routing.goes_to(12) == {"b", "c"}
        routing.now += 0.2
        routing.end(trial(routing), "a", "failed")


def test_what_began_before_it_opened_does_not_make_it_wait_longer():
    routing = Routing()
    failing(routing, "a", 16)  # all that were there fail together
    routing.now = 5.1
    assert trial(routing)


def test_a_trial_whose_client_leaves_or_that_went_elsewhere_makes_room_for_the_next():
    routing = Routing()
    failing(routing, "a", 3)
    routing.now = 5.1
    routing.end(trial(routing), "a", "none")
    routing.end(trial(routing), "b", "ok")  # "a" was full
    routing.end(trial(routing), None, "none")
    lost = trial(routing)
    assert routing.goes_to(12) == {"b", "c"}
    routing.now = 10.2  # nobody will ever hear of it
    assert trial(routing) != lost


def test_if_all_keep_failing_all_stay():
    routing = Routing()
    for replica in REPLICAS:
        failing(routing, replica, 3)
    assert routing.goes_to(12) == set(REPLICAS)


def test_who_was_not_tried_comes_before_who_failed_this_request():
    routing = Routing()
    for replica in REPLICAS:
        failing(routing, replica, 3)
    assert routing.dispatcher.choose("x", [], REPLICAS, avoid={"a", "b"}).order == ["c"]


def test_a_request_for_other_replicas_closes_no_circuit():
    """It may go to those of one group only."""
    routing = Routing()
    failing(routing, "a", 3)
    routing.dispatcher.choose("of another group", [], ["b"])
    assert routing.goes_to(12) == {"b", "c"}


def test_replicas_that_are_gone_are_forgotten():
    routing = Routing()
    failing(routing, "gone", 3)
    routing.dispatcher.breaker.keep(REPLICAS)
    assert len(routing.dispatcher.breaker) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(REPLICAS), st.sampled_from(["ok", "none", "failed"]), st.floats(0, 20)), max_size=60
    )
)
def test_whatever_happens_every_replica_is_tried_again_within_the_limit(events):
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    for number, (replica, outcome, passed) in enumerate(events):
        now[0] += passed
        if replica not in breaker.shut():
            breaker.sent(number, replica)
        breaker.ended(number, replica, outcome)
    now[0] += LONGEST_SECONDS
    assert breaker.shut() == set()


def test_a_replica_is_ready_unless_its_circuit_is_open():
    """`/readyz` asks from another thread, so nothing is forgotten; what may have a trial takes requests."""
    routing = Routing()
    breaker = routing.dispatcher.breaker
    assert breaker.taking(REPLICAS) == REPLICAS
    failing(routing, "a", FAILURES - 1)
    assert breaker.taking(REPLICAS) == REPLICAS
    failing(routing, "a", 1)
    assert breaker.taking(REPLICAS) == ["b", "c"]
    assert (breaker.taking(["a"]), breaker.taking([]), len(breaker)) == ([], [], 1)
    routing.now = 5.0
    assert breaker.taking(["a"]) == ["a"]
    breaker.sent("trial", "a")
    assert breaker.taking(["a"]) == []
    routing.dispatcher.ended("trial", "a", "ok")
    assert breaker.taking(["a"]) == ["a"]
