"""What the requests of a replay take of a replica: entries and bytes of slots, workspace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from warmkv.policies import budgets, slot_sizes
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.steps.costs import StepKind

Sizes = tuple[StepKind, int, int, int, int, int, int, bool]
"""What a job takes: fields of `Job`, from `kind` on."""


def sizes_of(
    records: Sequence[RequestRecord],
    specs: Sequence[PolicySpec],
    marks: Sequence[tuple[Mark, ...]],
    shape: KVShape,
    max_context: int,
) -> Iterable[Sizes]:
    """Return the sizes of every job. A slot is sized for what its request allowed."""
    if not records:
        return []
    if all(spec == PolicySpec() for spec in {id(spec): spec for spec in specs}.values()):
        return _whole_sizes(records, StepKind.of(specs[0]), shape)
    known: dict[tuple[int, int, int, int], Sizes] = {}  # many requests are alike
    forced: dict[int, tuple[PolicySpec, StepKind, dict[int, int]]] = {}
    found = []
    for record, spec, own in zip(records, specs, marks, strict=True):
        alike = (id(spec), record.input_tokens, max(record.output_tokens, record.max_tokens), len(own))
        if alike not in known:
            known[alike] = _size(spec, *alike[1:], shape, max_context, forced)
        found.append(known[alike])
    return found


def _whole_sizes(records: Sequence[RequestRecord], kind: StepKind, shape: KVShape) -> Iterable[Sizes]:
    """Compute sizes as `_size`, where all is kept as it is: closed forms, of all requests at once.

    Requests that are alike share one object.
    """
    prompts = np.array([record.input_tokens for record in records], dtype=np.int64)
    allowed = np.array([max(record.output_tokens, record.max_tokens) for record in records], dtype=np.int64)
    wide = allowed.max() + 1
    alike, numbers = np.unique(prompts * wide + allowed, return_inverse=True)
    prompts, allowed = np.divmod(alike, wide)
    entries = np.where(allowed > 1, prompts + allowed - 1, 0)
    slots, workspaces = size_classes(entries) * shape.token_bytes, prompts * shape.token_bytes
    columns = (column.tolist() for column in (prompts, entries, slots, workspaces))
    sizes = [
        (kind, prompt, capacity, 1, slot, workspace, 0, False)
        for prompt, capacity, slot, workspace in zip(*columns, strict=True)
    ]
    return [sizes[number] for number in numbers.tolist()]


def size_classes(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `slot_sizes.size_class` of each."""
    _, bits = np.frexp(entries)
    steps = np.maximum(16, np.left_shift(1, np.maximum(bits - 1, 0).astype(np.int64)) // 4)
    classes: NDArray[np.int64] = -(-entries // steps) * steps
    return classes


def _size(
    spec: PolicySpec,
    prompt: int,
    allowed: int,
    marks: int,
    shape: KVShape,
    max_context: int,
    forced: dict[int, tuple[PolicySpec, StepKind, dict[int, int]]],
) -> Sizes:
    """Return the sizes of a job that may draw `allowed` tokens.

    `forced` keeps what is known of the policies in force, by their identity, from one call to the next.
    """
    spec = budgets.in_force(spec, prompt, allowed)
    if id(spec) not in forced:
        forced[id(spec)] = (spec, StepKind.of(spec), {})
    _, kind, rows = forced[id(spec)]
    return (
        kind,
        budgets.kept_tokens(spec, prompt),
        budgets.slot_capacity(spec, prompt, allowed) if allowed > 1 else 0,
        budgets.recomputed_tokens(spec, prompt),
        slot_sizes.slot_bytes(spec, shape, prompt, allowed, rows) if allowed > 1 else 0,
        slot_sizes.workspace_bytes(spec, shape, prompt, marks),
        slot_sizes.column_sum_bytes(spec, shape, prompt),
        budgets.is_endless(spec, prompt, allowed, max_context),
    )
