"""What the requests of a replay take of a replica: entries and bytes of slots, workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warmkv.policies import budgets, slot_sizes
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.steps.costs import StepKind

Ints = NDArray[np.int64]
Numbers = NDArray[np.integer[Any]]
Specs = tuple[Sequence[PolicySpec], Numbers]
"""Policies, and which of them each request has."""


class JobSizes(NamedTuple):
    """Size what a request takes of a replica: what `Job` says from `allowed` on."""

    allowed: int
    kind: StepKind
    kept: int
    capacity: int
    recomputed: int
    slot_bytes: int
    workspace_bytes: int
    sum_bytes: int
    endless: bool


def sizes_of(
    records: RecordColumns, specs: Specs, marked: bool, shape: KVShape, max_context: int, max_output: int
) -> Sequence[JobSizes]:
    """Return the sizes of every job, those that are alike as one object.

    A slot is sized for the tokens that its request allowed, cut as a gateway cuts them, to `max_output` tokens and to
    what the prompt leaves of `max_context` (0: not known), and for those that were drawn. `marked` tells whether the
    breakpoints of the records count.
    """
    if not len(records):
        return []
    policies, numbers = specs
    prompts, drawn = records.input_tokens.astype(np.int64), records.output_tokens
    allowed = np.maximum(drawn, np.minimum(records.max_tokens, max_output)).astype(np.int64)
    room = np.maximum(drawn, np.maximum(1, max_context - prompts)) if max_context else allowed
    marks = records.marks.counts if marked else np.zeros(len(records), dtype=np.int64)
    if all(spec == PolicySpec() for spec in policies):
        allowed = np.minimum(allowed, room)
        wide = int(allowed.max()) + 1
        alike, places = np.unique(prompts * wide + allowed, return_inverse=True)
        sizes = _whole_sizes(*np.divmod(alike, wide), StepKind.of(policies[0]), shape)
    else:
        columns = np.stack([numbers, prompts, allowed, room, marks])
        rows, places = np.unique(columns, axis=1, return_inverse=True)
        forced: dict[int, tuple[PolicySpec, StepKind, dict[int, int]]] = {}
        sizes = [
            _size(policies[number], prompt, most, rest, count, shape, max_context, forced)
            for number, prompt, most, rest, count in rows.T.tolist()
        ]
    return [sizes[place] for place in places.reshape(-1).tolist()]


def _whole_sizes(prompts: Ints, allowed: Ints, kind: StepKind, shape: KVShape) -> list[JobSizes]:
    """Compute sizes as `_size`, where all is kept as it is: closed forms, of many at once."""
    entries = np.where(allowed > 1, prompts + allowed - 1, 0)
    slots, workspaces = size_classes(entries) * shape.token_bytes, prompts * shape.token_bytes
    columns = (column.tolist() for column in (prompts, allowed, entries, slots, workspaces))
    return [
        JobSizes(
            most, kind, kept=prompt, capacity=capacity, recomputed=1, slot_bytes=slot, workspace_bytes=workspace,
            sum_bytes=0, endless=False,
        )
        for prompt, most, capacity, slot, workspace in zip(*columns, strict=True)
    ]  # fmt: skip


def size_classes(entries: Ints) -> Ints:
    """Return `slot_sizes.size_class` of each."""
    _, bits = np.frexp(entries)
    steps = np.maximum(16, np.left_shift(1, np.maximum(bits - 1, 0).astype(np.int64)) // 4)
    classes: Ints = -(-entries // steps) * steps
    return classes


def _size(
    spec: PolicySpec,
    prompt: int,
    allowed: int,
    room: int,
    marks: int,
    shape: KVShape,
    max_context: int,
    forced: dict[int, tuple[PolicySpec, StepKind, dict[int, int]]],
) -> JobSizes:
    """Return the sizes of a job that may draw `allowed` tokens, but no more than `room` unless it is endless.

    `forced` keeps what is known of the policies in force, by their identity, from one call to the next.
    """
    chosen, spec = spec, budgets.in_force(spec, prompt, allowed)
    if room < allowed and not budgets.is_endless(spec, prompt, allowed, max_context):
        allowed = room
        spec = budgets.in_force(chosen, prompt, allowed)
    if id(spec) not in forced:
        forced[id(spec)] = (spec, StepKind.of(spec), {})
    _, kind, rows = forced[id(spec)]
    return JobSizes(
        allowed,
        kind,
        kept=budgets.kept_tokens(spec, prompt),
        capacity=budgets.slot_capacity(spec, prompt, allowed) if allowed > 1 else 0,
        recomputed=budgets.recomputed_tokens(spec, prompt),
        slot_bytes=slot_sizes.slot_bytes(spec, shape, prompt, allowed, rows) if allowed > 1 else 0,
        workspace_bytes=slot_sizes.workspace_bytes(spec, shape, prompt, marks),
        sum_bytes=slot_sizes.column_sum_bytes(spec, shape, prompt),
        endless=budgets.is_endless(spec, prompt, allowed, max_context),
    )
