"""Changes of the live configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from warmkv.config.base import Section


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
