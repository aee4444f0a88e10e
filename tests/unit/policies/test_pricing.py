import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import PricingConfig
from warmkv.policies.pricing import break_even_uses, price
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
    assert paid.total == pytest.approx((3 * (plain + 0.1 * read + 1.25 * short + 2 * long) + 15 * output) / 1e6)


def test_a_ttl_without_a_price_is_refused_unless_nothing_was_written():
    assert price(Usage(written={"2h": 0}), PRICES).total == 0
    with pytest.raises(KeyError):
        price(Usage(written={"2h": 1}), PRICES)
