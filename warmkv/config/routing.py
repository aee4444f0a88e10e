"""Which replica a request goes to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from warmkv.config.base import Section


class RoutingConfig(Section):
    policy: Literal["prefix_cost", "power_of_two", "round_robin", "least_loaded", "sticky_session"] = "prefix_cost"
    load_weight: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="blocks of prefill that one request in flight counts as; less, the busier the replicas are",
    )
    queue_weight: float = Field(
        8.0, ge=0, allow_inf_nan=False, description="further blocks that one counts as which waits for a decode slot"
    )
    prefill_weight: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="blocks that each counts as which is still to compute for a request in flight; less, likewise",
    )
    recent_weight: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="blocks of prefill that having been given all work of late counts as; less for a share",
    )
    host_credit: float = Field(0.75, ge=0, le=1, description="worth of a warm block in host memory; 1 on the device")
    disk_credit: float = Field(0.25, ge=0, le=1, description="worth of a warm block on disk")
    overload: int = Field(
        8, ge=1, description="requests in flight above the least loaded replica's at which warmth is ignored"
    )
    session_blocks: int = Field(
        4, ge=1, description="first blocks of a prompt that name its session, for sticky_session"
    )
    breaker_failures: int = Field(
        3, ge=0, description="failures of a replica in a row after which it gets no requests for a while; 0: never"
    )
    breaker_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="that while; twice as long after each trial that fails"
    )
    breaker_max_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="longest such while")
    allow_request_replica: bool = Field(True, description="whether a request may name the replica it wants")
    transfer: bool = Field(True, description="whether a replica may fetch blocks that another one holds in memory")
    transfer_block: float = Field(
        0.25, ge=0, allow_inf_nan=False, description="blocks of prefill that fetching one block counts as"
    )
    transfer_start: float = Field(
        4.0, ge=0, allow_inf_nan=False, description="blocks of prefill that any fetch counts as besides"
    )
    transfer_min_blocks: int = Field(8, ge=1, description="fewest blocks that are worth a fetch")
