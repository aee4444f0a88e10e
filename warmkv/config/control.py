"""Changes of the live configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field

from warmkv.config.base import Section


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
    max_body_bytes: ByteSize = Field(ByteSize(256 << 10), description="of a request that changes the policy")
