"""Methods of HTTP beyond those that a path has: HEAD where it has GET, and which there are where it is another one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answer HEAD, as ASGI middleware, with the status and the headers that GET has, and no body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> list[str]:
    """Return the methods of all routes that have the path of a request, in alphabetical order."""
    fitting = (route for route in routes if route.matches(scope)[0] != Match.NONE)
    found = {method for route in fitting for method in getattr(route, "methods", None) or ()}
    return sorted(found | {"HEAD"} if "GET" in found else found)
