import random
from itertools import pairwise
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import RoutingConfig
from warmkv.policies import routing
from warmkv.policies.routing import FETCH_SHARE, View, blocks_saved, rank
from warmkv.policies.transfer import TRANSFER_BLOCK, TRANSFER_MIN_BLOCKS, TRANSFER_START, choose_donor

REPLICAS = ["a", "b", "c"]
POLICIES = get_args(RoutingConfig.model_fields["policy"].annotation)
HASHES = [bytes([number]) * 16 for number in range(100)]
LOADS = st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 30))
DEPTHS = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)).map(lambda depths: tuple(sorted(depths)))


def device(**blocks):
    return {replica: (depth, depth, depth) for replica, depth in blocks.items()}


def order(warm=None, load=None, *, blocks=10, replicas=REPLICAS, slots=100, turn=0, seed=0, **settings):
    beside = ("prefill", "recent", "idle_share", "session", "slots_of")
    known = {name: settings.pop(name) for name in beside if name in settings}
    constants = {name: settings.pop(name) for name in [*settings] if name.isupper()}
    config, warm, load = RoutingConfig(**settings), warm or {}, load or {}
    view = View(replicas, HASHES[:blocks], warm, load, slots, turn, choose_donor(replicas, warm, load, config), **known)
    with patch.dict(vars(routing), constants):
        return rank(view, config, random.Random(seed))


def test_the_warm_replica_wins():
    assert order(device(b=9))[0] == "b"


def test_warmth_is_weighed_against_load():
    settings = {"load_weight": 4.0, "transfer": False, "ROOM_WEIGHT": 0.5}
    assert order(device(b=9), {"b": 3}, **settings)[0] == "b"  # 1.5 + 12 against 15
    assert order(device(b=9), {"b": 4}, **settings)[0] == "a"  # 1.5 + 16 against 15


def test_what_can_be_fetched_is_weighed_against_load():
    settings = {"load_weight": 3.4, "ROOM_WEIGHT": 0.5}
    assert order(device(b=8), {"b": 2}, **settings)[0] == "b"  # 3 + 6.8 against 2 + 2 + 4 + 5
    assert order(device(b=8), {"b": 3}, **settings)[0] == "a"  # 3 + 10.2 against 2 + 2 + 4 + 5
    assert order(device(b=7), {"b": 3}, **settings)[0] == "b"  # too few blocks to fetch: 4.5 + 10.2 against 15
    assert order({"b": (0, 0, 8)}, {"b": 3}, **settings, DISK_CREDIT=1)[0] == "b"  # nobody fetches from a disk


def test_a_session_that_the_request_names_decides_where_all_else_is_equal():
    places = {session: order(session=session)[0] for session in HASHES}
    assert set(places.values()) == set(REPLICAS)
    for session, place in list(places.items())[:9]:
        assert order(session=session, turn=1, replicas=REPLICAS[::-1])[0] == place
        others = [name for name in REPLICAS if name != place]
        assert order(device(**{others[0]: 2}), session=session)[0] == others[0]
        assert order(load={place: 3}, session=session, load_weight=1.0)[0] in others
        assert order(session=session, blocks=0, policy="sticky_session")[0] == place


def test_a_block_in_a_slower_tier_saves_less():
    assert blocks_saved((2, 6, 10)) == 2 + 0.75 * 4 + 0.25 * 4
    warm = {"a": (0, 0, 10), "b": (0, 6, 6), "c": (4, 4, 4)}
    assert order(warm, HOST_CREDIT=1.0, DISK_CREDIT=0.5, ROOM_WEIGHT=0.0) == ["b", "a", "c"]  # 6, 5 and 4 blocks
    assert order(warm, HOST_CREDIT=0.5, DISK_CREDIT=0.0, ROOM_WEIGHT=0.0) == ["c", "b", "a"]  # 4, 3 and 0
    assert order(warm, HOST_CREDIT=0.5, DISK_CREDIT=0.0, ROOM_WEIGHT=1.0) == ["a", "b", "c"]  # 10, 9 and 8


