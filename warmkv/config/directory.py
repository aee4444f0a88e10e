"""The prefix directory, which knows the blocks of every replica."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section


class DirectoryConfig(Section):
    publish_seconds: float = Field(0.02, gt=0, description="longest time a replica batches its events")
    heartbeat_seconds: float = Field(1.0, gt=0, description="longest time between two reports of a replica")
    silence_seconds: float = Field(15.0, gt=0, description="a replica that has not reported for so long is forgotten")
    follow_seconds: float = Field(10.0, gt=0, description="how long a router waits for changes before it asks again")
    max_blocks: int = Field(1_000_000, ge=1, description="blocks the directory remembers, summed over replicas")
    log_blocks: int = Field(
        200_000, ge=1, description="blocks in the changes kept for routers that catch up; others get everything anew"
    )
    shards: int = Field(1, ge=1, le=256, description="actors that share the blocks among them, by hash")
