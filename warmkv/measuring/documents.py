"""What is written: the JSON of a bench, and the file of step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from warmkv.config import Config
from warmkv.measuring import machine, profiling
from warmkv.measuring.bench import Bench
from warmkv.measuring.plan import BenchPlan, ProfilePlan
from warmkv.replicas.loading.load import LoadedModel
from warmkv.simulator.steps.step_profile import Measurement, ProfiledModel, StepProfile


def bench_document(
    bench: Bench, plan: BenchPlan, config: Config, model: LoadedModel, found: dict[str, Any]
) -> dict[str, Any]:
    """Return rows of a bench with the machine, as `found` before it, and everything else they depend on.

    Times in seconds.
    """
    return {
        "machine": found,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "model": {
            **_model(config, model).model_dump(),
            "max_context": model.max_context,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights_bytes": model.weight_bytes(),
        },
        "settings": {**asdict(plan), "policies": list(plan.specs()), "engine": config.engine.model_dump(mode="json")},
        "prefill": [asdict(row) for row in bench.prefill],
        "decode": [asdict(row) for row in bench.decode],
    }


def profile_document(
    measured: Sequence[Measurement], plan: ProfilePlan, config: Config, model: LoadedModel, found: dict[str, Any]
) -> StepProfile:
    """Fit the step times of a machine, as `found` before. Raises MeasureError if there is too little to fit."""
    return StepProfile(
        machine=found,
        versions=machine.versions(),
        commit=machine.commit(),
        model=_model(config, model),
        prefill_chunk=int(max(one.tokens for one in measured if one.phase == "prefill")),
        policies=profiling.fits(measured, plan.specs()),
        measurements=tuple(measured),
    )


def _model(config: Config, model: LoadedModel) -> ProfiledModel:
    shape = model.kv_shape
    return ProfiledModel(
        name=config.model.name,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=shape.dtype_bytes,
    )
