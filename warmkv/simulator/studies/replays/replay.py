"""Replaying a log under one or many what-ifs: hit rates, bytes, money and latency, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType

import numpy as np
from pydantic import ValidationError

from warmkv.config import Config, Needs, able, describe, refusal
from warmkv.gc_pause import gc_paused
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.prefixes.usage import Usage
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.measures import Percentiles, TimeWeightedGauge, percentiles
from warmkv.simulator.cluster.cluster import Outcome, simulate
from warmkv.simulator.cluster.jobs import Jobs
from warmkv.simulator.cluster.memory import gpu_dollars, gpu_hours
from warmkv.simulator.steps.costs import StepTimes
from warmkv.simulator.studies.replays import bills
from warmkv.simulator.studies.replays.variants import Variant, VariantError, price_tier
from warmkv.simulator.workload.job_sizes import Numbers, Specs
from warmkv.simulator.workload.replay_inputs import ReplayInputs
from warmkv.simulator.workload.requests import FollowUp

Progress = Callable[[int, int], None]  # told the variant's number and how many of its requests have arrived
NO_TURNS: Mapping[int, FollowUp] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Amount:
    """A level over time."""

    peak: int
    mean: float

    @classmethod
    def of(cls, level: TimeWeightedGauge, end: float) -> Amount:
        return cls(level.peak, level.mean(end))


@dataclass(frozen=True, slots=True)
class Result:
    """What one variant did. Rates are shares, times seconds, percentiles over the requests that were served."""

    policy: str
    ttl: float | None  # seconds; None as recorded
    requests: int
    refused: int  # too large for any replica, or all queues were full, those of the gateways, too
    too_large: int  # of these
    failed: int  # with their replica, more often than they are sent again
    retries: int  # of requests whose replica failed before their first token
    resumptions: int  # and after it
    fetches: int  # of blocks from other replicas that brought any
    fetches_declined: int  # that the router had planned, and that would have taken longer than to compute
    fetched_bytes: int
    handed_bytes: int  # that replicas left to others when they were stopped
    seconds: float  # virtual time from the first arrival to the last end
    prompt_tokens: int  # of the served requests
    reused_tokens: int  # prompt tokens whose KV was reused, whatever was billed
    token_hit_rate: float  # reused_tokens / prompt_tokens
    block_hit_rate: float  # leading full blocks found / full blocks looked up
    usage: Usage  # as billed, all requests together
    dollars: float  # that the tenants are billed
    dollars_uncached: float  # the same requests at the plain input price
    bills: Mapping[str, float]  # dollars by tenant
    slots: Amount
    stored: Amount  # in all tiers
    tiers: Mapping[str, Amount]  # device, host, disk
    evictions: int  # blocks and tails
    expirations: int
    ttft: Percentiles
    tpot: Percentiles  # of requests with at least two tokens
    e2e: Percentiles
    in_slo: int  # served within simulator.slo
    keeps_by_lru: bool  # whether prefixes leave by an engine's own rule, whatever their TTLs, which are of bills alone
    replicas: Amount  # that are alive, starting or not
    gpu_hours: float  # of all replicas that are alive, from the first arrival to the last end
    gpu_dollars: float

    @property
    def goodput(self) -> float:
        """Return the requests a second that were served within the SLO."""
        return self.in_slo / self.seconds if self.seconds else 0.0

    @property
    def gpu_dollars_per_million_tokens(self) -> float:
        """Return the dollars of prompts and answers together."""
        tokens = self.prompt_tokens + self.usage.output
        return self.gpu_dollars / tokens * 1e6 if tokens else 0.0

    @property
    def saving(self) -> float:
        """Return the share of the tenants' bills that caching took off."""
        return 1 - self.dollars / self.dollars_uncached if self.dollars_uncached else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished simulation of a variant: its requests and its totals."""

    jobs: Jobs  # all, in the order of the records
    lifetimes: Lifetimes
    outcome: Outcome
    result: Result

    @property
    def usages(self) -> list[Usage]:
        """Return the usages of served requests, in that order."""
        return [bills.billed(job, self.lifetimes) for job in self.jobs if job.replica]


def replay(
    records: Sequence[RequestRecord],
    config: Config,
    variants: Sequence[Variant],
    times: StepTimes,
    *,
    turns: Mapping[int, FollowUp] = NO_TURNS,
    inputs: ReplayInputs | None = None,
    progress: Progress = lambda variant, arrived: None,
) -> list[Result]:
    """Replay records, ordered by arrival, once per variant. The same arguments give the same results.

    Records in `turns`, by number, arrive when the turn before them is over, whatever arrival they were recorded with.

    `times` are the step times, as `step_times.choose_cost` finds them; `inputs` is
    `Requests.inputs`, where records are replayed more than once. Raises VariantError if the log names a TTL or a policy
    that the configuration does not know.
    """
    inputs = inputs or ReplayInputs(records)
    with gc_paused():  # until the jobs of each run are gone, too
        return [
            run(records, config, variant, times, turns=turns, inputs=inputs, progress=partial(progress, number)).result
            for number, variant in enumerate(variants)
        ]


def recorded_policy() -> Callable[[RequestRecord], PolicySpec]:
    """Return a function from a record to the policy that it names; each label is parsed once."""
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


def prepare(
    records: Sequence[RequestRecord],
    config: Config,
    variant: Variant,
    turns: Mapping[int, FollowUp] = NO_TURNS,
    inputs: ReplayInputs | None = None,
) -> tuple[Jobs, Lifetimes]:
    """Prepare the jobs of a variant, arrivals counted from the first, and the lifetimes of their prefixes.

    Raises VariantError.
    """
    cache = config.prefix_cache
    tier = ""
    lifetimes = Lifetimes.of(cache)
    if variant.ttl is not None:
        tier = price_tier(variant.ttl, cache.ttls)
        lifetimes = Lifetimes({tier: variant.ttl}, variant.ttl, cache.automatic)

    inputs = inputs or ReplayInputs(records)
    columns = inputs.records
    marked = bool(cache.enabled and columns.marks.counts.any())
    marks = _marks(columns, tier, lifetimes) if marked else [()] * len(columns)
    specs = _policies(columns) if variant.policy is None else ([variant.policy], np.zeros_like(columns.policy))
    most = config.engine.max_context or 0, config.gateway.max_output_tokens
    sizes = inputs.sizes(variant.policy, specs, marked, kv_shape(config), *most)
    messages = columns.is_named("api", "messages")
    shares = messages & ((columns.reads.counts > 0) | (columns.marks.counts > 0 if marked else False))
    jobs = Jobs(columns, sizes, marks, shares, turns)
    if config.cluster.groups:
        jobs.groups = _groups(columns, config, *specs)
    return jobs, lifetimes


def _groups(
    columns: RecordColumns, config: Config, policies: Sequence[PolicySpec], numbers: Numbers
) -> list[tuple[str, ...]]:
    """Return the groups of replicas that can serve each request's policy. Raises VariantError where none can."""
    capabilities = config.capabilities
    groups = [tuple(name for name in capabilities if name in able(capabilities, Needs(spec))) for spec in policies]
    found = [groups[number] for number in numbers.tolist()]
    if () in found:
        first = found.index(())
        fault = refusal(capabilities.values(), Needs(policies[numbers[first]]))
        raise VariantError(f"request {columns.id[first]}: {fault}")
    return found


