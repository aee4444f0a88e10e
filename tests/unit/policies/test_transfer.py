import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import Config, RoutingConfig, load
from warmkv.policies.routing import View, rank
from warmkv.policies.transfer import (
    Fetch,
    RunningLine,
    TransferTerms,
    TransferTimes,
    choose_donor,
    choose_successor,
    pieces,
)

REPLICAS = ["a", "b", "c"]
DEPTHS = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)).map(lambda depths: tuple(sorted(depths)))


def planned(warm, config, load=None):
    return choose_donor(REPLICAS, warm, load or {}, config)


def test_the_donor_is_who_holds_most_in_memory():
    config = RoutingConfig()
    assert planned({"a": (20, 20, 20), "b": (5, 30, 30), "c": (0, 0, 50)}, config) == Fetch("b", 30)
    assert planned({"a": (20, 20, 20), "b": (20, 20, 20)}, config, {"a": 1}) == Fetch("b", 20)


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_pieces_hold_as_much_as_they_may_and_everything_once(sizes, most):
    found = [*pieces(sizes, most)]
    assert [at for piece in found for at in piece] == [*range(len(sizes))]
    totals = [sum(sizes[at] for at in piece) for piece in found]
    assert all(total <= most or len(piece) == 1 for total, piece in zip(totals, found, strict=True))
    for total, following in zip(totals, found[1:], strict=False):
        assert total + sizes[following.start] > most


def test_nobody_fetches_what_is_not_worth_it():
    assert planned({}, RoutingConfig()) is None
    assert planned({"a": (0, 0, 50)}, RoutingConfig()) is None  # on disk alone
    assert planned({"gone": (50, 50, 50)}, RoutingConfig()) is None
    few = {"a": (8, 8, 8)}
    assert planned(few, RoutingConfig()) == Fetch("a", 8)
    assert planned({"a": (7, 7, 7)}, RoutingConfig()) is None
    assert planned(few, RoutingConfig(transfer=False)) is None
    assert planned(few, RoutingConfig(transfer="always")) == Fetch("a", 8, always=True)


@given(st.dictionaries(st.sampled_from([*REPLICAS, "gone"]), DEPTHS), st.sampled_from(["prefix_cost", "round_robin"]))
def test_a_plan_names_a_replica_that_has_what_it_promises(warm, policy):
    config = RoutingConfig(policy=policy)
    fetch = planned(warm, config)
    held = {name: warm[name][1] for name in REPLICAS if name in warm}
    if fetch is None:
        assert max(held.values(), default=0) < 8
    else:
        assert held[fetch.donor] == fetch.blocks == max(held.values())
        assert fetch.donor in rank(View(REPLICAS, [], warm, {}, 16, 0, fetch), config, random.Random(0))


CHAINS = st.lists(st.binary(min_size=2, max_size=2), min_size=1, max_size=8, unique=True)


@given(CHAINS, st.dictionaries(st.sampled_from([*REPLICAS, "gone"]), st.integers(1, 8)))
def test_who_holds_most_of_a_chain_takes_it_over(chain, depths):
    holders = {key: [name for name, depth in depths.items() if depth > at] for at, key in enumerate(chain)}
    peer, held = choose_successor(chain, REPLICAS, holders)
    known = {name: min(len(chain), depths.get(name, 0)) for name in REPLICAS}
    assert held == known[peer] == max(known.values())


def test_chains_that_begin_alike_stay_together_and_all_are_spread():
    chance = random.Random(0)
    taken = []
    for _ in range(300):
        first = chance.randbytes(16)
        heirs = {choose_successor([first, *rest], REPLICAS, {}) for rest in ([], [b"x"], [b"y", b"z"])}
        assert len(heirs) == 1
        taken.append(heirs.pop()[0])
        assert choose_successor([first], [*REPLICAS, "d"], {})[0] in (taken[-1], "d")  # few move when there is one more
    assert min(taken.count(name) for name in REPLICAS) > 70


# --- measured times

SECONDS = st.floats(0, 10)
AMOUNTS = st.floats(0, 1e9)


