"""Routing to servers that run already: by what they were sent, by load, and around those that fail."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import Config
from warmkv.platform.engine_router.memory import EngineMemory
from warmkv.platform.engine_router.prompts import Prompt, prompt_of, read_body
from warmkv.platform.engine_router.router import EngineRouter
from warmkv.prefixes import hashing
from warmkv.replicas.engines.kv_events import Changes

BLOCK = 64
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
    return prompt_of({}, {"model": "m", "messages": [{"role": "user", "content": name * length}]} | more, BLOCK)


def answered(router, number, prompt):
    engine = router.choose(number, prompt)[0]
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
    assert len(router.taking()) == 2
    order = router.choose(99, body("x"))
    assert order[-1] == engine
    assert sorted(order) == [A, B, C]


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b'{"messages": 5}'])
def test_requests_without_a_prompt_are_routed_by_load(router, data):
    prompt = prompt_of({}, read_body(data) or {}, BLOCK)
    router.choose(0, prompt)
    assert router.choose(1, prompt)[0] != router.choose(2, prompt)[0]


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


def tokens(name, blocks):
    """Return a prompt whose tokens are known, but not what it is as a text."""
    return Prompt((), hashing.block_hashes([ord(name)] * blocks * BLOCK, BLOCK, b"root"))


def test_what_servers_tell_goes_before_what_they_were_sent(router):
    prompt = Prompt(body("x").text, tokens("x", 80).tokens)
    first = answered(router, 0, prompt)
    told = next(name for name in (A, B, C) if name != first)
    router.changed(first, Changes({}, ()), True)  # and holds nothing any more
    router.changed(told, Changes(dict.fromkeys(prompt.tokens[:70], "device"), ()), True)
    assert answered(router, 1, prompt) == told
    router.changed(told, Changes({}, prompt.tokens[:70]), True)
    assert router.figures()["engines"][told]["known_tokens"] == 0
    answered(router, 2, prompt)
    assert router.figures()["routed"] == {"cold": 2, "warm": 1}


def test_a_server_that_told_of_a_part_is_taken_to_hold_what_it_was_sent_as_well(router):
    prompt = Prompt(body("x").text, tokens("x", 40).tokens)
    first = answered(router, 0, prompt)
    other = next(name for name in (A, B, C) if name != first)
    router.changed(first, Changes(dict.fromkeys(prompt.tokens[:3], "device"), ()), False)
    router.changed(other, Changes(dict.fromkeys(prompt.tokens[:20], "device"), ()), True)
    assert answered(router, 1, prompt) == first
    router.changed(first, Changes({}, ()), True)
    assert answered(router, 2, prompt) == other


def test_a_session_stays_at_its_server_when_its_tokens_cannot_be_had(clock):
    config = Config.model_validate({"routing": {"policy": "sticky_session"}})
    router = EngineRouter([A, B, C], config, kv_tokens=100_000, ttl=60, random=Random(0), clock=clock, events=True)
    for number, name in enumerate("uvwxyz"):
        prompts = (Prompt(body(name).text, keys) for keys in (tokens(name, 80).tokens, ()))
        first, again = (answered(router, 2 * number + at, prompt) for at, prompt in enumerate(prompts))
        assert first == again


def test_salts_keep_prompts_apart(router):
    assert len(body("x").text) == len(body("x", cache_salt="a").text) > 50
    assert not {*body("x").text} & {*body("x", cache_salt="a").text}
    assert body("x", cache_salt="a") == body("x", cache_salt="a")
