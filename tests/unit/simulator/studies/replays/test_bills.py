"""Bills in columns against the usage of each request."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, record, uniform
from warmkv.prefixes.usage import Usage
from warmkv.simulator.studies.replays import bills
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.replays.whatif import measure


@given(logs(), st.data(), st.sampled_from([None, 60.0]), st.sampled_from([(), ("prefix_cache.enabled=false",)]))
def test_bills_are_the_sums_of_what_each_request_is_billed(records, data, ttl, flags):
    tenants, apis = st.sampled_from("bac"), st.sampled_from(["messages", "chat"])
    models = st.sampled_from(["small", "large", "other"])
    records = [replace(one, tenant=data.draw(tenants), api=data.draw(apis), model=data.draw(models)) for one in records]
    done = run(records, config(*flags), Variant(ttl), uniform(EXACT))
    counts: dict[tuple[str, str], Counter[str]] = {}
    for job in done.jobs:
        if job.replica:
            usage = bills.billed(job, done.lifetimes)
            own = counts.setdefault((job.tenant, job.record.model), Counter())
            own.update({"input": usage.input, "read": usage.read, "output": usage.output, **usage.written})
    found = bills.by_tenant_and_model(done.jobs, done.jobs.served(), done.lifetimes)
    assert list(found) == sorted(counts)
    for pair, usage in found.items():
        kept = {"input": usage.input, "read": usage.read, "output": usage.output, **usage.written}
        assert kept == {name: counts[pair][name] for name in kept}
        assert list(usage.written) == list(done.lifetimes.ttls)
    if found:
        assert bills.together(found.values(), done.lifetimes) == done.result.usage


def test_each_request_has_the_prices_of_its_model():
    """100 tokens in and 10 out of each: what the log's models have, else what the served one has."""
    prices = "pricing={input: 2, output: 20, models: {small: {input: 1}, large: {input: 5, output: 50}}}"
    settings = config(prices, "prefix_cache.enabled=false")
    asked = [("a", "small"), ("a", "large"), ("b", "large"), ("b", "other")]
    records = [
        replace(record(float(at), [at] * 100, 10), tenant=tenant, model=model)
        for at, (tenant, model) in enumerate(asked)
    ]
    result = run(records, settings, Variant(), uniform(EXACT)).result
    small, large, other = 100 * 1 + 10 * 20, 100 * 5 + 10 * 50, 100 * 2 + 10 * 20
    assert result.bills == pytest.approx({"a": (small + large) / 1e6, "b": (large + other) / 1e6})
    assert result.dollars == result.dollars_uncached == pytest.approx((small + 2 * large + other) / 1e6)


def test_a_prompt_of_several_answers_is_billed_once_as_its_log_says():
    """Measure and replay a request with `n` = 4: 100 tokens in, 4 times 10 out, 440 in all."""
    settings = config("pricing={input: 3, output: 15}")
    first = replace(record(0.0, list(range(100)), 10, name="req"), api="chat", usage=Usage(input=100, output=10))
    log = [first, *(replace(first, id=f"req-{at}", arrival=1.0, usage=Usage(output=10)) for at in (1, 2, 3))]
    done = run(log, settings, Variant(), uniform(EXACT))
    result = done.result
    assert done.usages == [one.usage for one in log]
    assert result.usage == bills.together([one.usage for one in log], done.lifetimes)
    assert result.dollars == pytest.approx((100 * 3 + 40 * 15) / 1e6)
    assert (result.prompt_tokens, result.reused_tokens > 0) == (400, True)
    assert measure(log, settings)["dollars_per_million_tokens"] == pytest.approx(result.dollars / 440 * 1e6)
