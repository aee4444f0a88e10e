"""Endpoints of the what-if service: operators see candidates, add their own and take them away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from warmkv.config import ConfigError
from warmkv.platform.gateway.access.audit import about, came_of
from warmkv.platform.gateway.apis.errors import ApiError, ErrorType, refusals
from warmkv.platform.gateway.apis.schema import Body, parse
from warmkv.platform.gateway.intake.body import Intake
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.service import Service
from warmkv.platform.live_config_store import StoreError
from warmkv.platform.named_actors import ActorAwayError
from warmkv.platform.tenants import Caller
from warmkv.platform.whatif.candidates import TooManyCandidatesError, UnknownCandidateError

REFUSED: dict[type[Exception], ErrorType] = {
    ConfigError: "invalid_request_error",
    TooManyCandidatesError: "conflict_error",
    UnknownCandidateError: "not_found_error",
    StoreError: "api_error",
    ActorAwayError: "overloaded_error",
}


class WhatIfControl(Protocol):
    """What the endpoints ask of the service, which `WhatIf` is and `RemoteWhatIf` calls."""

    async def table(self) -> dict[str, Any]: ...
    async def add(self, changes: dict[str, Any]) -> dict[str, Any]: ...
    async def remove(self, name: str) -> None: ...


class CandidateBody(Body):
    changes: dict[str, Any] = Field(min_length=1, max_length=100, description="dotted settings and their values")


def add_whatif_endpoints(
    app: FastAPI,
    service: Service,
    intake: Intake,
    whatif: WhatIfControl | None,
    operator_of: Callable[[Request], Caller],
) -> None:
    """Add `/v1/warmkv/whatif` and what is below it. `operator_of` raises ApiError for who may not."""
    limits = BodyLimits.of(service.config.gateway)

    def on(request: Request) -> WhatIfControl:
        """Return the service. Raises ApiError for who is no operator, and where there is none."""
        operator_of(request)
        if whatif is None:
            raise ApiError(
                "not_found_error", "there is no what-if service here: set control.whatif, {} for the defaults"
            )
        return whatif

    @app.get("/v1/warmkv/whatif")
    async def get_whatif(request: Request) -> Response:
        known = on(request)
        with refusals(REFUSED):
            return JSONResponse(await known.table())

    @app.post("/v1/warmkv/whatif")
    async def add_candidate(request: Request) -> Response:
        known = on(request)
        body = await intake.take(request, lambda data, _: parse(data, CandidateBody, limits))
        about(request, body.changes)
        with refusals(REFUSED):
            added = await known.add(body.changes)
        came_of(request, f"candidate {added['candidate']}")
        return JSONResponse(added)

    @app.delete("/v1/warmkv/whatif/{name}")
    async def remove_candidate(request: Request, name: str) -> Response:
        known = on(request)
        with refusals(REFUSED):
            await known.remove(name)
        came_of(request, f"candidate {name} is taken away")
        return JSONResponse({"type": "candidate_removed", "candidate": name})