def _policies(columns: RecordColumns) -> Specs:
    """Return the policies that records name. Raises VariantError."""
    recorded = recorded_policy()
    _, first, numbers = np.unique(columns.policy, return_index=True, return_inverse=True)
    order = np.argsort(first)  # so that the first request whose policy is wrong is named
    specs = {at: recorded(columns[first[at]]) for at in order.tolist()}
    return [specs[at] for at in range(len(first))], numbers


def _marks(columns: RecordColumns, tier: str, lifetimes: Lifetimes) -> list[tuple[Mark, ...]]:
    """Return the marks of all records, all sold as `tier` if that is given; equal ones as one object.

    Raises VariantError.
    """
    positions, ttls, numbers = columns.marks.flat()
    if not tier:
        wrong = np.isin(ttls, [at for at, name in enumerate(columns.names) if name not in lifetimes.ttls])
        if wrong.any():
            owner = np.repeat(np.arange(len(columns)), columns.marks.counts)
            first, ttl, known = owner[wrong][0], columns.names[ttls[wrong][0]], ", ".join(lifetimes.ttls)
            raise VariantError(
                f"request {columns.id[first]}: TTL {ttl!r} is not one of prefix_cache.ttls ({known}); set a TTL"
            )
    names = [tier] * len(ttls) if tier else [columns.names[ttl] for ttl in ttls.tolist()]
    keys = columns.keys_of(numbers)
    known_marks: dict[Mark, Mark] = {}
    marks = iter([known_marks.setdefault(mark, mark) for mark in map(Mark, positions.tolist(), names, keys)])
    return [tuple(islice(marks, count)) for count in columns.marks.counts.tolist()]


