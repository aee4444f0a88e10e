"""Changes of the live configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field, model_validator

from warmkv.config.base import Section


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
    history: int = Field(100, ge=2, description="versions that are kept")
    max_body_bytes: ByteSize = Field(ByteSize(256 << 10), description="of a request that changes the policy")
    follow_seconds: float = Field(10.0, gt=0, description="how long a gateway waits for a change before it asks again")
    silence_seconds: float = Field(15.0, gt=0, description="a gateway that has not asked for so long is forgotten")
    apply_seconds: float = Field(
        5.0, ge=0, description="how long the answer to a change waits until all gateways have heard of it"
    )
    start_seconds: float = Field(
        60.0, gt=0, description="how long a gateway that starts waits for the policy in force; then it fails"
    )

    @model_validator(mode="after")
    def _check(self) -> ControlConfig:
        if self.silence_seconds <= self.follow_seconds:
            raise ValueError("silence_seconds must be more than follow_seconds")
        return self
