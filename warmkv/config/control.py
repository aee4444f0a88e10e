"""Changes of the live configuration, and what they would do."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from warmkv.config.base import Section


class WhatIfConfig(Section):
    """Replays of the service's own latest requests under other settings."""

    quality: Path | None = Field(
        None,
        description="results.parquet of `warmkv eval`, on a disk that every node sees: what policies do to answers",
    )


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
    whatif: WhatIfConfig | None = Field(None, description="null: no what-if service; {} is one without an evaluation")
