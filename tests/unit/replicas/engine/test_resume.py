"""A request that takes another replica's tokens as its own goes on as if it had drawn them itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request, replace_eos
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_matrix import POLICIES
from warmkv.replicas.protocol import QueueFullError, UnservableRequestError


@pytest.mark.parametrize("policy", ["full", "rocketkv@20:window=4,kernel=3", *POLICIES])
def test_the_rest_of_the_answer_and_the_slot_are_the_same(models, policy):
    # No token comes twice: keys of one token are of one length in the first layer, and whom knorm evicts of two such
    # would hang on the last bit, which depends on who shares a pass.
    distinct = [(11 * at + 3) % VOCABULARY for at in range(50)]
    request = make_request(distinct, new=30, policy=policy, temperature=0.8, seed=7)
    other = make_request(prompt(30), new=20, name="other")
    alone = Driver(models["llama"])
    (whole,) = alone.run(request)
    for cut in (12, 30):
        driver = Driver(models["llama"])
        driver.submit(other)
        for _ in range(9):
            driver.engine.step()
        assert driver.run(replace(request, resume=tuple(whole[:cut]))) == [whole]
        assert driver.started("request").kept_tokens == alone.started("request").kept_tokens
        assert driver.finished("request") == alone.finished("request")


def test_what_is_resumed_is_what_was_drawn_there_even_if_it_would_be_drawn_otherwise_here(models):
    """As it is where two replicas do not compute in the same order, in less than float32 say."""
    request = make_request(prompt(50), new=20)
    (own,) = Driver(models["llama"]).run(request)
    other = tuple((token + 1) % VOCABULARY for token in own[:8])
    (resumed,) = Driver(models["llama"]).run(replace(request, resume=other))
    assert tuple(resumed[:8]) == other
    follows = make_request([*prompt(50), *other], new=12)
    assert Driver(models["llama"]).run(follows) == [resumed[8:]]


def test_it_ends_where_it_would_have_ended(models):
    request = make_request(prompt(30), new=12)
    (free,) = Driver(models["llama"]).run(request)
    stop_at = next(i for i in range(2, 12) if free[i] not in free[:i])
    ending = replace_eos(models["llama"], free[stop_at])
    for cut in range(stop_at + 1):
        driver = Driver(ending)
        assert driver.run(replace(request, resume=tuple(free[:cut]))) == [free[:stop_at]]
        assert driver.finished("request").reason == "end"
        assert driver.finished("request").output_tokens == stop_at + 1


def test_it_waits_even_where_the_queue_is_full_and_its_tokens_are_checked(models):
    busy = Driver(models["llama"], max_slots=1, max_queue=1)
    busy.submit(make_request(prompt(5), name="0"), make_request(prompt(5), name="1"))
    with pytest.raises(QueueFullError):
        busy.submit(make_request(prompt(5), name="2"))
    (whole,) = Driver(models["llama"]).run(make_request(prompt(6)))
    assert busy.run(replace(make_request(prompt(6), name="3"), resume=tuple(whole[:3]))) == [whole]
    with pytest.raises(UnservableRequestError, match="vocabulary"):
        busy.submit(replace(make_request(prompt(6), name="4"), resume=(VOCABULARY,)))
