"""What the tenants of a replay are billed: the usages of all requests, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from warmkv.config import Config
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.pricing import price
from warmkv.prefixes import breakpoints
from warmkv.prefixes.usage import Usage
from warmkv.simulator.cluster.jobs import Ints, Jobs
from warmkv.simulator.cluster.replica import Job


def billed(job: Job, lifetimes: Lifetimes) -> Usage:
    """Return the usage of a served job: by breakpoints, or in the OpenAI APIs by reuse, of several answers once."""
    if job.is_sibling:
        return Usage(output=job.output)
    if not job.marked:
        return Usage(job.prompt - job.reused, job.reused, {}, job.output)
    usage = breakpoints.billed(job.prompt, job.marks, job.hit, job.written, job.read, lifetimes.ttls)
    return Usage(usage.input, usage.read, usage.written, job.output)


@dataclass(frozen=True, slots=True)
class Bills:
    """Hold usages, as billed, and dollars: of all requests, and dollars by tenant."""

    usage: Usage
    dollars: float
    uncached: float  # dollars of the same requests at the plain input price
    by_tenant: Mapping[str, float]


def of(jobs: Jobs, served: Ints, lifetimes: Lifetimes, config: Config) -> Bills:
    """Bill served jobs, each at the prices of the model that its record names."""
    usages = by_tenant_and_model(jobs, served, lifetimes)
    prices = {model: config.prices_of(model) for _, model in usages}
    tenants = dict[str, float]()
    for (tenant, model), own in usages.items():
        tenants[tenant] = tenants.get(tenant, 0.0) + price(own, prices[model]).total
    usage, dollars, uncached = together(usages.values(), lifetimes), 0.0, 0.0
    for model, own_prices in prices.items():
        own = together([each for (_, name), each in usages.items() if name == model], lifetimes)
        dollars += price(own, own_prices).total
        uncached += price(Usage(input=own.prompt, output=own.output), own_prices).total
    return Bills(usage, dollars, uncached, tenants)


def by_tenant_and_model(jobs: Jobs, served: Ints, lifetimes: Lifetimes) -> Mapping[tuple[str, str], Usage]:
    """Sum the usages of served jobs by tenant and model, in the order of their names: those that `billed` gives."""
    records = jobs.records
    marked = records.is_named("api", "messages")[served]
    prompt, output = records.input_tokens[served], records.output_tokens[served]
    read, reused, hit, stored = (jobs.column(name)[served] for name in ("read", "reused", "hit", "written"))
    read, stored = np.where(marked, read, reused), np.where(marked, np.maximum(hit, stored), 0)
    once = ~records.are_siblings(served)
    prompt, read, stored = prompt * once, read * once, stored * once

    marks = records.marks.take(served)
    positions, ttls, _ = marks.flat()
    owner = np.repeat(np.arange(len(served)), marks.counts)
    counts = marked[owner] & (positions <= stored[owner])
    end = read  # of what is billed so far
    written = {}
    for ttl in sorted(lifetimes.ttls, key=lifetimes.ttls.__getitem__, reverse=True):
        own = counts if len(lifetimes.ttls) == 1 else counts & (ttls == _place(records.names, ttl))
        last = np.zeros_like(end)
        np.maximum.at(last, owner[own], positions[own])
        written[ttl] = np.maximum(0, last - end)
        end = np.maximum(end, last)

    pairs = records.tenant[served].astype(np.int64) * len(records.names) + records.model[served]
    codes, places = np.unique(pairs, return_inverse=True)

    def sums(values: np.ndarray) -> list[int]:
        found = np.zeros(len(codes), dtype=np.int64)
        np.add.at(found, places, values)
        return found.tolist()

    columns = (sums(prompt - end), sums(read), sums(output), *(sums(written[ttl]) for ttl in lifetimes.ttls))
    names, usages = records.names, dict[tuple[str, str], Usage]()
    for code, plain, reads, drawn, *writes in zip(codes.tolist(), *columns, strict=True):
        tenant, model = divmod(code, len(names))
        usages[names[tenant], names[model]] = Usage(plain, reads, dict(zip(lifetimes.ttls, writes, strict=True)), drawn)
    return dict(sorted(usages.items()))


def together(usages: Iterable[Usage], lifetimes: Lifetimes) -> Usage:
    """Sum usages."""
    usages = list(usages)
    written = {ttl: sum([usage.written.get(ttl, 0) for usage in usages]) for ttl in lifetimes.ttls}
    inputs, reads = sum([usage.input for usage in usages]), sum([usage.read for usage in usages])
    return Usage(inputs, reads, written, sum([usage.output for usage in usages]))


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1
