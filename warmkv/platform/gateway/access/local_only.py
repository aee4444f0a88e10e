"""An open service answers this machine's users alone, and not the pages that their browsers show."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from warmkv.config import GatewayConfig
from warmkv.platform.gateway.access.authentication import PUBLIC
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.paths import of_operators, path_of
from warmkv.platform.listening import is_loopback


class LocalOnly:
    """Answer 403 to requests of other names than loopback's, and to those of other sites' pages (ASGI middleware).

    A page whose name was made to lead here (DNS rebinding) names itself as the host. Any page may send a body of
    plain text, and no key is asked for. What is for operators needs their key, which no page has.
    """

    def __init__(self, app: ASGIApp, refuse: Callable[[Request, ApiError], Response]) -> None:
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := path_of(scope)) in PUBLIC or of_operators(path):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        host, origin = request.headers.get("host"), request.headers.get("origin", "")
        if host and not _leads_here(f"//{host}"):
            error = _refusal(f"the host {host[:100]!r}")
        elif origin.startswith(("http:", "https:", "null")) and not _leads_here(origin):
            error = _refusal(f"pages of {origin[:100]!r}")
        else:
            await self._app(scope, receive, send)
            return
        await self._refuse(request, error)(scope, receive, send)


def is_local_only(gateway: GatewayConfig) -> bool:
    """Return True for a service that is open and listens on loopback alone."""
    return gateway.is_open and not gateway.allow_open and is_loopback(gateway.host)


def _leads_here(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _refusal(who: str) -> ApiError:
    return ApiError(
        "permission_error",
        f"{who} may not ask: without tenants only 127.0.0.1, ::1 and localhost are answered. Use one of these, list "
        "who may call (gateway.tenants, gateway.tenants_file), or accept everybody (gateway.allow_open)",
    )
