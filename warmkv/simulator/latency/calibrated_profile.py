"""A calibration as the profile that replays read (`simulator/steps/step_profile.py`)."""

from __future__ import annotations

import numpy as np

from warmkv.config import Config
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.latency.calibration import Calibration, Floats, Times, times_of
from warmkv.simulator.latency.measured_requests import Measured
from warmkv.simulator.steps.step_profile import ErrorOfFit, FittedCost, PolicyProfile, ProfiledModel, StepProfile

EXACT = ErrorOfFit(mean=0.0, p95=0.0)


def profile_of(result: Calibration, requests: Measured, config: Config, limits: Limits) -> StepProfile:
    """Return one kind of policy, the full cache, with the same coefficients in every phase; the model is the settings'.

    The errors are of requests, not of steps: of prefill those of TTFT, of decoding those of TPOT.
    """
    measured = times_of(requests.arrival, requests.first, requests.last, requests.output)
    cost, second = result.cost, slice(len(requests) // 2, None)

    def fitted(metric: str) -> FittedCost:
        return FittedCost(
            a=cost.a,
            b=cost.b,
            c=cost.c,
            points=len(requests),
            in_sample=_error(measured, result.simulated, metric),
            out_of_sample=_error(measured.part(second), result.half_simulated.part(second), metric),
        )

    free = FittedCost(a=0.0, b=0.0, c=0.0, points=len(requests), in_sample=EXACT, out_of_sample=EXACT)
    shape = kv_shape(config)
    return StepProfile(
        machine={},
        versions={},
        commit=None,
        model=ProfiledModel(
            name=config.model.name,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype_bytes=shape.dtype_bytes,
        ),
        prefill_chunk=limits.max_batched_tokens,
        policies=(PolicyProfile(policy="full", prefill=fitted("ttft"), decode=fitted("tpot"), hand_off=free),),
    )


def _error(measured: Times, simulated: Times, metric: str) -> ErrorOfFit:
    truth: Floats = getattr(measured, metric)
    known = ~np.isnan(truth) & (truth > 0)
    if not known.any():
        return EXACT
    shares = np.abs(getattr(simulated, metric)[known] / truth[known] - 1)
    return ErrorOfFit(mean=float(shares.mean()), p95=float(np.percentile(shares, 95)))
