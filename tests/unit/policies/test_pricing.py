import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import Prices, PricingConfig
from warmkv.policies.pricing import break_even_rate, break_even_uses, hit_chance, prefix_costs, price, uncached
from warmkv.prefixes.usage import Usage

PRICES = PricingConfig()
TOKENS = st.integers(0, 10**7)


def test_break_even_as_the_contract_states():
    assert break_even_uses(PRICES.write["5m"], PRICES.read) == pytest.approx(1.28, abs=0.005)
    assert break_even_uses(PRICES.write["1h"], PRICES.read) == pytest.approx(2.11, abs=0.005)
    assert break_even_uses(1.25, 1.0) == float("inf")


@given(st.integers(1, 30), st.floats(1, 4), st.floats(0, 0.95))
def test_caching_is_cheaper_from_the_break_even_on(uses, write, read):
    cached = write + (uses - 1) * read
    if abs(cached - uses) > 1e-9:
        assert (cached < uses) == (uses > break_even_uses(write, read))


def test_ten_questions_about_a_document_of_50_000_tokens():
    """50,000 tokens of document and 200 of question, ten times: 1.506 dollars without caching, 0.3285 with it."""
    plain = sum(price(Usage(input=50_200), PRICES).input for _ in range(10))
    first = price(Usage(input=200, written={"5m": 50_000}), PRICES).total
    later = price(Usage(input=200, read=50_000), PRICES).total
    assert plain == pytest.approx(1.506)
    assert first == pytest.approx(0.1881)
    assert later == pytest.approx(0.0156)
    assert first + 9 * later == pytest.approx(0.3285)
    assert 1 - (first + 9 * later) / plain == pytest.approx(0.78, abs=0.005)


@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_a_price_is_the_sum_of_its_parts(plain, read, short, long, output):
    paid = price(Usage(plain, read, {"5m": short, "1h": long}, output), PRICES)
    assert paid.write == pytest.approx({"5m": 3 * 1.25 * short / 1e6, "1h": 3 * 2 * long / 1e6})
    assert paid.total == pytest.approx((3 * (plain + 0.1 * read + 1.25 * short + 2 * long) + 15 * output) / 1e6)


def test_a_ttl_without_a_price_is_refused_unless_nothing_was_written():
    assert price(Usage(written={"2h": 0}), PRICES).total == 0
    with pytest.raises(KeyError):
        price(Usage(written={"2h": 1}), PRICES)


@given(st.floats(1.01, 4), st.floats(0, 0.95), st.floats(1, 1e5))
def test_at_the_break_even_rate_a_request_costs_what_it_does_uncached(write, read, ttl):
    hits = hit_chance(break_even_rate(write, read, ttl), ttl)
    assert (1 - hits) * write + hits * read == pytest.approx(1)


def test_break_even_rates_at_the_ends():
    assert break_even_rate(1.25, 1.0, 300) == float("inf")
    assert break_even_rate(1.0, 0.1, 300) == 0
    assert hit_chance(0, 300) == 0


def test_random_requests_find_their_prefix_as_often_as_the_formula_says():
    rate, ttl, random = 6.0, 300.0, np.random.default_rng(0)
    gaps = random.exponential(3600 / rate, size=100_000)
    assert (gaps <= ttl).mean() == pytest.approx(hit_chance(rate, ttl), abs=0.01)


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers(1, 50))
def test_the_cost_of_uses_is_that_of_each_of_them(tokens, rest, uses):
    for cost in prefix_costs(tokens, rest, uses, PRICES, {"1h": 3600.0, "5m": 300.0}):
        first = price(Usage(input=rest, written={cost.ttl: tokens}), PRICES).total
        later = [price(Usage(input=rest, read=tokens), PRICES).total for _ in range(uses - 1)]
        assert cost.uses == pytest.approx(first + sum(later))
        assert (cost.uses < uses * uncached(tokens, rest, PRICES) - 1e-12) == (
            cost.saved > 0 and uses > cost.break_even_uses
        )


def test_ttls_come_shortest_first():
    assert [cost.ttl for cost in prefix_costs(1, 1, 1, PRICES, {"1h": 3600.0, "5m": 300.0})] == ["5m", "1h"]


def test_a_model_has_its_own_prices_where_it_names_them():
    prices = PricingConfig(input=2, models={"big": {"input": 10, "write": {"1h": 3}}})
    assert prices.of("small") == Prices(input=2)
    assert prices.of("big") == Prices(input=10, write={"5m": 1.25, "1h": 3})
