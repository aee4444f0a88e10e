"""Blocks that move from replica to replica."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section


class TransferConfig(Section):
    byte_seconds: float = Field(
        1e-9,
        ge=0,
        allow_inf_nan=False,
        description="of the network between replicas, a byte: what a replica believes until it has measured, and what "
        "fetches take in a replay",
    )
