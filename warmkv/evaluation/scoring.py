"""One sample under all policies and budgets at a time: a prefill, then a decode batch with a slot for each."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.evaluation import forcing, matching
from warmkv.evaluation.results import Row
from warmkv.evaluation.tasks import Sample
from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import TokenClasses
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.slots import SlotPool

Key = tuple[str, float | None]  # a policy's label and its share; None: whatever it takes


def score(
    specs: dict[str, PolicySpec],
    shares: Sequence[float],
    model: LoadedModel,
    sample: Sample,
    by_token: bool,
    classes: TokenClasses | None = None,
) -> list[Row]:
    """Score every policy at every share that it can reach, policies without a budget once.

    Those that come to the same on this prompt (a budget beyond it is the full cache) are decoded once.
    """
    shape, tokens, new = model.kv_shape, len(sample.prompt), len(sample.forced)
    matched = match_all(specs, shares, shape, tokens, new)
    inside = {key: budgets.in_force(spec, tokens, new) for key, spec in matched.items()}
    prompt, logits = forcing.prefill(model, sample.prompt, inside.values(), classes)
    pool = SlotPool(shape, model.dtype, model.device)
    filled: dict[tuple[PolicySpec, int | None], forcing.Filled | None] = {}
    of: dict[Key, tuple[PolicySpec, int | None]] = {}
    for key, spec in matched.items():
        allowed = None
        if key[1] is not None and budgets.follows_content(inside[key], tokens):
            allowed = matching.allowed_bytes(shape, tokens, new, key[1])  # only now it is known what it takes
        of[key] = (inside[key], allowed)
        if of[key] not in filled:
            filled[of[key]] = forcing.fill(model, pool, prompt, spec, new, allowed)
    there = {which: slot for which, slot in filled.items() if slot is not None}
    hits, losses = forcing.force(model, pool, [one.slot for one in there.values()], logits, sample.forced)
    rows: dict[tuple[PolicySpec, int | None], Row] = {}
    for (which, one), hit, loss in zip(
        there.items(), hits[:, -sample.answer :], losses[:, -sample.answer :], strict=True
    ):
        right, accuracy = bool(hit.all()), float(hit.double().mean())
        rows[which] = {
            "score": accuracy if by_token else float(right),
            "right": right,
            "accuracy": accuracy,
            "nll": float(loss.double().mean()),
            "bytes": one.bytes,
            "handoff_bytes": one.handoff_bytes,
            "slot_bytes": one.slot.resident_bytes,
            "kept_tokens": one.kept,
        }
    out = []
    for (label, share), spec in matched.items():
        if (which := of[label, share]) in rows:
            final = spec if which[1] is None else there[which].spec
            budget = int(final.budget) if matching.has_budget(final) else None
            out.append({"policy": label, "share": share, "budget": budget, **rows[which]})
    return out


def match_all(
    specs: dict[str, PolicySpec], shares: Sequence[float], shape: KVShape, prompt_tokens: int, new_tokens: int
) -> dict[Key, PolicySpec]:
    """Return every policy at every share that it can reach, from large to small."""
    out: dict[Key, PolicySpec] = {}
    for label, spec in specs.items():
        if not matching.has_budget(spec):
            out[label, None] = spec
            continue
        for share in sorted(set(shares), reverse=True):
            allowed = matching.allowed_bytes(shape, prompt_tokens, new_tokens, share)
            if (fitting := matching.match(spec, shape, prompt_tokens, new_tokens, allowed)) is not None:
                out[label, share] = fitting
    return out
