"""Replays: step times, KV shape, objectives, failures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from warmkv.config.base import Section
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape

log = logging.getLogger(__name__)


class SloConfig(Section):
    """When an answer came in time; both must hold."""

    ttft: float = Field(2.0, gt=0, description="seconds to the first token, at most")
    tpot: float = Field(0.1, gt=0, description="seconds for each token after it, at most, on average")


class FailureConfig(Section):
    """A replica that dies, with its blocks and the slots of its requests."""

    at: float = Field(ge=0, allow_inf_nan=False, description="seconds after the first arrival")
    replica: int = Field(
        0, ge=0, description="its place: replicas are numbered from 0, and a new one takes a free place"
    )
    group: str = Field("", description="of cluster.groups; empty for the replicas of the configuration itself")
    seconds: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="until that is known and another one is started in its place"
    )


class SimulatorConfig(Section):
    """Step time in seconds = a + b * tokens computed + c * context tokens read, per engine step.

    A profile, or a whole model on a GPU, takes the place of a, b and c.
    """

    profile: Path | None = Field(
        None, description="file of `warmkv profile`: measured step times, which take the place of step_*"
    )
    model: ModelShape = Field(
        ModelShape.model_validate({}),
        description="a model's config.json: its KV shape, and step times of its roofline on simulator.gpu; or layers, "
        "kv_heads, head_dim and dtype_bytes alone, where step times come from elsewhere",
    )
    gpu: Gpu = Field(
        Gpu.model_validate("H100-SXM"), description="name in the catalogue (`warmkv replay --gpu list`); also its price"
    )
    batching: Literal["auto", "shortest_first", "mixed"] = Field(
        "auto",
        description="how replicas fill the engine.step_tokens of a step: the shortest prompts first, as warmkv; "
        "or first come, first served, as vLLM; auto: as the engine of engine.kind",
    )
    step_a: float = Field(0.004, ge=0, allow_inf_nan=False, description="seconds a step")
    step_b: float = Field(0.00012, ge=0, allow_inf_nan=False, description="seconds a token computed")
    step_c: float = Field(2e-8, ge=0, allow_inf_nan=False, description="seconds a token of context read")
    host_bandwidth: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="bytes a second at which blocks are read from host memory; null: those of the GPU's PCIe where "
        "step times are its roofline, else at once",
    )
    disk_bandwidth: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="bytes a second at which blocks are read from disk; null: at once"
    )
    overhead_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="of a request outside its replica: HTTP, tokenizing, routing; a fit to a log finds its own",
    )
    slo: SloConfig = SloConfig()
    index_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds until routers know what a replica sent, which it does at most every 250 ms; 0: at once",
    )
    startup_seconds: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="until a replica takes requests that was started during the run"
    )
    failures: tuple[FailureConfig, ...] = Field((), description="replicas that die in the course of the run")

    @field_validator("batching", mode="before")
    @classmethod
    def _as_warmkv(cls, value: Any) -> Any:
        """Read `prefill_first`, as warmkv batched once, as what it does now."""
        if value == "prefill_first":
            log.warning("simulator.batching: prefill_first is shortest_first now: warmkv computes prompts together")
            return "shortest_first"
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _none_is_the_default(cls, value: Any) -> Any:
        return {} if value is None else value
