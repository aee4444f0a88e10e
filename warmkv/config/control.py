"""Changes of the live configuration, and what they would do."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from warmkv.config.base import Section

_ORIGIN = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]*,]+)(?::([0-9]{1,5}))?")
_USUAL_PORTS = {"http": "80", "https": "443"}


class WhatIfConfig(Section):
    """Replays of the service's own latest requests under other settings."""

    quality: Path | None = Field(
        None,
        description="results.parquet of `warmkv eval`, on a disk that every node sees: what policies do to answers",
    )


class AutopilotConfig(Section):
    """Steps that the service takes by itself, on what the what-if service predicts."""

    min_gain: float = Field(
        0.05, gt=0, lt=1, description="least gain of a step, relative; of requests within the SLO, in points"
    )
    max_model_error: float = Field(
        0.1, gt=0, lt=1, description="largest error of the what-if service's predictions with which a step is taken"
    )
    settle_seconds: float = Field(
        1800.0,
        gt=0,
        description="rest after any change of the live configuration; then what a step did is measured for as long",
    )


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="of pages that may call the operators' endpoints in a browser, as that of Grafana: "
        "http://grafana.example.org:3000",
    )
    whatif: WhatIfConfig | None = Field(None, description="null: no what-if service; {} is one without an evaluation")
    autopilot: AutopilotConfig | None = Field(
        None, description="null: only operators change the live configuration; {} takes steps with the defaults"
    )

    @model_validator(mode="after")
    def _check(self) -> ControlConfig:
        if self.autopilot is not None and self.whatif is None:
            raise ValueError("autopilot goes by the what-if service: set whatif, {} for the defaults")
        return self

    @field_validator("allowed_origins")
    @classmethod
    def _as_browsers_say(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """Return the origins as browsers name them: in small letters, without the port that is usual for the scheme."""
        found = []
        for origin in origins:
            if (match := _ORIGIN.fullmatch(origin.lower())) is None:
                raise ValueError(
                    f"{origin!r} is no origin: scheme, host and port alone, as in http://grafana.example.org:3000"
                )
            scheme, host, port = match.groups()
            found.append(f"{scheme}://{host}" + (f":{port}" if port and port != _USUAL_PORTS[scheme] else ""))
        return tuple(found)