@given(st.lists(st.tuples(AMOUNTS, SECONDS), max_size=50), st.floats(0.5, 100))
def test_a_line_never_promises_less_than_no_time(measurements, half_life):
    line = RunningLine.guessed(0.01, 1e-9, 1e6)
    for amount, seconds in measurements:
        line = line.measured(amount, seconds, half_life)
        assert line.each >= 0
        assert line.start >= 0
        assert line.start + line.each * line.amount == pytest.approx(line.seconds, abs=1e-9)


def test_before_anything_is_measured_the_guess_holds():
    line = RunningLine.guessed(0.02, 1e-9, 1e7)
    assert (line.start, line.each) == (pytest.approx(0.02), pytest.approx(1e-9))


def test_a_line_comes_to_what_is_measured_and_follows_when_that_changes():
    chance, line = random.Random(0), RunningLine.guessed(0.5, 1e-6, 1e6)
    for start, each in ((0.01, 3e-9), (0.1, 1e-8)):
        for _ in range(200):
            amount = chance.uniform(0, 1e8)
            line = line.measured(amount, start + each * amount, 8)
        assert line.each == pytest.approx(each, rel=0.02)
        assert line.start == pytest.approx(start, rel=0.2)


def test_a_line_is_the_weighted_fit_of_numpy():
    chance, half_life = np.random.default_rng(1), 5.0
    amounts = chance.uniform(0, 1e6, 40)
    seconds = 0.02 + 2e-7 * amounts + chance.normal(0, 0.01, 40)
    line = RunningLine(0.0, 0.0, amounts[0], seconds[0])
    for amount, duration in zip(amounts[1:], seconds[1:], strict=True):
        line = line.measured(amount, duration, half_life)
    weights = 0.5 ** (np.arange(40)[::-1] / half_life)
    weights[1:] *= 1 - 0.5 ** (1 / half_life)  # the first stands for all before it
    slope, start = np.polyfit(amounts, seconds, 1, w=np.sqrt(weights))
    assert (line.each, line.start) == (pytest.approx(slope), pytest.approx(start))


def test_where_all_amounts_are_equal_that_amount_is_predicted_right():
    line = RunningLine.guessed(0.5, 1e-6, 1e6)
    for _ in range(200):
        line = line.measured(4e6, 0.25, 8)
    assert line.start + line.each * 4e6 == pytest.approx(0.25)


def test_terms_follow_the_settings():
    flags = ("transfer.byte_seconds=2e-9", "cluster.drain_seconds=60", "gateway.stall_seconds=90")
    terms = TransferTerms.of(load(flags=flags, environ={}))
    assert (terms.byte_seconds, terms.handover_seconds, terms.timeout_seconds) == (2e-9, 20, 3)


def test_a_fetch_is_worth_it_while_computing_takes_longer():
    terms = TransferTerms.of(Config())
    times = TransferTimes.of(replace(terms, token_seconds=1e-3, start_seconds=0.1, byte_seconds=1e-8))
    assert times.gain(1000, 1 << 20) == pytest.approx(1 - 0.1 - 1e-8 * (1 << 20))
    slow_link = times
    for nbytes in (1 << 10, 1 << 20) * 20:
        slow_link = slow_link.fetched(nbytes, 2.0)
    assert slow_link.gain(1000, 1 << 20) < 0
    fast_model = times
    for tokens in (500, 1000, 2000) * 20:
        fast_model = fast_model.computed(tokens, 0.1 + 1e-6 * tokens)
    assert fast_model.gain(1000, 1 << 20) < 0  # what a prefill takes by itself is not saved
    assert times.gain(1000, 1 << 20) > 0


def test_what_went_badly_is_tried_again_after_a_while():
    times = TransferTimes.of(TransferTerms.of(Config())).fetched(0, 60.0)
    assert times.gain(4096, 1 << 20) < 0
    tries = 0
    while times.gain(4096, 1 << 20) < 0:
        times, tries = times.declined(), tries + 1
    assert 10 < tries < 1000
