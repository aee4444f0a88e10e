"""Which replica a request goes to, what moves between replicas, and the directory that knows what they hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from warmkv.config.base import Section


class RoutingConfig(Section):
    policy: Literal["prefix_cost", "power_of_two", "round_robin", "least_loaded", "sticky_session"] = Field(
        "prefix_cost", description="order in which replicas are tried"
    )
    load_weight: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="blocks of prefill that one request in flight counts as; less, the busier the replicas are",
    )
    overload: int = Field(
        8,
        ge=1,
        description="requests in flight above the least loaded replica's at which warmth is ignored; more, the busier "
        "the replicas are",
    )
    allow_request_replica: bool = Field(True, description="whether a request may name the replica it wants")
    transfer: bool | Literal["always"] = Field(
        True,
        description="whether a replica may fetch blocks that another one holds in memory, where it expects that to be "
        "faster than to compute them; always: also where it does not",
    )


class TransferConfig(Section):
    byte_seconds: float = Field(
        1e-9,
        ge=0,
        allow_inf_nan=False,
        description="of the network between replicas, a byte: what a replica believes until it has measured, and what "
        "fetches take in a replay",
    )


class DirectoryConfig(Section):
    max_blocks: int = Field(1_000_000, ge=1, description="blocks the directory remembers, summed over replicas")
    shards: int = Field(1, ge=1, le=256, description="actors that share the blocks among them, by hash")
