"""Gateways that know what they sent themselves, and what replicas told them."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, logs, record, run
from warmkv.policies.dispatcher import OTHERS_SECONDS
from warmkv.simulator.cluster.gateways import SimulatedGateway
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

REPLICAS = ["a", "b", "c"]


def gateway(settings, alone, clock=lambda: 0.0):
    return SimulatedGateway(settings, lambda record, now: {}, alone, Random(0), clock)


def ranks(gateway, job, now=0.0):
    order, _ = gateway.choose(job, REPLICAS, now)
    gateway.in_flight.release(job.number)
    return list(order)


def test_a_gateway_counts_its_own_requests_and_for_a_while_those_of_others():
    settings, now = config("routing.policy=least_loaded"), 0.0
    (job, *sent), _ = prepare([record(0.0, [1] * 8) for _ in range(4)], settings, Variant())
    one = gateway(settings, False, lambda: now)
    one.sent(sent[0], "a", 1)
    one.sent(sent[1], "b", 5)  # four of others
    assert ranks(one, job) == ["c", "a", "b"]
    now = OTHERS_SECONDS
    assert ranks(one, job)[-1] == "b"
    now += 0.5
    assert ranks(one, job)[0] == "c"
    one.in_flight.release(sent[0].number)
    assert ranks(one, job)[-1] == "b"
    one.in_flight.drop("b")
    one.in_flight.release(sent[1].number)  # of a replica that is gone: nothing is counted
    one.sent(sent[2], "c", 1)
    assert ranks(one, job)[-1] == "c"


def test_what_a_gateway_has_ended_does_not_count_as_others_requests():
    """Do as the live router: of what a replica told, the gateway's own end meanwhile."""
    settings = config("routing.policy=least_loaded")
    (job, *sent), _ = prepare([record(0.0, [1] * 8) for _ in range(4)], settings, Variant())
    one = gateway(settings, False)
    one.sent(sent[0], "a", 2)
    one.sent(sent[1], "a", 3)  # one of others
    one.sent(sent[2], "b", 2)
    assert ranks(one, job) == ["c", "b", "a"]
    one.in_flight.release(sent[0].number)
    one.in_flight.release(sent[1].number)
    assert ranks(one, job) == ["c", "a", "b"]


def test_a_job_counts_where_it_was_sent_even_if_another_replica_was_better():
    settings = config("routing.policy=least_loaded")
    (job, other), _ = prepare([record(0.0, [1] * 8) for _ in range(2)], settings, Variant())
    one = gateway(settings, alone=True)
    order, _ = one.choose(other, REPLICAS, 0.0)
    one.sent(other, order[-1], 1)
    assert ranks(one, job)[-1] == order[-1]


@given(logs(), st.sampled_from([2, 3]), st.sampled_from(["prefix_cost", "least_loaded", "power_of_two"]))
def test_several_gateways_serve_everything(records, count, policy):
    settings = config("cluster.replicas=3", f"cluster.gateways={count}", f"routing.policy={policy}")
    jobs, _ = run(records, settings)
    assert all(job.replica for job in jobs)
    assert {job.gateway for job in jobs} == set(range(min(count, len(jobs))))
    again, _ = run(records, settings, fast_forward=False)
    assert [(job.replica, job.finished) for job in jobs] == [(job.replica, job.finished) for job in again]


def test_gateways_that_do_not_know_of_each_other_load_a_replica_unevenly():
    """Each thinks that all replicas are idle, and begins with the first."""
    records = [record(0.0, [number] * 8, output=50, name=str(number)) for number in range(4)]
    alone, _ = run(records, config("cluster.replicas=4"))
    assert len({job.replica for job in alone}) == 4
    blind, _ = run(records, config("cluster.replicas=4", "cluster.gateways=4"))
    assert {job.replica for job in blind} == {"replica-0"}
