"""Replicas and gateways as Ray Serve runs them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from warmkv.config.base import Section

LEAST_LOOK_BACK = 15.0  # seconds; Serve's reports come every 10, and it wants more than one of them

STOP_SECONDS = 5.0
"""Time that Serve gives a part that is stopped beside its own: it looks for requests of its own for 2 s first, and
what the part holds is closed last."""


class AutoscalingConfig(Section):
    """More replicas under load and fewer without, within limits."""

    min_replicas: int = Field(1, ge=1, description="fewest replicas")
    max_replicas: int = Field(ge=1, description="most replicas")
    target_ongoing_requests: float = Field(8.0, gt=0, description="requests in flight that a replica is meant to have")
    upscale_delay_seconds: float = Field(30.0, ge=0, description="how long there must be more before one is started")
    downscale_delay_seconds: float = Field(
        600.0, ge=0, description="how long there must be fewer before one is stopped"
    )

    @property
    def look_back_seconds(self) -> float:
        """Return the time over which requests are averaged: the delay of starting a replica, if that is longer."""
        return max(LEAST_LOOK_BACK, self.upscale_delay_seconds)


class ClusterConfig(Section):
    application: str = Field("warmkv", pattern=r"^[a-z0-9-]+$", description="name of the Serve application")
    replicas: int = Field(1, ge=1, description="with autoscaling, those at the start")
    autoscaling: AutoscalingConfig | None = Field(None, description="null: there are always as many replicas")
    drain_seconds: float = Field(
        30.0,
        ge=0,
        description="time for what is in flight when a replica or gateway is stopped; then a replica hands its blocks "
        "over, within a third of that",
    )
    gateways: int = Field(1, ge=1, description="gateways in the cluster")
    cpus_per_replica: float = Field(1.0, ge=0, description="CPUs that Ray reserves for a replica")
    gpus_per_replica: float = Field(0.0, ge=0, description="0.5 puts two replicas on one GPU")
    max_queued_requests: int = Field(256, ge=1, description="requests that wait in a gateway; more are refused")
    groups: dict[str, dict[str, Any]] = Field(
        {},
        description="further replicas of the same model, beside those of the configuration itself: by a name, the "
        "settings that differ, as in `{vllm: {engine: {kind: vllm}, cluster: {replicas: 2}}}`. A request goes where "
        "its compression policy can be served",
    )

    @property
    def handover_seconds(self) -> float:
        """Return the longest time in which a replica that is stopped hands its blocks over; 0: it does not."""
        return self.drain_seconds / 3

    @property
    def stop_seconds(self) -> float:
        """Return the longest time in which a replica that is stopped ends by itself; then Serve kills it."""
        return STOP_SECONDS + self.drain_seconds + self.handover_seconds

    @property
    def most_replicas(self) -> int:
        """Return the most replicas that there may be."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        scaling = self.autoscaling
        if scaling is not None and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError("replicas must lie between autoscaling.min_replicas and autoscaling.max_replicas")
        return self
