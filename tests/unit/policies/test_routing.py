from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import RoutingConfig
from warmkv.policies.routing import rank

REPLICAS = ["a", "b", "c"]
COUNTS = st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 30))


def test_the_warm_replica_wins():
    assert rank(REPLICAS, 10, {"b": 9}, {}, RoutingConfig())[0] == "b"


def test_warmth_is_weighed_against_load():
    config = RoutingConfig(load_weight=4.0, overload=8)
    assert rank(REPLICAS, 10, {"b": 9}, {"b": 2}, config)[0] == "b"  # 1 + 8 against 10
    assert rank(REPLICAS, 10, {"b": 9}, {"b": 3}, config)[0] == "a"  # 1 + 12 against 10


def test_an_overloaded_replica_goes_last_however_warm():
    config = RoutingConfig(load_weight=0.0, overload=5)
    load = {"a": 3, "b": 7, "c": 2}
    assert rank(REPLICAS, 100, {"b": 100}, load, config) == ["c", "a", "b"]
    assert rank(REPLICAS, 100, {"b": 100}, {**load, "b": 6}, config)[0] == "b"


def test_equal_cold_replicas_are_chosen_by_load_then_by_name():
    config = RoutingConfig(load_weight=0.0)
    assert rank(["c", "a", "b"], 5, {}, {"a": 1}, config) == ["b", "c", "a"]


def test_booked_load_spreads_a_herd():
    """Twelve requests for one warm prefix at once: booking each choice keeps them from all landing on one replica."""
    config, load = RoutingConfig(load_weight=4.0), dict.fromkeys(REPLICAS, 0)
    for _ in range(12):
        load[rank(REPLICAS, 10, {"a": 10}, load, config)[0]] += 1
    assert load["a"] > load["b"] >= load["c"] > 0


@given(st.integers(0, 50), COUNTS, COUNTS)
def test_every_replica_is_ranked_once_whatever_the_order_given(blocks, warm, load):
    config = RoutingConfig()
    ranking = rank(REPLICAS, blocks, warm, load, config)
    assert sorted(ranking) == REPLICAS
    assert ranking == rank(REPLICAS[::-1], blocks, warm, load, config)
    least = min(load.get(replica, 0) for replica in REPLICAS)
    assert load.get(ranking[0], 0) - least < config.overload


def test_no_replica_is_no_choice():
    assert rank([], 1, {}, {}, RoutingConfig()) == []
