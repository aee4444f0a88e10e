"""Blocks that move from replica to replica."""

from __future__ import annotations

from pydantic import ByteSize, Field

from warmkv.config.base import Section


class TransferConfig(Section):
    """How blocks move from replica to replica; whether they do is the routing's matter.

    The times are guesses, which hold until a replica has measured its own.
    """

    timeout_seconds: float = Field(2.0, gt=0, description="longest time a request waits for blocks of another replica")
    piece_bytes: ByteSize = Field(ByteSize(32 << 20), ge=1, description="limit of what a replica hands out at a time")
    token_seconds: float = Field(0.0001, gt=0, allow_inf_nan=False, description="prefill, a token")
    start_seconds: float = Field(0.02, ge=0, allow_inf_nan=False, description="a fetch, whatever its size")
    byte_seconds: float = Field(1e-9, ge=0, allow_inf_nan=False, description="a fetch, a byte")
    handover_seconds: float = Field(
        10.0, ge=0, description="longest time in which a replica that is stopped hands its blocks over; 0: it does not"
    )
