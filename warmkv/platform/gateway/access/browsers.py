"""Cross-origin requests: pages of `control.allowed_origins` may call what is for operators, with an operator's key."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from warmkv.platform.gateway.paths import of_operators, path_of

METHODS = ("GET", "PUT", "POST", "DELETE")
HEADERS = (
    "x-api-key",
    "authorization",
    "content-type",
    "if-match",
    "x-request-id",
    "traceparent",
    "x-grafana-action",  # Grafana sends these three with an action of a dashboard
    "x-grafana-device-id",
    "x-grafana-org-id",
)
SHOWN = ("etag", "request-id", "retry-after")  # headers of an answer that a page may read
REMEMBERED_SECONDS = 600  # that a browser need not ask again


class OperatorsCors:
    """ASGI middleware: answers preflights, which have no key, and names the origin in answers that it may read.

    No cookies are allowed, and none are known: a page can do nothing without an operator's key.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=HEADERS,
            expose_headers=SHOWN,
            max_age=REMEMBERED_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared = scope["type"] == "http" and of_operators(path_of(scope))
        await (self._shared if shared else self._app)(scope, receive, send)
