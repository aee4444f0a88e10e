"""Routing to servers that run already: by what they were sent, by load, and around those that fail."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import Config
from warmkv.platform.engine_router.router import BLOCK, EngineMemory, EngineRouter

A, B, C = "http://a", "http://b", "http://c"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def router(clock):
    return EngineRouter([A, B, C], Config(), kv_tokens=100_000, ttl=60, random=Random(0), clock=clock)


def body(name, length=20_000, **more):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": name * length}]} | more).encode()


def answered(router, number, data):
    engine = router.choose(number, data)[0]
    router.sent(number, engine)
    router.began(number, engine)
    router.ended(number, engine, "ok")
    return engine


def test_a_prompt_goes_where_its_beginning_was_answered(router):
    first = {name: answered(router, number, body(name)) for number, name in enumerate("xyz")}
    assert set(first.values()) == {A, B, C}
    for number, name in enumerate("zxyxzy"):
        assert answered(router, 10 + number, body(name, 20_100)) == first[name]
    assert router.figures()["routed"] == {"cold": 3, "warm": 6}
    assert sum(one["answered"] for one in router.figures()["engines"].values()) == 9


def test_concurrent_requests_with_one_beginning_keep_together_until_load_weighs_more(router):
    chosen = [router.choose(number, body("x"))[0] for number in range(40)]
    assert chosen[0] == chosen[1] == chosen[2]
    assert set(chosen) == {A, B, C}
    in_flight = [one["in_flight"] for one in router.figures()["engines"].values()]
    assert sum(in_flight) == 40
    for number in range(40):
        router.ended(number, chosen[number], "ok")
    assert all(one["in_flight"] == 0 for one in router.figures()["engines"].values())


def test_what_was_not_used_for_long_is_not_taken_to_be_there(router, clock):
    engine = answered(router, 0, body("x"))
    clock.now = 59
    assert answered(router, 1, body("x")) == engine
    clock.now = 119
    assert router.choose(2, body("x"))
    assert router.figures()["routed"] == {"cold": 2, "warm": 1}


def test_a_server_that_fails_is_left_out_and_forgotten(router, clock):
    engine = answered(router, 0, body("x"))
    for number in range(1, 12):
        router.sent(number, router.choose(number, body("x"))[0])
        router.failed(number, engine)
        router.ended(number, engine, "none")
    assert (
        router.figures()["engines"][engine] | {"taking": False, "remembered_tokens": 0}
        == router.figures()["engines"][engine]
    )
    assert router.taking() == 2
    order = router.choose(99, body("x"))
    assert order[-1] == engine
    assert sorted(order) == [A, B, C]


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b'{"messages": 5}'])
def test_requests_without_a_prompt_are_routed_by_load(router, data):
    router.choose(0, data)
    assert router.choose(1, data)[0] != router.choose(2, data)[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=20), st.integers(1, 20))
def test_memory_is_least_recently_used_from_the_ends_of_chains(prompts, blocks):
    """As a list of blocks that is searched from its beginning."""
    memory, model = EngineMemory(blocks, 1.0, Clock()), []
    for chain, length in prompts:
        keys = [bytes([chain, number]) for number in range(length)]
        leading = next((number for number, key in enumerate(keys) if key not in model), len(keys))
        assert memory.depth(keys) == leading
        model = [key for key in model if key not in keys] + keys[::-1]
        model = model[-blocks:]
        memory.use(keys)
        assert len(memory) == len(model)


def test_capacity_is_in_tokens(clock):
    router = EngineRouter([A], Config(), kv_tokens=10 * BLOCK, ttl=60, random=Random(0), clock=clock)
    answered(router, 0, body("x"))
    assert router.figures()["engines"][A]["remembered_tokens"] == 10 * BLOCK