def run(
    records: Sequence[RequestRecord],
    config: Config,
    variant: Variant,
    times: StepTimes,
    *,
    turns: Mapping[int, FollowUp] = NO_TURNS,
    as_placed: bool = False,
    inputs: ReplayInputs | None = None,
    held: Sequence[Contents] = (),
    past: Sequence[tuple[float, Lifetimes]] = (),
    progress: Callable[[int], None] = lambda arrived: None,
) -> Run:
    """Replay records once, as `replay` does, and keep the outcome of every request.

    `as_placed` sends each to the replica that its record names. `held` is what the replicas hold at the first arrival.
    `past` are lifetimes and since when they were in force, by Unix time, where they were not always the present ones.
    Raises VariantError as `prepare` does, and where a record is to be placed in a group that is not configured.
    """
    token_bytes = kv_shape(config).token_bytes
    inputs = inputs or ReplayInputs(records)
    if as_placed and config.cluster.groups:
        known = config.groups()
        if unknown := sorted(set(inputs.records.values("group")) - known.keys()):
            raise VariantError(f"cluster.groups has no group {unknown[0]!r}, of which the log names replicas")
    with gc_paused():
        jobs, lifetimes = prepare(records, config, variant, turns, inputs)
        begun = float(inputs.records.arrival[0]) if len(inputs.records) else 0.0
        first, later = _in_turn(past, lifetimes, begun)
        outcome = simulate(
            jobs,
            config,
            first,
            token_bytes,
            times,
            as_placed=as_placed,
            lay_out=inputs.lay_out,
            held=held,
            begun=begun,
            later=later,
            progress=progress,
        )
        return summarise(jobs, outcome, config, lifetimes, variant)


def _in_turn(
    past: Sequence[tuple[float, Lifetimes]], present: Lifetimes, begun: float
) -> tuple[Lifetimes, Sequence[tuple[float, Lifetimes]]]:
    """Return the lifetimes at the first arrival, and those that came later, by seconds since.

    TTLs that were no more, or not yet, are as at present: requests may come with them for some seconds.
    """
    known = [(since - begun, replace(each, ttls={**present.ttls, **each.ttls})) for since, each in past]
    before = [lifetimes for at, lifetimes in known if at <= 0]
    return before[-1] if before else present, [each for each in known if each[0] > 0]


def summarise(
    jobs: Jobs, outcome: Outcome, config: Config, lifetimes: Lifetimes, variant: Variant, since: int = 0
) -> Run:
    """Return totals and percentiles of a finished simulation: of the jobs from number `since` on."""
    served = jobs.served(since)
    billed = bills.of(jobs, served, lifetimes, config)
    prompt, reused = (int(of[served].sum()) for of in (jobs.records.input_tokens, jobs.column("reused")))
    blocks = int(jobs.records.hashes.counts[served].sum())
    arrival, first, end = (jobs.column(name)[served] for name in ("arrival", "first", "finished"))
    steps = np.maximum(0, jobs.records.output_tokens[served] - 1)
    requests, failed = len(jobs) - since, int(jobs.column("failed", since).sum())
    ttft, decoded = first - arrival, steps > 0
    tpot = np.divide(end - first, steps, out=np.zeros(len(served)), where=decoded)
    slo = config.simulator.slo
    alive = Amount.of(outcome.alive, outcome.end)
    hours = gpu_hours(config, {name: level.mean(outcome.end) for name, level in outcome.alive_of.items()}, outcome.end)
    result = Result(
        policy=variant.label,
        ttl=variant.ttl,
        requests=requests,
        refused=requests - len(served) - failed,
        too_large=int(jobs.column("too_large", since).sum()),
        failed=failed,
        retries=int(jobs.column("retries", since).sum()),
        resumptions=int(jobs.column("resumptions", since).sum()),
        fetches=outcome.moved.fetches,
        fetches_declined=outcome.moved.declined,
        fetched_bytes=outcome.moved.fetched_bytes,
        handed_bytes=outcome.moved.handed_bytes,
        seconds=outcome.end,
        prompt_tokens=prompt,
        reused_tokens=reused,
        token_hit_rate=reused / prompt if prompt else 0.0,
        block_hit_rate=int(jobs.column("blocks_found")[served].sum()) / blocks if blocks else 0.0,
        usage=billed.usage,
        dollars=billed.dollars,
        dollars_uncached=billed.uncached,
        bills=billed.by_tenant,
        slots=Amount.of(outcome.slots, outcome.end),
        stored=Amount.of(outcome.stored, outcome.end),
        tiers={tier: Amount.of(level, outcome.end) for tier, level in outcome.tiers.items()},
        evictions=outcome.removals.evicted,
        expirations=outcome.removals.expired,
        ttft=percentiles(ttft),
        tpot=percentiles(tpot[decoded]),
        e2e=percentiles(end - arrival),
        in_slo=int(np.count_nonzero((ttft <= slo.ttft) & (tpot <= slo.tpot))),
        keeps_by_lru=all(group.has_one_pool for group in config.groups().values()),
        replicas=alive,
        gpu_hours=sum(hours.values()),
        gpu_dollars=gpu_dollars(config, hours),
    )
    return Run(jobs, lifetimes, outcome, result)
