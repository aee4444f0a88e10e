"""Replaying a log under one or many what-ifs: hit rates, bytes, money and latency, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from warmkv.config import Config, describe
from warmkv.policies import budgets, slot_sizes
from warmkv.policies.costs import StepKind, StepTimes
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.pricing import price
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.breakpoints import Breakpoint, bill
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.cluster import Outcome, simulate
from warmkv.simulator.measures import Level, Percentiles, percentiles
from warmkv.simulator.replica import Job
from warmkv.simulator.variants import Variant, VariantError, price_tier

Progress = Callable[[int, int], None]  # told the variant's number and how many of its requests have arrived


@dataclass(frozen=True, slots=True)
class Bytes:
    peak: int
    mean: float

    @classmethod
    def of(cls, level: Level, end: float) -> Bytes:
        return cls(level.peak, level.mean(end))


@dataclass(frozen=True, slots=True)
class Result:
    """What one variant did. Rates are shares, times seconds, percentiles over the requests that were served."""

    policy: str
    ttl: float | None  # seconds; None as recorded
    requests: int
    refused: int  # too large for any replica, or every queue was full
    seconds: float  # virtual time from the first arrival to the last end
    prompt_tokens: int  # of the served requests
    reused_tokens: int  # prompt tokens whose KV was reused, whatever was billed
    token_hit_rate: float  # reused_tokens / prompt_tokens
    block_hit_rate: float  # leading full blocks found / full blocks looked up
    usage: Usage  # as billed, all requests together
    dollars: float
    dollars_uncached: float  # the same requests at the plain input price
    slots: Bytes
    stored: Bytes
    evictions: int  # blocks and tails
    expirations: int
    ttft: Percentiles
    tpot: Percentiles  # of requests with at least two tokens
    e2e: Percentiles


def replay(
    records: Sequence[RequestRecord],
    config: Config,
    variants: Sequence[Variant],
    times: StepTimes,
    *,
    progress: Progress = lambda variant, arrived: None,
) -> list[Result]:
    """Replay records, ordered by arrival, once per variant. The same arguments give the same results.

    `times` are the step times, as `timing.choose_cost` finds them. Raises VariantError if the log names a TTL or a
    policy that the configuration does not know.
    """
    return [
        _replay_one(records, config, variant, times, partial(progress, number))
        for number, variant in enumerate(variants)
    ]


def kv_shape(config: Config) -> slot_sizes.KVShape:
    """The configured size of the model's KV cache."""
    simulator = config.simulator
    return slot_sizes.KVShape(simulator.layers, simulator.kv_heads, simulator.head_dim, simulator.dtype_bytes)


def recorded_policy() -> Callable[[RequestRecord], PolicySpec]:
    """The policy a record names; each label is read once."""
    specs: dict[str, PolicySpec] = {}

    def spec_of(record: RequestRecord) -> PolicySpec:
        spec = specs.get(record.policy)
        if spec is None:
            try:
                spec = specs[record.policy] = PolicySpec.model_validate(record.policy)
            except ValidationError as error:
                reasons = "; ".join(describe(error, PolicySpec))
                raise VariantError(f"request {record.id}: policy {record.policy!r}: {reasons}") from None
        return spec

    return spec_of


