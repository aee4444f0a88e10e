"""What a service's own recent requests would have met under other settings, and how far the model can be trusted.

Replays begin with what the replicas held. The first part of the requests is replayed only so that the caches of every
candidate settle. Figures are those of the rest, predicted by the replay and, for the settings in force, as they were
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from warmkv.config import Config, Prices
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.pricing import price
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.cache.measures import percentiles
from warmkv.simulator.cluster.memory import gpu_dollars, gpu_hours
from warmkv.simulator.steps.costs import StepTimes
from warmkv.simulator.studies.pareto import front
from warmkv.simulator.studies.replays.replay import run, summarise
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload.replay_inputs import ReplayInputs

Values = dict[str, float | None]

MOMENTS = 500  # at which levels over time are read
ENOUGH_IN_SLO = 0.99  # share of the requests; more is not better
KEPT_QUALITY = 0.99  # share of the present answers' quality that a candidate must keep
COSTS = (
    ("gpu_dollars_per_million_tokens", 0.01),
    ("dollars_per_million_tokens", 0.01),
    ("bytes", 0.05),
    ("ttft_p99", 0.0),
)
"""What candidates are ranked by, the first that tells two apart; and by how much, relative to the least, it must."""

AXES = (("dollars_per_million_tokens", -1), ("bytes", -1), ("ttft_p99", -1), ("quality_kept", 1))
"""Axes of the Pareto front, and which way each is better."""

SHARES = ("hit_rate", "in_slo")
"""Figures whose error is a difference; that of others is relative."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of the counted requests, and the policy of those that named none."""

    policy: str
    figures: Values
    requests: int


