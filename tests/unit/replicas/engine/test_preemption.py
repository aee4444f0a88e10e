"""A request that waits too long gets the room of a tenant that holds more; what was set aside resumes as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_matrix import POLICIES
from warmkv.policies.slot_sizes import slot_bytes, workspace_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import GenerateRequest


class Clock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def of(tenant: str, seed: int, *, new: int = 40, policy: str = "full", length: int = 50) -> GenerateRequest:
    request = make_request(prompt(length, seed=seed), new=new, policy=policy, name=f"{tenant}{seed}")
    return replace(request, tenant=tenant)


def busy(model: LoadedModel, **settings: object) -> Driver:
    return Driver(model, **{"clock": Clock(), "max_slots": 5, "preempt_seconds": 30.0, **settings})  # type: ignore[arg-type]


def crowd(driver: Driver, requests: list[GenerateRequest]) -> None:
    """Let requests take all slots."""
    driver.submit(*requests)
    for _ in range(20):
        driver.engine.step()
    assert driver.engine.stats().decoding == len(requests)


def undisturbed(model: LoadedModel, requests: list[GenerateRequest]) -> list[list[int]]:
    """Return the tokens of requests that all have a slot."""
    return Driver(model, max_slots=len(requests)).run(*requests)


# A slot of every kind: by decode rule, by storage, sized by layer or head, with column sums. The others differ in what
# they keep of the prompt, which is over when a request is set aside.
KINDS = [
    "full",
    "rocketkv@20:window=4,kernel=3",
    "streaming_llm@20",
    "h2o@20",
    "h2o@0.4+append",
    "snapkv@16+ring:window=4",
    "snapkv@16+argmin:window=4",
    "pyramidkv@16+ring:window=4,sinks=1",
    "adakv@16:window=4",
    "tova@16",
    "tova@16:per_head=true",
    "expected_attention@18:window=12",
    "fastgen:recovery=0.6",
    "cake@20+protect+ring:window=4",
    "full+fp8",
    "full+kivi2:residual=64",
    "h2o@20+turbo3",
    "streaming_llm@20+turbo4",
    "snapkv@80+ring+kivi4:window=6",
    "h2o@90+kivi4",
    "adakv@80+kivi4:window=6",
]


@pytest.mark.parametrize(
    "policy",
    [*KINDS, *(pytest.param(name, marks=pytest.mark.soak(least=0.5)) for name in POLICIES if name not in KINDS)],
)
def test_what_was_set_aside_draws_the_same_tokens(models, policy):
    greedy = [of("greedy", seed, policy=policy, new=60) for seed in range(5)]
    modest = of("modest", 9, policy=policy, new=6)
    expected = undisturbed(models["llama"], [*greedy, modest])
    driver = busy(models["llama"])
    crowd(driver, greedy)
    assert driver.run(modest) == expected[5:]
    assert [driver.tokens(request.id) for request in greedy] == expected[:5]
    assert driver.engine.stats().preempted > 0
    assert all(slab.is_empty for slab in driver.engine.pool.slabs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 1), ({"preempt_seconds": None}, 0), ({"preempt_seconds": 1e6}, 0), ({"parked_bytes": 100}, 0)],
)
def test_one_is_set_aside_after_a_while_within_the_limit_of_bytes_unless_that_is_off(models, settings, expected):
    driver = busy(models["llama"], **settings)
    crowd(driver, [of("greedy", seed, new=80) for seed in range(5)])
    driver.run(of("modest", 9))
    assert driver.engine.stats().preempted == expected


@pytest.mark.parametrize(("parked", "expected"), [(2, 0), (100, 3)])
def test_as_many_as_a_request_needs_are_set_aside_once_or_none(models, parked, expected):
    """Leave one of nine slots free for a prompt that needs more than three with its workspace."""
    shape, spec = models["llama"].kv_shape, PolicySpec()
    slot = slot_bytes(spec, shape, 50, 80)
    assert 3 * slot < slot_bytes(spec, shape, 240, 6) + workspace_bytes(spec, shape, 240) <= 4 * slot
    greedy, modest = [of("greedy", seed, new=80) for seed in range(8)], of("modest", 9, new=6, length=240)
    tokens = undisturbed(models["llama"], [*greedy, modest])
    settings = {"max_slots": 12, "step_tokens": 64, "kv_bytes": 9 * slot, "parked_bytes": parked * slot}
    driver = busy(models["llama"], **settings)
    crowd(driver, greedy)
    driver.submit(modest)
    for _ in range(40):
        driver.engine.step()
    assert driver.engine.stats().preempted == expected
    driver.run()
    assert [driver.tokens(request.id) for request in [*greedy, modest]] == tokens


@pytest.mark.parametrize("tenants", [["greedy"] * 6, ["one", "two", "three", "four", "five", "six"]])
def test_a_tenant_does_not_set_its_own_aside_nor_those_of_one_that_holds_as_little(models, tenants):
    driver = busy(models["llama"])
    *first, last = [of(tenant, seed, new=80) for seed, tenant in enumerate(tenants)]
    crowd(driver, first)
    driver.run(last)
    assert driver.engine.stats().preempted == 0


def test_requests_that_are_set_aside_can_be_cancelled(models):
    driver = busy(models["llama"])
    greedy = [of("greedy", seed, new=200) for seed in range(5)]
    crowd(driver, greedy)
    driver.submit(of("modest", 9, new=200))
    while not driver.engine.scheduler.preempted:
        assert driver.engine.step()
    parked = next(sequence for sequence in driver.engine.scheduler.waiting if sequence.swapped)
    driver.engine.cancel(parked.request.id)
    while driver.engine.step():
        pass
    assert driver.finished(parked.request.id).reason == "cancelled"
    assert all(len(driver.tokens(r.id)) == 200 for r in greedy if r.id != parked.request.id)


@pytest.mark.parametrize("tight", [False, True])
def test_with_little_room_everybody_is_served_and_the_limit_holds(models, tight):
    """Twelve requests of three tenants, the first six all of one."""
    driver = busy(models["llama"], kv_bytes=250_000 if tight else 1 << 26, preempt_seconds=5.0)
    policies = ["full", "snapkv@16:window=4", "adakv@16:window=4", "pyramidkv@16:window=4"]
    requests = [
        of(tenant, seed, policy=policies[seed % 4], new=150 if tenant == "a" else 20, length=30 + 5 * seed)
        for seed, tenant in enumerate(["a", "a", "a", "a", "a", "a", "b", "b", "c", "a", "b", "c"])
    ]
    expected = undisturbed(models["llama"], requests)
    driver.submit(*requests[:6])
    while driver.engine.stats().decoding < 3:
        driver.engine.step()
    driver.submit(*requests[6:])
    while driver.engine.step():
        assert driver.engine.pool.allocated_bytes <= driver.engine.memory.kv.bytes
    assert [driver.tokens(request.id) for request in requests] == expected
    assert driver.engine.stats().preempted > 0