def prepare(records: Sequence[RequestRecord], config: Config, variant: Variant) -> tuple[list[Job], Lifetimes]:
    """The jobs of a variant, arrivals counted from the first, and how long their prefixes live. Raises VariantError."""
    cache = config.prefix_cache
    tier = ""
    lifetimes = Lifetimes.of(cache)
    if variant.ttl is not None:
        tier = price_tier(variant.ttl, cache.ttls)
        lifetimes = Lifetimes({tier: variant.ttl}, variant.ttl, cache.automatic)

    shape, recorded = kv_shape(config), recorded_policy()
    start = records[0].arrival if records else 0.0
    jobs = []
    for record in records:
        spec = variant.policy or recorded(record)
        marks = record.marks if cache.enabled else ()
        if tier:
            marks = tuple(Mark(mark.position, tier, mark.key) for mark in marks)
        for mark in marks:
            if mark.ttl not in lifetimes.ttls:
                known = ", ".join(lifetimes.ttls)
                raise VariantError(
                    f"request {record.id}: TTL {mark.ttl!r} is not one of prefix_cache.ttls ({known}); set a TTL"
                )
        prompt, new = record.input_tokens, record.output_tokens
        allowed = max(new, record.max_tokens)  # the live slot is sized for what the request allowed
        spec = budgets.in_force(spec, prompt, allowed)
        capacity = budgets.slot_capacity(spec, prompt, allowed) if allowed > 1 else 0
        slot = slot_sizes.slot_bytes(spec, shape, prompt, allowed) if allowed > 1 else 0
        jobs.append(
            Job(
                record=record,
                arrival=record.arrival - start,
                marks=marks,
                kind=StepKind.of(spec),
                kept=budgets.kept_tokens(spec, prompt),
                capacity=capacity,
                recomputed=budgets.recomputed_tokens(spec, prompt),
                slot_bytes=slot,
                workspace_bytes=slot_sizes.workspace_bytes(spec, shape, prompt, len(marks)),
                sum_bytes=slot_sizes.column_sum_bytes(spec, shape, prompt),
                endless=budgets.is_endless(spec, prompt, allowed, config.engine.max_context or 0),
            )
        )
    return jobs, lifetimes


def billed(job: Job, lifetimes: Lifetimes) -> Usage:
    """The usage of a served job: by breakpoints, or in the OpenAI APIs by what was reused."""
    if job.record.api != "messages":
        prompt = job.record.input_tokens
        return Usage(prompt - job.reused, job.reused, {}, job.record.output_tokens)
    stored = max(job.match.hit, job.written)  # what memory did not suffice for is not billed as written
    marks = [Breakpoint(mark.position, mark.ttl) for mark in job.marks if mark.position <= stored]
    usage = bill(job.record.input_tokens, marks, job.match.hit, lifetimes.ttls)
    return Usage(usage.input, usage.read, usage.written, job.record.output_tokens)


def _replay_one(
    records: Sequence[RequestRecord],
    config: Config,
    variant: Variant,
    times: StepTimes,
    progress: Callable[[int], None],
) -> Result:
    jobs, lifetimes = prepare(records, config, variant)
    outcome = simulate(jobs, config, lifetimes, kv_shape(config).token_bytes, times, progress=progress)
    return summarise(jobs, outcome, config, lifetimes, variant)


def summarise(jobs: Sequence[Job], outcome: Outcome, config: Config, lifetimes: Lifetimes, variant: Variant) -> Result:
    """Totals and percentiles of a finished simulation."""
    served = [job for job in jobs if job.replica]
    usages = [billed(job, lifetimes) for job in served]
    written = {ttl: sum(usage.written.get(ttl, 0) for usage in usages) for ttl in lifetimes.ttls}
    usage = Usage(sum(u.input for u in usages), sum(u.read for u in usages), written, sum(u.output for u in usages))
    prompt, reused = usage.prompt, sum(job.reused for job in served)
    blocks = sum(len(job.record.hashes) for job in served)
    return Result(
        policy=variant.label,
        ttl=variant.ttl,
        requests=len(jobs),
        refused=len(jobs) - len(served),
        seconds=outcome.end,
        prompt_tokens=prompt,
        reused_tokens=reused,
        token_hit_rate=reused / prompt if prompt else 0.0,
        block_hit_rate=sum(job.match.blocks for job in served) / blocks if blocks else 0.0,
        usage=usage,
        dollars=price(usage, config.prices).total,
        dollars_uncached=price(Usage(input=prompt, output=usage.output), config.prices).total,
        slots=Bytes.of(outcome.slots, outcome.end),
        stored=Bytes.of(outcome.stored, outcome.end),
        evictions=outcome.removals.evicted,
        expirations=outcome.removals.expired,
        ttft=percentiles([job.first - job.arrival for job in served]),
        tpot=percentiles([(job.finished - job.first) / job.decode_steps for job in served if job.decode_steps]),
        e2e=percentiles([job.finished - job.arrival for job in served]),
    )
