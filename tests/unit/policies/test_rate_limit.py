"""Limits of tenants against what they mean: in no time may more be used than a bucket and what came back since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import LimitsConfig
from warmkv.policies.rate_limit import MINUTE, LimitedRequest, Quota, RateLimiter, RateLimitError


def limiter(gateways: int = 1, queue: int = 10, most: int = 100) -> RateLimiter:
    return RateLimiter(gateways, queue, most)


def begin(limits: RateLimiter, tenant: str, now: float, **settings: float) -> LimitedRequest:
    admission = limits.admission(tenant, LimitsConfig(**settings), now)
    admission.begin(now)
    return admission


def refused(limits: RateLimiter, tenant: str, now: float, **settings: float) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        begin(limits, tenant, now, **settings)
    return caught.value


ARRIVALS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), min_size=1, max_size=60)


@given(st.integers(1, 100), st.integers(1, 4), ARRIVALS)
def test_requests_in_any_time_are_a_bucket_and_what_came_back_at_most(limit, gateways, arrivals):
    limits, now, taken = limiter(gateways), 0.0, []
    for pause, _ in arrivals:
        now += pause
        try:
            begin(limits, "t", now, requests_per_minute=limit).end(0, now)
            taken.append(now)
        except RateLimitError:
            waits = refused(limits, "t", now, requests_per_minute=limit).retry_after
            assert 0 < waits <= MINUTE * gateways
    capacity, rate = max(1, limit / gateways), limit / gateways / MINUTE
    for first, start in enumerate(taken):
        for last, end in enumerate(taken[first:], start=first):
            assert last - first + 1 <= capacity + (end - start) * rate + 1e-3


@given(st.integers(1, 500), ARRIVALS)
def test_tokens_hold_the_limit_over_time_and_nobody_waits_for_ever(limit, arrivals):
    """A request that is larger than the bucket needs a full one: who waits as long as told is let in."""
    limits, now, used = limiter(), 0.0, 0.0
    for pause, tokens in arrivals:
        now += pause
        for _ in range(3):  # none are left; too few are left; let in
            try:
                admission = begin(limits, "t", now, tokens_per_minute=limit)
                admission.reserve(tokens, now)
                break
            except RateLimitError as error:
                admission.end(0, now)
                now += error.retry_after
        else:
            raise AssertionError("refused although it waited as long as told")
        admission.end(tokens, now)
        used += tokens
        assert used <= limit + now * limit / MINUTE + max(0, tokens - limit) + 1e-3


def test_what_was_reserved_and_not_used_comes_back():
    limits = limiter()
    admission = begin(limits, "t", 0.0, tokens_per_minute=100)
    admission.reserve(90, 0.0)
    assert admission.tokens(0.0) == Quota(100, 10, 54.0)
    other = begin(limits, "t", 0.0, tokens_per_minute=100)
    with pytest.raises(RateLimitError) as caught:
        other.reserve(20, 0.0)
    assert caught.value.retry_after == pytest.approx(6.0)
    admission.end(15, 0.0)
    admission.end(15, 0.0)  # once only
    assert admission.tokens(0.0) == Quota(100, 85, 9.0)
    other.reserve(20, 0.0)
    assert other.tokens(0.0) == Quota(100, 65, 21.0)
    other.end(0, 0.0)
    assert other.tokens(9.0) == Quota(100, 100, 0.0)


def test_requests_at_a_time_are_counted_until_they_end():
    limits = limiter()
    first, second = (begin(limits, "t", 0.0, concurrent_requests=2) for _ in range(2))
    error = refused(limits, "t", 0.0, concurrent_requests=2)
    assert (error.setting, error.retry_after) == ("concurrent_requests", 0.5)
    begin(limits, "other", 0.0, concurrent_requests=2)
    first.end(0, 11.0)  # requests seem to take 3 s now: 1 + 0.2 x (11 - 1)
    third = begin(limits, "t", 11.0, concurrent_requests=2)
    assert refused(limits, "t", 11.0, concurrent_requests=2).retry_after == pytest.approx(1.5)
    for admission in (second, third):
        admission.end(0, 12.0)
    assert begin(limits, "t", 12.0, concurrent_requests=2).account.running == 1


def test_a_refusal_counts_nothing():
    limits = limiter()
    held = begin(limits, "t", 0.0, concurrent_requests=1, requests_per_minute=2)
    for _ in range(5):
        refused(limits, "t", 0.0, concurrent_requests=1, requests_per_minute=2)
    assert held.requests(0.0) == Quota(2, 1, 30.0)
    held.end(0, 0.0)
    assert begin(limits, "t", 0.0, concurrent_requests=1, requests_per_minute=2).account.running == 1


def test_a_share_of_the_queue():
    limits = limiter(queue=10)
    admissions = [begin(limits, "t", 0.0, queue_share=0.25) for _ in range(3)]
    for admission in admissions[:2]:
        admission.wait()
    with pytest.raises(RateLimitError) as caught:
        admissions[2].wait()
    assert caught.value.setting == "queue_share"
    admissions[0].waited()
    admissions[2].wait()
    admissions[1].end(0, 0.0)  # without its first token
    begin(limits, "t", 0.0, queue_share=0.25).wait()
    small = begin(limiter(queue=1), "t", 0.0, queue_share=0.01)
    small.wait()  # one may always wait


def test_every_gateway_grants_its_part():
    parts = [limiter(gateways=3) for _ in range(3)]
    granted = 0
    for part in parts:
        for _ in range(10):
            try:
                begin(part, "t", 0.0, requests_per_minute=12)
                granted += 1
            except RateLimitError:
                pass
    assert granted == 12
    few = limiter(gateways=4)  # less than one each: one at once, and then as seldom as the limit says
    begin(few, "t", 0.0, requests_per_minute=1)
    assert refused(few, "t", 0.0, requests_per_minute=1).retry_after == pytest.approx(240)


def test_a_limit_that_is_changed_holds_at_once():
    limits = limiter()
    for _ in range(3):
        begin(limits, "t", 0.0, requests_per_minute=10).end(0, 0.0)
    assert refused(limits, "t", 0.0, requests_per_minute=2).retry_after == pytest.approx(60)
    assert begin(limits, "t", 0.0, requests_per_minute=4).requests(0.0) == Quota(4, 0, 60.0)


def test_without_limits_nothing_is_remembered_and_nothing_refused():
    limits = limiter()
    for number in range(50):
        admission = begin(limits, f"t{number % 3}", 0.0)
        admission.reserve(10**9, 0.0)
        admission.wait()
        assert (admission.requests(0.0), admission.tokens(0.0)) == (None, None)
    assert len(limits) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 5), st.booleans()), max_size=200))
def test_idle_tenants_are_forgotten_and_those_in_flight_never(calls):
    limits, now, held = limiter(most=5), 0.0, {}
    for number, pause, stays in calls:
        now += pause
        if number in held:
            held.pop(number).end(0, now)
            continue
        admission = begin(limits, str(number), now, requests_per_minute=1000, concurrent_requests=1)
        if stays:
            held[number] = admission
        else:
            admission.end(0, now)
    for number in held:
        assert refused(limits, str(number), now, concurrent_requests=1).setting == "concurrent_requests"
    for number in range(40):  # the looks of as many requests
        begin(limits, f"new {number}", now, requests_per_minute=1000).end(0, now)
    assert len(limits) <= 5 + len(held)