def test_a_block_that_is_stored_twice_takes_the_room_of_another():
    """Of two replicas as warm in memory, the one with the rest on its disk need not store it again."""
    warm = {"a": (4, 4, 4), "b": (4, 4, 10)}
    assert order(warm, DISK_CREDIT=0.0, transfer=False)[0] == "b"
    assert order(warm, DISK_CREDIT=0.0, transfer=False, ROOM_WEIGHT=0.0) == ["a", "b", "c"]


def test_waiting_for_a_slot_costs_more_than_decoding():
    settings = {"load_weight": 1.0, "QUEUE_WEIGHT": 9.0, "ROOM_WEIGHT": 0.0, "slots": 2}
    assert order(device(b=9), {"b": 2}, **settings)[0] == "b"  # 1 + 2 against 10
    assert order(device(b=9), {"b": 3}, **settings)[0] == "a"  # 1 + 3 + 9 against 10


def test_prompts_that_are_computed_before_cost_time():
    settings = {"load_weight": 0.0, "PREFILL_WEIGHT": 0.5, "ROOM_WEIGHT": 0.5, "transfer": False}
    assert order(prefill={"a": 1, "b": 2}, **settings) == ["c", "a", "b"]
    assert order(device(b=9), prefill={"b": 26}, **settings)[0] == "b"  # 1.5 + 13 against 15
    assert order(device(b=9), prefill={"b": 28}, **settings)[0] == "a"  # 1.5 + 14 against 15


def test_an_overloaded_replica_goes_last_however_warm():
    load = {"a": 3, "b": 7, "c": 2}
    settings = {"load_weight": 0.0, "overload": 5, "blocks": 100}
    assert order(device(b=100), load, **settings)[-1] == "b"
    assert order(device(b=100), {**load, "b": 6}, **settings)[0] == "b"


def test_the_busier_all_are_the_longer_the_queue_of_a_warm_replica_may_be():
    load, settings = {"a": 30, "b": 40, "c": 30}, {"overload": 5, "blocks": 100, "slots": 4, "transfer": False}
    for idle_share, first in ((1.0, "a"), (0.6, "a"), (0.4, "b"), (0.0, "b")):
        assert order(device(b=100), load, idle_share=idle_share, **settings)[0] == first
    assert order(device(b=20), load, idle_share=0.3, **settings)[0] != "b"  # 10 more wait, which count as 24 and 12


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_replicas_that_are_equal_take_turns(policy):
    firsts = [order(turn=turn, policy=policy)[0] for turn in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]


def test_of_equal_replicas_the_one_that_was_given_least_comes_first():
    recent = {"a": 2.0, "b": 0.5, "c": 1.0}
    assert order(recent=recent) == ["b", "c", "a"]
    assert order(device(a=1), recent=recent) == ["a", "b", "c"]
    assert order(None, {"b": 1}, recent=recent) == ["c", "a", "b"]


def test_least_loaded_is_by_load_alone():
    assert order(device(b=10), {"a": 1, "b": 2}, policy="least_loaded") == ["c", "a", "b"]


def test_round_robin_looks_at_nothing():
    assert order(device(b=10), {"c": 50}, turn=2, policy="round_robin") == ["c", "a", "b"]


def test_power_of_two_takes_the_less_loaded_of_a_random_pair():
    load = {"a": 0, "b": 1, "c": 2}
    orders = [order(None, load, policy="power_of_two", seed=seed) for seed in range(300)]
    firsts = [ranking[0] for ranking in orders]
    assert all(load[ranking[0]] < load[ranking[1]] for ranking in orders)
    assert firsts.count("a") / len(orders) == pytest.approx(2 / 3, abs=0.1)  # two of the three pairs have it
    assert "c" not in firsts
    assert order(replicas=["a"], policy="power_of_two") == ["a"]


