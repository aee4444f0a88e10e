"""ASGI middleware: every request gets its id and trace context, and every answer names them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmkv.logs import about
from warmkv.request_context import RequestContext, checked_client_id, new_request_id, parse_traceparent


class RequestIds:
    """Sets `request.state.context`, logs under it, and adds `request-id` and `traceparent` to the answer's headers.

    `on_fault` makes the answer to an exception that nothing else has handled: an answer to a client names its request
    whatever happened. One that comes after the answer has begun is passed on.
    """

    def __init__(self, app: ASGIApp, on_fault: Callable[[Request, Exception], Response]) -> None:
        self._app, self._on_fault = app, on_fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(Headers(scope=scope))
        scope.setdefault("state", {})["context"] = context
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["request-id"] = context.id
                if context.trace is not None:
                    headers["traceparent"] = context.trace.traceparent
            await send(message)

        with about(context):
            try:
                await self._app(scope, receive, send_named)
            except Exception as error:
                response = self._on_fault(Request(scope), error)
                if begun:
                    raise
                await response(scope, receive, send_named)


def context_of(headers: Headers) -> RequestContext:
    """Return a new id and, of a valid `traceparent`, a new span; the client's id where it is short and plain."""
    caller = parse_traceparent(headers.getlist("traceparent"))
    client_id = checked_client_id(headers.getlist("x-request-id"))
    return RequestContext(new_request_id(), client_id, caller.child() if caller is not None else None)
