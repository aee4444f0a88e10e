"""Choosing and booking, without Ray: herds spread, bookings balance, settings change while requests are in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from warmkv.config import RoutingConfig
from warmkv.policies.dispatcher import (
    BUSY_DECISIONS,
    HALF_LIFE,
    KEPT_SECONDS,
    OTHERS_SECONDS,
    Dispatcher,
    InFlightRequests,
    Recent,
)
from warmkv.policies.transfer import Fetch
from warmkv.prefixes.mask_table import pack

REPLICAS = ["a", "b", "c", "d"]
HASHES = [bytes([number]) * 16 for number in range(100)]


def dispatcher(slots: int = 16, clock: Callable[[], float] = lambda: 0.0, **settings: object) -> Dispatcher:
    made = Dispatcher(RoutingConfig.model_validate(settings), slots, Random(0), clock)
    for replica in REPLICAS:
        made.index.add(replica, b"")
    return made


def test_a_herd_spreads_once_the_warm_replica_is_overloaded_and_returns_when_it_is_free():
    """64 requests for one prefix at once. Each sees the bookings of those before it, so they cannot all pick "a"."""
    routing = dispatcher(overload=8)
    routing.index.add("a", pack(HASHES))
    choices = [routing.choose(str(number), HASHES, REPLICAS) for number in range(64)]
    taken = Counter(choice.order[0] for choice in choices)
    assert taken == routing.in_flight.load
    assert [choice.order[0] for choice in choices[:8]] == ["a"] * 8
    assert max(taken.values()) - min(taken[replica] for replica in REPLICAS) <= 8
    assert min(taken[replica] for replica in REPLICAS) > 0
    assert [choices[0].reason, choices[8].reason] == ["warm", "load"]
    for number in range(64):
        routing.in_flight.release(str(number))
    assert routing.in_flight.load == {}
    assert routing.choose("later", HASHES, REPLICAS).order[0] == "a"


def test_without_booking_the_herd_would_not_spread():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    for number in range(64):
        assert routing.choose(str(number), HASHES, REPLICAS).order[0] == "a"
        routing.in_flight.release(str(number))


def test_what_other_routers_sent_counts_as_load_too():
    routing = dispatcher(overload=3)
    routing.index.add("a", pack(HASHES))
    routing.in_flight.told("a", 2)
    assert routing.choose("1", HASHES, REPLICAS).order[0] == "a"
    assert routing.in_flight.known_load(REPLICAS)["a"] == 3
    assert routing.choose("2", HASHES, REPLICAS).order[0] != "a"


def test_a_replicas_word_tells_of_other_routers_for_a_while_and_own_requests_end_in_the_meantime():
    now = 0.0
    in_flight = InFlightRequests(lambda: now, 0.0)
    in_flight.book("1", "a")
    in_flight.told("a", 3)
    assert in_flight.known_load(["a", "b"]) == {"a": 3, "b": 0}
    in_flight.release("1")
    assert in_flight.known_load(["a", "b"]) == {"a": 2, "b": 0}
    now = OTHERS_SECONDS
    assert in_flight.known_load(["a"]) == {"a": 2}
    now += 0.5
    assert in_flight.known_load(["a"]) == {"a": 0}
    in_flight.told("a", 3)
    in_flight.drop("a")
    assert in_flight.known_load(["a"]).get("a", 0) == 0


def test_a_replica_that_the_request_names_is_taken_if_it_is_there():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    choice = routing.choose("1", HASHES, REPLICAS, wanted="c")
    assert (choice.order[0], choice.reason, choice.matched) == ("c", "asked", 0)
    assert sorted(choice.order) == REPLICAS
    assert routing.choose("2", HASHES, REPLICAS, wanted="gone").order[0] == "a"


def test_a_replica_that_does_not_end_what_was_given_up_is_left_out_until_it_does():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    assert routing.choose("1", HASHES, REPLICAS).order[0] == "a"
    routing.in_flight.give_up("1")
    routing.in_flight.give_up("never booked")
    again = routing.choose("2", HASHES, REPLICAS)
    assert sorted(again.order) == ["b", "c", "d"]
    assert routing.choose("3", HASHES, REPLICAS, wanted="a").order[0] != "a"
    assert routing.choose("4", HASHES, ["a"]).order == ["a"]  # there is nothing else
    routing.in_flight.release("1")
    assert routing.choose("5", HASHES, REPLICAS).order[0] == "a"


def test_replicas_to_avoid_are_left_out_of_one_decision_if_there_are_others():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    assert sorted(routing.choose("1", HASHES, REPLICAS, avoid={"a", "b"}).order) == ["c", "d"]
    assert sorted(routing.choose("2", HASHES, REPLICAS, avoid=set(REPLICAS)).order) == REPLICAS
    assert routing.choose("3", HASHES, REPLICAS).order[0] == "a"


def test_settings_of_a_request_hold_for_its_decision_and_bookings_stay():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    first = routing.choose("1", HASHES, REPLICAS)
    assert (first.order[0], first.reason, first.matched) == ("a", "warm", 100)
    second = routing.choose("2", HASHES, REPLICAS, config=RoutingConfig(policy="least_loaded"))
    assert second.order[-1] == "a"
    assert second.reason == "least_loaded"
    assert sum(routing.in_flight.load.values()) == 2


def test_whoever_gets_a_request_is_told_where_its_prefix_is_warm():
    routing = dispatcher(overload=1)
    routing.index.add("a", pack(HASHES))
    routing.index.add("b", pack(HASHES[:50]))
    choices = [routing.choose(str(number), HASHES, REPLICAS) for number in range(4)]
    assert len({choice.order[0] for choice in choices}) == 4
    assert [choice.fetch for choice in choices] == [Fetch("a", 100)] * 4
    assert routing.choose("4", HASHES, ["b", "c"]).fetch == Fetch("b", 50)


def test_a_match_that_is_too_long_is_found_out_by_the_decisions_that_rely_on_it():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    routing.index.remove("a", pack([HASHES[10]]))
    assert routing.choose("1", HASHES, REPLICAS).matched == 100
    for _ in range(200):
        routing.mend(routing.choose("1", HASHES, REPLICAS), HASHES)
    assert routing.choose("1", HASHES, REPLICAS).matched == 10


def test_a_cold_prompt_is_told_as_such():
    assert dispatcher().choose("1", HASHES, REPLICAS).reason == "cold"


def test_a_booking_counts_once_however_often_it_is_made_or_released():
    in_flight = InFlightRequests(lambda: 0.0, 0.0)
    in_flight.book("x", "a")
    in_flight.book("x", "b")  # Serve took another replica than the first choice
    in_flight.book("y", "b")
    assert in_flight.load == {"b": 2}
    in_flight.release("x")
    in_flight.release("x")
    in_flight.release("unknown")
    assert in_flight.load == {"b": 1}
    in_flight.release("y")
    assert in_flight.load == {}


def test_what_was_just_computed_is_known_until_a_late_index_tells_of_it():
    now = 0.0
    routing = Dispatcher(RoutingConfig(), 16, Random(0), lambda: now, late=True)
    home = routing.choose("1", HASHES, REPLICAS, leaves=100).order[0]
    routing.in_flight.began("1")
    routing.in_flight.release("1", home)
    given_up = [bytes([1]) + each for each in HASHES]
    elsewhere = routing.choose("2", given_up, REPLICAS, leaves=100).order[0]
    routing.in_flight.release("2", elsewhere)  # without a token: nothing was stored
    now = KEPT_SECONDS - 0.01
    again = routing.choose("3", HASHES, REPLICAS)
    assert (again.order[0], again.reason) == (home, "in_flight_prefixes")
    assert routing.choose("4", given_up, REPLICAS).reason == "cold"
    now = KEPT_SECONDS
    assert routing.choose("5", HASHES, REPLICAS).reason == "cold"
    assert not routing.in_flight.in_flight_prefixes


def test_what_was_just_computed_is_gone_with_its_replica():
    routing = Dispatcher(RoutingConfig(), 16, Random(0), lambda: 0.0, late=True)
    for number in "12":  # one has ended, one goes on
        home = routing.choose(number, HASHES, REPLICAS, leaves=100).order[0]
        routing.in_flight.began(number)
    routing.in_flight.release("1", home)
    routing.in_flight.drop(home)
    assert routing.choose("3", HASHES, REPLICAS).reason == "cold"
    assert routing.in_flight.load == {routing.choose("3", HASHES, REPLICAS).order[0]: 1}


def test_a_long_prompt_that_is_being_computed_keeps_others_away_until_its_first_token():
    routing = dispatcher(load_weight=0.0)
    assert routing.choose("long", HASHES, REPLICAS).order[0] == "a"
    assert routing.in_flight.prefill == {"a": 100}
    assert [routing.choose(str(turn), [], REPLICAS).order[-1] for turn in range(4)] == ["a"] * 4
    routing.in_flight.began("long")
    assert routing.in_flight.prefill == {}
    assert "a" in {routing.choose(str(turn), [], REPLICAS).order[0] for turn in range(100)}


def test_new_prompts_keep_away_from_a_replica_with_a_hot_prefix_even_while_it_is_idle():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    taken = Counter()
    for number in range(400):
        hashes = HASHES if number % 2 else [f"{number:<16}".encode()]
        taken[routing.choose("1", hashes, REPLICAS).order[0], number % 2] += 1
    assert taken["a", 1] == 200
    assert taken["a", 0] <= 1
    assert min(taken[name, 0] for name in "bcd") > 50


@given(st.lists(st.tuples(st.sampled_from(REPLICAS), st.floats(0, 100)), min_size=1, max_size=50), st.integers(0, 4000))
def test_what_was_given_counts_less_and_less(given, before):
    recent = Recent()
    for _ in range(before):
        recent.give("before", 1.0)
    for replica, amount in given:
        recent.give(replica, amount)
    shares = dict.fromkeys(("before", *REPLICAS), 0.0)
    for replica, amount in [("before", 1.0)] * before + given:
        shares = {name: share * 2 ** (-1 / HALF_LIFE) for name, share in shares.items()}
        shares[replica] += amount
    total, found = sum(shares.values()), sum(recent.amounts.values())
    for name, share in shares.items():
        assert recent.amounts.get(name, 0.0) * total == pytest.approx(share * found, rel=1e-6, abs=1e-6 * total * found)


def test_what_is_warm_or_can_be_fetched_is_not_computed():
    routing = dispatcher(load_weight=50)
    routing.index.add("a", pack(HASHES[:60]))
    assert [routing.choose(str(turn), HASHES, ["a", "b"]).order[0] for turn in range(2)] == ["a", "b"]
    assert routing.in_flight.prefill == {"a": 40, "b": 40}
    routing.in_flight.book("1", "c")  # Serve took another replica
    assert routing.in_flight.prefill == {"a": 40, "c": 40}


class BookingMachine(RuleBasedStateMachine):
    """Requests that are routed, routed again, end early, late or twice, on replicas that die: nothing leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = dispatcher(overload=2)
        self.routing.index.add("a", pack(HASHES))
        self.booked: dict[str, str] = {}
        self.begun: set[str] = set()

    @rule(request=st.integers(0, 9).map(str))
    def choose(self, request: str) -> None:
        self.booked[request] = self.routing.choose(request, [b"cold" * 4, *HASHES[:6]], REPLICAS).order[0]
        self.begun.discard(request)

    @rule(request=st.integers(0, 9).map(str))
    def begins(self, request: str) -> None:
        self.routing.in_flight.began(request)
        self.begun.add(request)

    @rule(request=st.integers(0, 9).map(str), replica=st.sampled_from(REPLICAS))
    def routed_elsewhere(self, request: str, replica: str) -> None:
        if request not in self.booked:
            self.begun.add(request)  # nobody said what there is to compute
        self.routing.in_flight.book(request, replica)
        self.booked[request] = replica

    @rule(request=st.integers(0, 9).map(str), replica=st.sampled_from([*REPLICAS, None]))
    def ends(self, request: str, replica: str | None) -> None:
        self.routing.in_flight.release(request, replica)
        if replica in (None, self.booked.get(request)):
            self.booked.pop(request, None)

    @precondition(lambda self: self.booked)
    @rule(replica=st.sampled_from(REPLICAS))
    def dies(self, replica: str) -> None:
        self.routing.in_flight.drop(replica)
        self.booked = {request: at for request, at in self.booked.items() if at != replica}

    @invariant()
    def balances(self) -> None:
        assert self.routing.in_flight.load == Counter(self.booked.values())
        waiting = [replica for request, replica in self.booked.items() if request not in self.begun]
        assert self.routing.in_flight.prefill == {replica: 7 * n for replica, n in Counter(waiting).items()}


