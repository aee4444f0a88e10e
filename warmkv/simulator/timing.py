"""Where a replay takes its step times from: a measured profile, a roofline, the log's own timings, or the settings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.model_shape import ModelShape
from warmkv.policies import budgets, roofline, step_profile
from warmkv.policies.costs import MeasuredCosts, StepCost, StepKind, StepTimes, fit_step_cost
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cluster import gpus_per_replica
from warmkv.simulator.spread_evenly import during
from warmkv.simulator.stores import kv_shape

Floats = NDArray[np.float64]
ENOUGH = 20  # measured requests below which a fit says little


def choose_cost(
    records: Sequence[RequestRecord],
    config: Config,
    spec_of: Callable[[RequestRecord], PolicySpec],
    source: Literal["auto", "config", "log"] = "auto",
) -> tuple[StepTimes, str]:
    """The step times to replay with, and where they come from in words.

    `auto` takes those of the profile that the settings name, else of the roofline of simulator.model, else the log's
    where enough of its records carry timings, else simulator.step_*; `config` leaves the log out. Raises ValueError if
    `log` is asked for and has none, and if the profile cannot be read.
    """
    file = config.simulator.profile
    if file is not None and source != "log":
        return _of_profile(file, config)
    if config.simulator.model is not None and source != "log":
        return _of_roofline(config.simulator.model, config)
    count = len(measured(records))
    if source == "log" or (source == "auto" and count >= ENOUGH):
        return fit_from_records(records, config, spec_of), f"fitted to {count} measured requests of the log"
    simulator = config.simulator
    return StepCost(simulator.step_a, simulator.step_b, simulator.step_c), "configuration (simulator.step_*)"


def _of_profile(file: Path, config: Config) -> tuple[StepTimes, str]:
    profile = step_profile.read(file)
    source = f"measured, {file} ({profile.summary})"
    if not profile.model.matches(kv_shape(config)):
        source += "; its model's KV shape is not that of simulator.layers, kv_heads, head_dim and dtype_bytes"
    return profile.costs(), source


def _of_roofline(model: ModelShape, config: Config) -> tuple[StepTimes, str]:
    gpu, share = config.simulator.gpu, gpus_per_replica(config)
    times = roofline.roofline(model, gpu, config.simulator.roofline, share)
    name = model.path.parent.name if model.path and model.path.suffix == ".json" else model.path and model.path.name
    source = f"roofline of {name or 'the model'} on {gpu.name}"
    held = model.dtype_bytes * (model.layer_weights + model.head_weights)
    held += config.engine.kv_bytes + config.prefix_cache.memory_bytes * config.prefix_cache.enabled
    if held > gpu.memory * share:
        source += (
            f"; weights, engine.kv_bytes and prefix_cache.memory_bytes take {held / 1e9:.0f} GB, "
            f"and a replica has {gpu.memory * share / 1e9:.0f}"
        )
    return times, source


def stand_ins(times: StepTimes, policies: Iterable[PolicySpec]) -> list[str]:
    """Policies that a profile does not have, each with the one whose step times it gets instead."""
    if not isinstance(times, MeasuredCosts):
        return []
    kinds = dict.fromkeys(StepKind.of(spec) for spec in policies)
    return [f"{kind.label} gets the times of {near.label}" for kind in kinds if (near := times.nearest(kind)) != kind]


def measured(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records that carry timings."""
    return [record for record in records if record.e2e >= record.ttft > record.queue >= 0]


def fit_from_records(
    records: Sequence[RequestRecord], config: Config, spec_of: Callable[[RequestRecord], PolicySpec]
) -> StepCost:
    """Fit the step model to the prefill and the decoding of every measured request.

    Both are sums over engine steps: a request's own steps, and the tokens and contexts of whatever else its replica
    computed meanwhile, spread evenly over the time that the other requests took. Raises ValueError if no record carries
    timings.
    """
    by_replica: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in measured(records):
        by_replica[record.replica].append(record)
    rows = [_replica_rows(group, config.engine.prefill_chunk, spec_of) for group in by_replica.values()]
    if not rows:
        raise ValueError("no record of the log carries timings to fit step times to")
    steps, tokens, context, seconds = np.concatenate(rows).T
    # The model is per step, so each span is divided by its steps.
    return fit_step_cost(tokens / steps, context / steps, seconds / steps)


def _replica_rows(
    records: Sequence[RequestRecord], chunk: int, spec_of: Callable[[RequestRecord], PolicySpec]
) -> Floats:
    """Spans [2 * requests, 4] of one replica: engine steps, tokens computed, context read, seconds."""
    arrival = np.array([record.arrival for record in records])
    arrival -= arrival.min()  # Unix times would cost the sums below their precision
    queue, ttft, e2e = (np.array([getattr(r, name) for r in records]) for name in ("queue", "ttft", "e2e"))
    prompt = np.array([record.input_tokens for record in records], dtype=float)
    new = np.array([record.input_tokens - record.cached_tokens for record in records], dtype=float)
    kept = np.array([budgets.kept_tokens(spec_of(record), record.input_tokens) for record in records])
    full = np.array([_capacity(spec_of(record), record) for record in records])
    decodes = np.array([max(0, record.output_tokens - 1) for record in records], dtype=float)

    start, first, end = arrival + queue, arrival + ttft, arrival + e2e
    chunks = np.array([max(1, math.ceil(count / chunk)) for count in new], dtype=float)
    prefill_read = (chunks - 1) * (prompt - new) + chunk * chunks * (chunks - 1) / 2 + prompt
    grown = np.minimum(full - kept, decodes)  # entries added; a full ring only overwrites
    read = decodes * full - grown * (grown - 1) / 2  # entries read in all decode steps

    # A prompt's chunks and, between two of them, a decode step of whoever decodes at that time.
    batch = during(start, first, first, end, end - first) / (first - start)
    entries = during(start, first, first, end, (end - first) * read / np.maximum(decodes, 1)) / (first - start)
    between = np.where(batch > 0.5, chunks - 1, 0.0)
    prefills = np.column_stack(
        [chunks + between, new + between * batch, prefill_read + between * entries, first - start]
    )

    # A request's decode steps with the other sequences in them, and the chunks of prompts that came between. Decoding
    # all but stands still during a prompt, so it is spread over the time left by prompts.
    began, ended = (times - during(np.zeros_like(times), times, start, first, first - start) for times in (first, end))
    decoded = np.column_stack(
        [
            decodes + during(first, end, start, first, chunks),
            during(began, ended, began, ended, decodes) + during(first, end, start, first, new),
            during(began, ended, began, ended, read) + during(first, end, start, first, prefill_read),
            end - first,
        ]
    )
    rows = np.concatenate([prefills, decoded[decodes > 0]])
    return rows[rows[:, 3] > 0]


def _capacity(spec: PolicySpec, record: RequestRecord) -> int:
    return budgets.slot_capacity(spec, record.input_tokens, record.output_tokens)
