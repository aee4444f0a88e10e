"""Endpoints of the live configuration: operators see it, change it and roll it back."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StringConstraints

from warmkv.config import ConfigError
from warmkv.platform.control import LiveConfigControl
from warmkv.platform.gateway.access.audit import about, came_of
from warmkv.platform.gateway.apis.errors import ApiError, ErrorType, invalid, refusals
from warmkv.platform.gateway.apis.schema import Body, parse
from warmkv.platform.gateway.intake.body import Intake
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.service import Service
from warmkv.platform.live_config import StaleVersionError, UnknownVersionError, in_force, values, warnings
from warmkv.platform.live_config_store import StoreError
from warmkv.platform.named_actors import ActorAwayError
from warmkv.platform.tenants import Caller

REFUSED: dict[type[Exception], ErrorType] = {
    ConfigError: "invalid_request_error",
    StaleVersionError: "conflict_error",
    UnknownVersionError: "not_found_error",
    StoreError: "api_error",
    ActorAwayError: "overloaded_error",
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

    def shown(status: dict[str, Any], **more: Any) -> Response:
        config = service.policy.config
        with suppress(ConfigError):  # where a version does not fit here, what is in force
            config = in_force(start, status["current"])  # of which this gateway may not have heard yet
        current = status["current"].model_dump(mode="json")
        live = {"changed": current.pop("settings"), "settings": values(config)}
        number = current.pop("number")
        answer = {"version": number, **current, **live, **_without_current(status), **more}
        return JSONResponse(answer, headers={"etag": f'"{number}"'})

    async def next_version(
        request: Request, body: ChangeBody | RollbackBody, what: Any, make: Callable[[int | None], Awaitable[Any]]
    ) -> Response:
        """Have a version made on the one that the request is based on, and note what came of it."""
        about(request, what, body.why)
        based_on, before = _based_on(request.headers.get("if-match"), body.version), service.policy.config
        try:
            with refusals(REFUSED):
                status = await make(based_on)
        except ApiError as error:
            if error.type == "overloaded_error":
                message = f"{error.message}. Look at the history before you try again: the change may have been made."
                raise ApiError(error.type, message) from None
            if error.type == "conflict_error" and body.version is None:
                raise ApiError(error.type, error.message, status=412) from None  # as If-Match has it
            raise
        came_of(request, f"version {status['current'].number}")
        return shown(status, warnings=warnings(before, in_force(start, status["current"])))

    @app.get("/v1/warmkv/policy")
    async def get_policy(request: Request) -> Response:
        operator_of(request)
        with refusals(REFUSED):
            return shown(await control.status())

    @app.put("/v1/warmkv/policy")
    async def put_policy(request: Request) -> Response:
        who = operator_of(request).name
        body = await read(request, ChangeBody)
        return await next_version(
            request, body, body.changes, lambda based_on: control.change(start, body.changes, who, body.why, based_on)
        )

    @app.post("/v1/warmkv/policy/rollback")
    async def roll_back(request: Request) -> Response:
        who = operator_of(request).name
        body = await read(request, RollbackBody)
        what = {"rollback": "the version before" if body.to is None else body.to}
        return await next_version(
            request, body, what, lambda based_on: control.roll_back(start, body.to, who, body.why, based_on)
        )

    @app.get("/v1/warmkv/policy/history")
    async def get_history(request: Request) -> Response:
        operator_of(request)
        with refusals(REFUSED):
            versions = [version.model_dump(mode="json") for version in await control.history()]
        return JSONResponse({"versions": [{"version": one.pop("number"), **one} for one in versions]})


def _based_on(if_match: str | None, version: int | None) -> int | None:
    """Return the version that must be in force, by the header `If-Match` or the body; None for any.

    Raises ApiError (400) where the two differ or the header is no entity tag of a version, (412) for a weak one, which
    matches nothing (RFC 9110, 13.1.1).
    """
    if if_match is None or if_match.strip() == "*":
        return version
    if (match := re.fullmatch(r'\s*(W/)?"([0-9]{1,18})"\s*', if_match)) is None:
        raise invalid('If-Match: one version, as the ETag of GET /v1/warmkv/policy has it: "7"')
    if match[1]:
        raise ApiError("conflict_error", f"If-Match: {if_match} is weak and matches nothing", status=412)
    if version not in (None, int(match[2])):
        raise invalid(f"If-Match: {match[2]} and version: {version} differ")
    return int(match[2])


def _without_current(status: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key != "current"}