TestBookings = BookingMachine.TestCase


def test_a_prefix_that_is_being_computed_draws_those_that_come_meanwhile():
    routing = dispatcher()
    first = routing.choose("1", HASHES, REPLICAS, leaves=100)
    assert first.reason == "cold"
    second = routing.choose("2", [*HASHES[:90], b"other" * 4], REPLICAS, leaves=91)
    assert (second.order[0], second.reason, second.matched) == (first.order[0], "in_flight_prefixes", 0)
    assert second.fetch is None  # what is not there yet can be fetched nowhere
    assert (first.expected, second.expected) == (0, 90)  # which the first leaves behind
    assert routing.in_flight.prefill == {first.order[0]: 101}
    routing.in_flight.release("1")
    routing.in_flight.release("2")
    assert routing.choose("3", HASHES, REPLICAS).reason == "cold"  # the index does not know that it is there


def test_what_is_not_kept_draws_nobody():
    routing = dispatcher()
    first = routing.choose("1", HASHES, REPLICAS)
    assert routing.choose("2", HASHES, REPLICAS).order[0] != first.order[0]


def test_a_prefix_that_is_being_computed_overloads_nobody():
    routing = dispatcher(overload=3)
    chosen = [routing.choose(str(number), HASHES, REPLICAS, leaves=100).order[0] for number in range(32)]
    assert chosen[:3] == [chosen[0]] * 3
    assert set(chosen[:8]) > {chosen[0]}
    assert 4 <= min(routing.in_flight.load.values()) <= max(routing.in_flight.load.values()) < 16
    assert sorted(routing.in_flight.load) == REPLICAS


