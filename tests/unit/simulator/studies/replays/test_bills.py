"""Bills in columns against the usage of each request."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, uniform
from warmkv.simulator.studies.replays import bills
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant


@given(logs(), st.data(), st.sampled_from([None, 60.0]), st.sampled_from([(), ("prefix_cache.enabled=false",)]))
def test_bills_are_the_sums_of_what_each_request_is_billed(records, data, ttl, flags):
    tenants, apis = st.sampled_from("bac"), st.sampled_from(["messages", "chat"])
    records = [replace(one, tenant=data.draw(tenants), api=data.draw(apis)) for one in records]
    done = run(records, config(*flags), Variant(ttl), uniform(EXACT))
    counts: dict[str, Counter[str]] = {}
    for job in done.jobs:
        if job.replica:
            usage = bills.billed(job, done.lifetimes)
            own = counts.setdefault(job.tenant, Counter())
            own.update({"input": usage.input, "read": usage.read, "output": usage.output, **usage.written})
    found = bills.by_tenant(done.jobs, done.jobs.served(), done.lifetimes)
    assert list(found) == sorted(counts)
    for tenant, usage in found.items():
        kept = {"input": usage.input, "read": usage.read, "output": usage.output, **usage.written}
        assert kept == {name: counts[tenant][name] for name in kept}
        assert list(usage.written) == list(done.lifetimes.ttls)
    if found:
        assert bills.together(found.values(), done.lifetimes) == done.result.usage