def test_a_session_stays_where_it_is_and_few_move_when_a_replica_leaves():
    def home(session, replicas, blocks):
        hashes = [*(bytes([session, each]) * 8 for each in range(4)), *HASHES[:blocks]]
        view = View(replicas, hashes, {}, {"a": session}, 100, session)
        return rank(view, RoutingConfig(policy="sticky_session"), random.Random(0))

    rankings = [home(session, REPLICAS, 0) for session in range(200)]
    assert rankings == [home(session, REPLICAS, 50) for session in range(200)]  # later turns
    for session, ranking in enumerate(rankings):
        assert home(session, ["a", "b"], 0) == [replica for replica in ranking if replica != "c"]
    counts = [sum(ranking[0] == replica for ranking in rankings) for replica in REPLICAS]
    assert min(counts) > 40


def test_a_prompt_without_a_block_has_no_session():
    assert order(None, {"a": 1, "b": 2}, blocks=0, policy="sticky_session") == ["c", "a", "b"]


@given(st.sampled_from(POLICIES), st.dictionaries(st.sampled_from(REPLICAS), DEPTHS), LOADS, st.integers(0, 9))
def test_every_replica_is_ranked_once_whatever_the_policy(policy, warm, load, turn):
    ranking = order(warm, load, blocks=50, turn=turn, policy=policy)
    assert sorted(ranking) == REPLICAS
    assert ranking == order(warm, load, blocks=50, turn=turn, policy=policy)
    if policy in ("prefix_cost", "least_loaded"):
        least = min(load.get(replica, 0) for replica in REPLICAS)
        assert load.get(ranking[0], 0) - least < RoutingConfig().overload


@given(
    st.dictionaries(st.sampled_from(REPLICAS), DEPTHS),
    LOADS,
    LOADS,
    st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 30).map(float)),
    st.integers(1, 12),
    st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 12), max_size=2),
    st.booleans(),
    st.floats(0, 1),
)
def test_the_order_is_that_of_the_cost_as_it_is_defined(
    warm, load, prefill, recent, slots, slots_of, transfer, idle_share
):
    constants = {
        "load_weight": 0.5,
        "QUEUE_WEIGHT": 2.0,
        "PREFILL_WEIGHT": 0.25,
        "RECENT_WEIGHT": 3.0,
        "ROOM_WEIGHT": 0.75,
    }
    settings = {**constants, "load_weight": 0.5, "overload": 6, "transfer": transfer}
    known = {"prefill": prefill, "recent": recent, "idle_share": idle_share, "slots_of": slots_of}
    ranking = order(warm, load, blocks=50, slots=slots, **known, **settings)

    def cost(replica):
        busy, depths = load.get(replica, 0), warm.get(replica, (0, 0, 0))
        left = 50 - blocks_saved(depths)
        lacking = max([0, *(other[1] for other in warm.values())]) - depths[2]
        if transfer and lacking >= TRANSFER_MIN_BLOCKS:
            fetching = max(FETCH_SHARE, idle_share) * (TRANSFER_START + TRANSFER_BLOCK * lacking)
            left = min(left, left - lacking + fetching)
        overloaded = idle_share * (busy - min(load.get(name, 0) for name in REPLICAS)) >= 6
        waiting = idle_share * 2.0 * max(0, busy - slots_of.get(replica, slots)) + idle_share * 0.25 * prefill.get(
            replica, 0
        )
        share = recent.get(replica, 0.0) / max(1.0, sum(recent.values()))
        left += 0.75 * (50 - depths[2])
        return overloaded, left + idle_share * 0.5 * busy + waiting + 3.0 * share

    costs = [cost(replica) for replica in ranking]
    for (behind, lower), (further_behind, higher) in pairwise(costs):
        assert behind <= further_behind
        assert behind < further_behind or lower <= higher + 1e-6  # rounding, beside what puts a replica behind


def test_an_idle_replica_fetches_a_hot_prefix_that_keeps_another_one_busy():
    """Half of the replicas are busy, with requests that share 100 blocks and have 200 left to compute."""
    busy = {"prefill": {"a": 200}, "idle_share": 0.5, "blocks": 100}
    assert order(device(a=100), {"a": 12}, **busy)[0] != "a"
    assert order(device(a=100), {"a": 2}, **busy | {"prefill": {"a": 13}})[0] == "a"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_replica_is_no_choice(policy):
    assert order(replicas=[], policy=policy) == []
