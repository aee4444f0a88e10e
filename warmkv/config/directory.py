"""The prefix directory, which knows the blocks of every replica."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section


class DirectoryConfig(Section):
    max_blocks: int = Field(1_000_000, ge=1, description="blocks the directory remembers, summed over replicas")
    shards: int = Field(1, ge=1, le=256, description="actors that share the blocks among them, by hash")
