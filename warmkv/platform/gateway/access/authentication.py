"""No route without a key: what is not named here asks for one, also pages that are not there and the schema."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from warmkv.platform.gateway import console
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.paths import path_of
from warmkv.platform.tenants import Caller, Tenant, authenticate
from warmkv.platform.tenants_file import Tenants

PUBLIC = ("/health", "/healthz", "/readyz", *console.PATHS)  # probes have no key, and a browser sends none for a page


class Authentication:
    """ASGI middleware: leaves the caller in the request's state, or answers 401 before anything of the body is read."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        secret: bytes,
        wall_clock: Callable[[], float],
        refuse: Callable[[Request, ApiError], Response],
    ) -> None:
        self._app, self._tenants, self._secret = app, tenants, secret
        self._wall_clock, self._refuse = wall_clock, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in PUBLIC:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        now = datetime.fromtimestamp(self._wall_clock(), UTC)
        try:
            request.state.caller = authenticate(request.headers, self._tenants.keyring, self._secret, now)
        except ApiError as error:
            await self._refuse(request, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that calls. Raises ApiError (403) for an operator who is none."""
    caller: Caller = request.state.caller
    if caller.tenant is None:
        raise ApiError("permission_error", f"{caller.name} is an operator, not a tenant (gateway.tenants)")
    return caller.tenant


def operator_of(request: Request) -> Caller:
    """Return the operator that calls. Raises ApiError (403) for who is none."""
    caller: Caller = request.state.caller
    if not caller.operator:
        raise ApiError(
            "permission_error",
            "this key is not an operator's (gateway.operators, or `operator: true` in gateway.tenants)",
        )
    return caller
