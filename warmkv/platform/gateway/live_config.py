"""Endpoints of the live configuration: operators see it, change it and roll it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StringConstraints

from warmkv.config import ConfigError
from warmkv.platform.control import LiveConfigControl, StoreError
from warmkv.platform.gateway.apis.errors import ErrorType, refusals
from warmkv.platform.gateway.apis.schema import Body, parse
from warmkv.platform.gateway.intake.body import Intake
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.service import Service
from warmkv.platform.live_config import StaleVersionError, UnknownVersionError, values
from warmkv.platform.tenants import Caller

REFUSED: dict[type[Exception], ErrorType] = {
    ConfigError: "invalid_request_error",
    StaleVersionError: "conflict_error",
    UnknownVersionError: "not_found_error",
    StoreError: "api_error",
}
Why = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]

B = TypeVar("B", bound=Body)


class ChangeBody(Body):
    changes: dict[str, Any] = Field(min_length=1, max_length=100, description="dotted settings and their new values")
    why: Why
    version: int | None = Field(None, ge=0, description="that must be in force for this; whatever is, if absent")


class RollbackBody(Body):
    to: int | None = Field(None, ge=0, description="version; the one before that in force if absent")
    why: Why
    version: int | None = Field(None, ge=0, description="that must be in force for this; whatever is, if absent")


def add_policy_endpoints(
    app: FastAPI, service: Service, intake: Intake, control: LiveConfigControl, operator_of: Callable[[Request], Caller]
) -> None:
    """Add `/v1/warmkv/policy` and what is below it. `operator_of` raises ApiError for who may not."""
    start, limits = service.config, BodyLimits.of(service.config.gateway)

    async def read(request: Request, model: type[B]) -> B:
        return await intake.take(request, lambda data, _: parse(data, model, limits))

    def shown(status: dict[str, Any]) -> Response:
        current = status["current"].model_dump(mode="json")
        in_force = {"changed": current.pop("settings"), "settings": values(service.policy.config)}
        return JSONResponse({"version": current.pop("number"), **current, **in_force, **_without_current(status)})

    @app.get("/v1/warmkv/policy")
    async def get_policy(request: Request) -> Response:
        operator_of(request)
        return shown(await control.status())

    @app.put("/v1/warmkv/policy")
    async def put_policy(request: Request) -> Response:
        who = operator_of(request).name
        body = await read(request, ChangeBody)
        with refusals(REFUSED):
            return shown(await control.change(start, body.changes, who, body.why, body.version))

    @app.post("/v1/warmkv/policy/rollback")
    async def roll_back(request: Request) -> Response:
        who = operator_of(request).name
        body = await read(request, RollbackBody)
        with refusals(REFUSED):
            return shown(await control.roll_back(start, body.to, who, body.why, body.version))

    @app.get("/v1/warmkv/policy/history")
    async def get_history(request: Request) -> Response:
        operator_of(request)
        versions = [version.model_dump(mode="json") for version in await control.history()]
        return JSONResponse({"versions": [{"version": one.pop("number"), **one} for one in versions]})


def _without_current(status: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key != "current"}