def test_where_serve_sends_a_request_its_prefix_comes():
    routing = dispatcher()
    order = routing.choose("1", HASHES, REPLICAS, leaves=100).order
    routing.in_flight.book("1", order[-1])
    assert routing.choose("2", HASHES, REPLICAS, leaves=100).order[0] == order[-1]
    routing.in_flight.drop(order[-1])
    assert routing.choose("3", HASHES, REPLICAS, leaves=100).reason == "cold"


def test_a_request_that_is_routed_again_does_not_follow_itself():
    """Serve asks again while replicas are full."""
    routing = dispatcher()
    routing.choose("1", HASHES, REPLICAS, leaves=100)
    again = routing.choose("1", HASHES, REPLICAS, leaves=100)
    assert again.reason == "cold"
    assert routing.in_flight.prefill == {again.order[0]: 100}


def test_the_busier_the_replicas_the_less_a_wait_weighs_against_what_is_warm():
    routing = dispatcher(overload=1000)
    routing.index.add("a", pack(HASHES[:20]))
    routing.in_flight.book("long", "a", 60)
    assert routing.choose("idle", HASHES, REPLICAS).reason == "load"
    for number, name in enumerate("bcd"):
        routing.in_flight.book(f"busy{number}", name, 1)
    for _ in range(10 * BUSY_DECISIONS):
        routing.choose("idle", HASHES, REPLICAS)
    assert routing.choose("idle", HASHES, REPLICAS).reason == "warm"
    for number in range(3):
        routing.in_flight.release(f"busy{number}")
    for _ in range(10 * BUSY_DECISIONS):
        routing.choose("idle", HASHES, REPLICAS)
    assert routing.choose("idle", HASHES, REPLICAS).reason == "load"


def test_what_other_groups_hold_and_have_to_do_decides_nothing():
    """Choose among one group's replicas: "v" and its like are of another, which holds the prompt and is busy."""
    routing = dispatcher()
    routing.index.add("v", pack(HASHES))
    first, second = (routing.choose(number, HASHES, ["a", "b"], leaves=100, whole=False) for number in "12")
    assert (second.order[0], first.reason, second.reason) == (first.order[0], "cold", "in_flight_prefixes")
    for name in "vwx":
        routing.choose(name, [name.encode() * 16], [name], leaves=1, whole=False)
    routing.in_flight.began("1")
    routing.in_flight.began("2")
    for _ in range(10 * BUSY_DECISIONS):
        routing.choose("3", [], ["a", "b"], whole=False)
    assert routing._busy < 0.01


def test_what_a_replica_holds_that_gets_nothing_keeps_no_herd_apart():
    routing = dispatcher()
    routing.index.add("a", pack(HASHES))
    routing.choose("given up", HASHES, REPLICAS)
    routing.in_flight.give_up("given up")
    first, second = (routing.choose(number, HASHES, REPLICAS, leaves=100) for number in "12")
    assert (second.order[0], second.reason) == (first.order[0], "in_flight_prefixes")
