"""A run: every sample once through the model, for all policies and budgets at a time. What is done is skipped."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from typing import Any

import torch
import transformers

from warmkv import __version__
from warmkv.evaluation import matching, scoring, stream, tasks
from warmkv.evaluation.plan import EvalError, EvalPlan, SampleSet, bounded
from warmkv.evaluation.results import STREAM, Row, RunFolder
from warmkv.policies.compression.prefill_state import TokenClasses
from warmkv.replicas.loading.load import LoadedModel, token_classes

Progress = Callable[[str, int], None]
"""Told what is done now, and how much work since it was last told: `work` in all."""
STREAM_WORK = 4
"""Work of decoding a token of the stream, where that of a sample is its length."""
MARGIN = 64
"""Tokens by which a chat template may exceed a sample's length."""


def meta_of(plan: EvalPlan, model: LoadedModel) -> Row:
    """Return the figures that must agree for results to belong together. Nothing in them names the machine."""
    shape = model.kv_shape
    return {
        "settings": plan.to_json(),
        "model": {
            "name": plan.model,
            "weights": fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "max_context": model.max_context,
            "token_bytes": shape.token_bytes,
        },
        "versions": {
            "warmkv": __version__,
            "python": platform.python_version(),  # its standard library is the text
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def fingerprint(model: LoadedModel) -> str:
    """Hash all weights, independent of summation order, and a sample of packed ones, which are in no state dict.

    Other weights under a name are another model.
    """
    digest = hashlib.sha256(model.weights.encode())
    for name, tensor in model.module.state_dict().items():
        integers = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
        total = int(integers.sum(dtype=torch.int64))
        digest.update(f"{name} {list(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:16]


def check(plan: EvalPlan, model: LoadedModel) -> None:
    """Check that the model can do what the plan asks. Raises EvalError."""
    specs = plan.specs()
    if not model.fixed_rotation:
        if turning := [label for label, spec in specs.items() if spec.method.rotates]:
            raise EvalError(f"the rotary embedding of {plan.model} cannot be turned on, as {', '.join(turning)} must")
        if tasks.STREAM in plan.tasks and plan.stream_tokens > model.max_context:
            raise EvalError(f"{plan.model} takes {model.max_context} tokens; give at most so many --stream-tokens")
    asked = set(plan.tasks) - {tasks.STREAM}
    longest = model.max_context - MARGIN
    if asked and max(plan.lengths) > longest:
        raise EvalError(
            f"{plan.model} takes {model.max_context} tokens; --lengths go up to {longest}, got {max(plan.lengths)}"
        )


def work(plan: EvalPlan, tokenizer: Any) -> int:
    """Return the units of progress that `evaluate` reports in all, roughly proportional to time."""
    parts = plan.parts(tasks.has_template(tokenizer))
    stream_work = STREAM_WORK * plan.stream_tokens if tasks.STREAM in plan.tasks else 0
    return sum(len(part) * part.length for part in parts) + stream_work


def evaluate(plan: EvalPlan, model: LoadedModel, tokenizer: Any, folder: RunFolder, progress: Progress) -> None:
    """Do what is missing in the folder, and merge everything. `plan` and `model` are those of its `meta`."""
    texts, specs = tasks.Texts(tokenizer), plan.specs()
    reads_classes = any(spec.shots or spec.method.reads_classes for spec in specs.values())
    classes = token_classes(tokenizer) if reads_classes else None
    parts = list(plan.parts(tasks.has_template(tokenizer)))
    for part in parts:
        progress(part.name, 0)
        if folder.has(part.name):
            progress(part.name, len(part) * part.length)
            continue
        rows: list[Row] = []
        for depth, index in part.cells():
            rows += _sample_rows(plan, part, model, texts, classes, depth, index)
            progress(part.name, part.length)
        folder.store(part.name, rows)
    if tasks.STREAM in plan.tasks:
        progress(STREAM, 0)
        if folder.has(STREAM):
            progress(STREAM, STREAM_WORK * plan.stream_tokens)
        else:
            ids = stream.tokens(texts, plan.seed, plan.stream_tokens)
            told = lambda tokens: progress(STREAM, STREAM_WORK * tokens)  # noqa: E731
            folder.store(STREAM, stream.evaluate(model, ids, bounded(specs), plan.seed, told, classes))
    folder.merge(part.name for part in parts)


def _sample_rows(
    plan: EvalPlan,
    part: SampleSet,
    model: LoadedModel,
    texts: tasks.Texts,
    classes: TokenClasses | None,
    depth: float | None,
    index: int,
) -> list[Row]:
    sample = tasks.draw(part.task, texts, seed=plan.seed, length=part.length, depth=depth, form=part.form, index=index)
    if len(sample.prompt) + len(sample.forced) > model.max_context:
        raise EvalError(
            f"a sample of {part.name} has {len(sample.prompt) + len(sample.forced)} tokens in this model's chat "
            f"template, which takes {model.max_context}; leave out the length {part.length}"
        )
    common = {
        "task": part.task.name,
        "variant": part.form,
        "length": part.length,
        "depth": sample.depth,
        "sample": index,
        "seed": plan.seed,
        "prompt_tokens": len(sample.prompt),
        "full_bytes": matching.full_bytes(model.kv_shape, len(sample.prompt), len(sample.forced)),
    }
    scored = scoring.score(plan.specs(), plan.budgets, model, sample, part.task.by_token, classes)
    return [{**common, **row} for row in scored]