def warm_up(records: Sequence[RequestRecord], longest_ttl: float) -> int:
    """Return how many requests, ordered by arrival, only let the caches settle.

    After the longest TTL nothing is left of what other settings stored. At most half of the requests are spent on it.
    """
    if not records:
        return 0
    warm = records[0].arrival + longest_ttl
    return min(len(records) // 2, sum(record.arrival < warm for record in records))


def predict(
    records: Sequence[RequestRecord],
    counted: int,
    config: Config,
    times: StepTimes,
    *,
    inputs: ReplayInputs | None = None,
    held: Sequence[Contents] = (),
    past: Sequence[tuple[float, Lifetimes]] = (),
    quality: Callable[[], float | None] = lambda: None,
) -> Prediction:
    """Replay records and return the figures of those from number `counted` on. `held` is what the replicas begin with,
    `past` the lifetimes in force, by the Unix time since, where they were not always those of the configuration.

    `resident_bytes` and `slot_bytes` are means over their arrivals, of all replicas and tiers; `resident_bytes_end` is
    the level at the end. Raises VariantError if the configuration lacks a TTL that the records name.
    """
    done = run(records, config, Variant(), times, inputs=inputs, held=held, past=past)
    jobs, count = done.jobs, len(done.jobs) - counted
    label = config.compression.policy.label
    if not count:
        return Prediction(label, {}, 0)
    result = summarise(jobs, done.outcome, config, done.lifetimes, Variant(), since=counted).result
    since, until = jobs.arrival[counted], jobs.arrival[-1]
    moments = np.linspace(since, until, MOMENTS)
    outcome = done.outcome
    tokens = result.prompt_tokens + result.usage.output
    stored, slots = (float(level.at(moments).mean()) for level in (outcome.stored, outcome.slots))
    alive = {name: float(level.at(moments).mean()) for name, level in outcome.alive_of.items()}
    dollars = gpu_dollars(config, gpu_hours(config, alive, until - since))
    figures: Values = {
        "hit_rate": result.token_hit_rate,
        "resident_bytes": stored,
        "slot_bytes": slots,
        "bytes": stored + slots,
        "ttft_p50": result.ttft.p50,
        "ttft_p99": result.ttft.p99,
        "tpot_p50": result.tpot.p50,
        "in_slo": result.in_slo / count,
        "refused": float(result.refused),
        "dollars_per_million_tokens": result.dollars / tokens * 1e6 if tokens else None,
        "gpu_dollars_per_million_tokens": dollars / tokens * 1e6 if tokens else None,
        "resident_bytes_end": float(outcome.stored.value),
        "quality": quality(),
    }
    return Prediction(label, figures, count)


def measure(records: Sequence[RequestRecord], config: Config) -> Values:
    """Return the figures of requests as they were measured, at the configuration's prices and SLO."""
    if not records:
        return {}
    slo = config.simulator.slo
    prompt, output = sum(r.input_tokens for r in records), sum(r.output_tokens for r in records)
    ttft = np.array([record.ttft for record in records])
    steps = np.array([max(0, record.output_tokens - 1) for record in records])
    decoded = steps > 0
    spans = np.array([record.e2e - record.ttft for record in records])
    tpot = np.divide(spans, steps, out=np.zeros(len(records)), where=decoded)
    first = percentiles(ttft)
    prices = {model: config.prices_of(model) for model in {record.model for record in records}}
    dollars = sum(_dollars(record.usage, prices[record.model]) for record in records)
    return {
        "hit_rate": sum(record.cached_tokens for record in records) / prompt if prompt else 0.0,
        "ttft_p50": first.p50,
        "ttft_p99": first.p99,
        "tpot_p50": percentiles(tpot[decoded]).p50,
        "in_slo": float(np.mean((ttft <= slo.ttft) & (tpot <= slo.tpot))),
        "dollars_per_million_tokens": dollars / (prompt + output) * 1e6 if prompt + output else None,
    }


def _dollars(usage: Usage, prices: Prices) -> float:
    """Return the price of a usage, without writes under TTLs that have no price any more."""
    written = {ttl: tokens for ttl, tokens in usage.written.items() if ttl in prices.write}
    return price(Usage(usage.input, usage.read, written, usage.output), prices).total


def differences(figures: Values, base: Values) -> Values:
    """Return by how much each figure differs: shares in points, others relative. None where it cannot be told."""
    found: Values = {}
    for name, own in figures.items():
        known = base.get(name)
        if own is None or known is None:
            found[name] = None
        elif name in SHARES or name.startswith("quality"):
            found[name] = own - known
        else:
            found[name] = own / known - 1 if known else (0.0 if not own else None)
    return found


def quality_kept(prediction: Prediction, now: Prediction) -> float | None:
    """Return the share of the present answers' quality that a candidate keeps; None if that was not measured."""
    if prediction.policy == now.policy:
        return 1.0
    own, present = prediction.figures.get("quality"), now.figures.get("quality")
    return own / present if own is not None and present else None


def ranked(predictions: Mapping[str, Prediction], now: str) -> list[str]:
    """Return the names of candidates, the best first.

    First come those that keep the quality of the answers, among them those with most requests within the SLO (up to
    ENOUGH_IN_SLO), and then the cheaper ones by `COSTS`. A draw goes to `now`, then to the order given.
    """
    names = sorted(predictions, key=lambda name: name != now)
    groups: dict[tuple[bool, float], list[str]] = {}
    for name in names:
        kept = quality_kept(predictions[name], predictions[now])
        in_slo = predictions[name].figures.get("in_slo") or 0.0
        lossy = kept is None or kept < KEPT_QUALITY
        groups.setdefault((lossy, -round(min(in_slo, ENOUGH_IN_SLO), 2)), []).append(name)
    found: list[str] = []
    for key in sorted(groups):
        found += _cheapest_first(groups[key], predictions, COSTS)
    return found


def _cheapest_first(
    names: Sequence[str], predictions: Mapping[str, Prediction], costs: Sequence[tuple[str, float]]
) -> list[str]:
    """Order names by the first of the costs; those within its tolerance of the least by the next one."""
    if not costs or len(names) < 2:
        return list(names)
    (figure, tolerance), *others = costs

    def cost(name: str) -> float:
        value = predictions[name].figures.get(figure)
        return float("inf") if value is None else value

    left, found = sorted(names, key=cost), []
    while left:
        most = cost(left[0]) * (1 + tolerance)
        alike = [name for name in names if name in left and cost(name) <= most]
        found += _cheapest_first(alike, predictions, others)
        left = [name for name in left if name not in alike]
    return found


def pareto(predictions: Mapping[str, Prediction], now: str) -> dict[str, bool]:
    """Return for each candidate whether no other is at least as good on all `AXES` and better on one."""
    rows = [
        [*(one.figures.get(axis) for axis, _ in AXES[:-1]), quality_kept(one, predictions[now])]
        for one in predictions.values()
    ]
    return dict(zip(predictions, front(rows, [sense for _, sense in AXES]), strict=True))
