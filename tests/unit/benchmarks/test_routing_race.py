"""The race of the router runs from end to end with an index that takes no time to build."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import routing_race
from benchmarks.routing import decision, simulated
from benchmarks.routing.simulated import PEERS, KVAware, PrefixAffinity
from warmkv.policies import routing
from warmkv.policies.routing import View
from warmkv.prefixes.index import PrefixIndex


def test_a_quick_run_measures_decisions_the_tree_and_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(decision, "TREE_PROMPTS", 20)
    path = tmp_path / "race.json"
    arguments = ["--quick", "--repeats", "1", "--blocks", "4000", "--replicas", "3", "--json", str(path)]
    assert routing_race.main(arguments) == 0
    content = json.loads(path.read_text())
    figures = {each["name"]: each for each in content["figures"]}
    assert {"machine", "versions", "commit", "figures", "settings"} <= content.keys()
    assert figures["decision_microseconds_p50"]["value"] > 0
    assert (
        figures["worst_decision_microseconds_p99"]["value"] >= figures["worst_decision_microseconds_p50"]["value"] > 0
    )
    assert figures["decision_times_faster_than_tree"]["target"] == 20
    assert figures["tree_match_microseconds_p50"]["value"] > 0
    assert figures["simulated_ttft_p50_vs_affinity_pressure"]["value"] > 0
    assert figures["simulated_ttft_p99_vs_kv_aware_hot"]["value"] > 0
    assert figures["simulated_ttft_p50_vs_affinity_own_half"]["value"] > 0
    for where in ("index", "directory"):
        assert figures[f"{where}_bytes_per_block"]["value"] > 16


def test_the_index_holds_as_many_blocks_as_asked_for_and_the_questions_are_known_in_part():
    index = PrefixIndex()
    questions = decision.fill(index, 10_000, decision.replicas(4), random.Random(1))
    assert len(index) == pytest.approx(10_000, rel=0.1)
    depths = [max((held[-1] for held in index.longest_match(asked).values()), default=0) for asked in questions]
    assert all(len(asked) == decision.CHAIN for asked in questions)
    assert min(depths) < decision.SHARED < max(depths) <= decision.CHAIN


def test_every_replica_holds_another_share_of_the_hardest_prompt():
    index, names = PrefixIndex(), decision.replicas(16)
    hashes = decision.worst(index, names, random.Random(1))
    depths = index.longest_match(hashes)
    assert [depths[name][-1] for name in names] == [16 * number for number in range(1, 17)]


@pytest.mark.parametrize(
    "arguments",
    [["--blocks", "1"], ["--only", "nothing"], ["--repeats", "0"], ["--rounds", "0"], ["--cores", "2"]],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        routing_race.main(arguments)
    assert ended.value.code == 2


def test_a_missed_target_is_told():
    measured = {
        "decision_microseconds_p50": [20.0, 40.0, 50.0],
        "tree_match_microseconds_p50": [800.0, 800.0, 1000.0],
        "index_bytes_per_block": [34.0],
    }
    met = {each.name: each.met for each in routing_race._figures(routing_race.Run(), measured)}
    assert met["decision_microseconds_p50"] is False
    assert met["decision_times_faster_than_tree"] is True
    assert met["index_bytes_per_block"] is True
    assert met["ttft_p50_vs_affinity_hot"] is False  # not measured
    missing = routing_race._figures(routing_race.Run(), {"decision_microseconds_p50": [1.0]})
    assert missing[0].met is False


def test_the_prefix_router_s_rule_goes_by_what_was_sent_and_then_by_queues():
    """Send prompts as its tree would know them; a tenth of a prompt is the least that counts as a match."""
    rule, rng = PrefixAffinity(), random.Random(0)
    keys = [bytes([at]) for at in range(40)]

    def sent(hashes, **load):
        return rule(View(["a", "b", "c"], hashes, {}, load, 4, 0), None, rng)[0]

    first = sent(keys[:20])
    assert sent(keys[:20], **{first: 100}) == first  # however loaded
    others = [name for name in "abc" if name != first]
    assert sent(keys[20:30], **{others[0]: 5}) == others[1]  # nothing matches: the emptiest, the shorter queue of both
    assert sent([*keys[:1], *(bytes([1, at]) for at in range(19))]) == others[0]  # too little matches


def test_the_kv_aware_rule_goes_by_blocks_to_compute_and_distinct_blocks_in_use():
    keys, other = [bytes([at]) for at in range(20)], [bytes([1, at]) for at in range(20)]
    rule = KVAware()

    def best(hashes=keys, **known):
        view = View(["a", "b", "c"], hashes, known.pop("warm", {}), known.pop("load", {}), 4, 0, **known)
        return rule(view, None, random.Random(0))[0]

    assert best(warm={"b": (5, 20, 20), "c": (6, 6, 6)}) == "c"  # what lies below the device is not in its events
    assert best(warm={"b": (15, 15, 15)}, prefill={"b": 14}) == "b"
    assert best(warm={"b": (15, 15, 15)}, prefill={"b": 16}) != "b"
    assert best(other, warm={"b": (20, 20, 20)}) == "b"
    assert best(other, warm={"b": (1, 1, 1)}, load={"b": 1}) == "b"  # whose blocks the one in flight has as well
    assert best(keys, warm={"b": (19, 19, 19)}, load={"b": 2}) != "b"  # and here none
    assert best(keys, warm={"b": (19, 19, 19)}) == "b"  # they have ended


def test_the_bound_computes_what_one_cache_of_all_the_memory_lacks_and_nothing_twice():
    case = simulated.CASES["pressure"]
    shape = replace(case.traffic, rate=9.0, sessions=20)
    records, turns = simulated.sessions(shape, 1)
    left = simulated.what_is_left(records, turns, case)
    rate, _ = simulated.outcome(records, turns, "prefix_cost", simulated.AT_ONCE, case.config(1))
    asked = sum(record.input_tokens for record in records)
    assert sum(record.input_tokens for record in left) == pytest.approx((1 - rate) * asked)
    reused, ttft = simulated.outcome(left, turns, simulated.BOUND, simulated.STEP, case.config())
    assert reused == 0
    for rule in ("prefix_cost", *PEERS):
        assert np.mean(ttft) <= np.mean(simulated.outcome(records, turns, rule, simulated.STEP, case.config())[1])


@pytest.mark.parametrize("peer", PEERS)
def test_the_rule_of_the_service_is_as_before_when_the_race_is_over(peer):
    before = dict(routing.POLICIES)
    records, turns = simulated.sessions(simulated.TRAFFIC, 1)
    assert len({record.hashes[0] for record in records}) <= simulated.TRAFFIC.prompts
    assert all(records[turn].arrival == records[follow.previous].arrival for turn, follow in turns.items())
    with simulated._ruled_by(peer):
        assert isinstance(routing.POLICIES["prefix_cost"], PEERS[peer])
    assert before == routing.POLICIES
