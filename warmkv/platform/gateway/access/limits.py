"""Tenants' limits over HTTP: 429 with Retry-After, and how much is left in the headers of every answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmkv.config import Config
from warmkv.platform.gateway.apis.answer import Answer
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.paths import OPENAI_APIS, api_of, path_of
from warmkv.platform.tenants import Tenant
from warmkv.policies.rate_limit import LimitedRequest, Quota, RateLimiter, RateLimitError


class Lease:
    """A request that counts towards its tenant's limits until the middleware ends it, however it ends."""

    def __init__(
        self, tenant: Tenant, admission: LimitedRequest, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self.tenant = tenant
        self._admission, self._clock, self._wall_clock = admission, clock, wall_clock
        self._answers: list[Answer] = []

    def begin(self) -> None:
        """Count the request. Raises ApiError (429)."""
        with _refusals():
            self._admission.begin(self._clock())

    def reserve(self, tokens: int) -> None:
        """Count the tokens that the request may use at most, and let it wait for its first. Raises ApiError (429)."""
        with _refusals():
            self._admission.reserve(tokens, self._clock())
            self._admission.wait()

    def answered(self, answer: Answer) -> None:
        """Wait no longer, and settle at the end for the tokens that its answers have used by then."""
        self._admission.waited()
        self._answers.append(answer)

    def end(self) -> None:
        """Settle. Tokens read from the cache are given back: hardly anything was computed for them."""
        used = sum(usage.input + usage.total_written + usage.output for usage in (one.usage for one in self._answers))
        self._admission.end(used, self._clock())

    def headers(self, path: str) -> list[tuple[str, str]]:
        """Return the rate-limit headers of the API that the path belongs to."""
        now = self._clock()
        found = {"requests": self._admission.requests(now), "tokens": self._admission.tokens(now)}
        openai = api_of(path) in OPENAI_APIS
        return [
            header
            for kind, quota in found.items()
            if quota is not None
            for header in (_openai(kind, quota) if openai else self._anthropic(kind, quota))
        ]

    def _anthropic(self, kind: str, quota: Quota) -> list[tuple[str, str]]:
        """Return the headers of the Messages API; `reset` is a time by RFC 3339."""
        reset = datetime.fromtimestamp(math.ceil(self._wall_clock()), UTC) + timedelta(seconds=math.ceil(quota.reset))
        values = {"limit": quota.limit, "remaining": quota.remaining, "reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return [(f"anthropic-ratelimit-{kind}-{name}", str(value)) for name, value in values.items()]


def _openai(kind: str, quota: Quota) -> list[tuple[str, str]]:
    """Return the headers of the OpenAI APIs; `reset` is a duration, as in 6m0s."""
    minutes, seconds = divmod(math.ceil(quota.reset), 60)
    reset = f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
    values = {"limit": quota.limit, "remaining": quota.remaining, "reset": reset}
    return [(f"x-ratelimit-{name}-{kind}", str(value)) for name, value in values.items()]


REMEMBERED_TENANTS = 10_000  # whose use is known; over it, that of the one that asked longest ago goes


class TenantLimiter:
    """The limits of all tenants in one gateway."""

    def __init__(self, config: Config, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        cluster = config.cluster
        self._clock, self._wall_clock = clock, wall_clock
        self._limiter = RateLimiter(cluster.gateways, cluster.max_queued_requests, REMEMBERED_TENANTS)

    def begin(self, request: Request, tenant: Tenant) -> Lease:
        """Count a request of a tenant, until it has been answered. Raises ApiError (429)."""
        admission = self._limiter.admission(tenant.label, tenant.limits, self._clock())
        lease = Lease(tenant, admission, self._clock, self._wall_clock)
        request.state.lease = lease  # a refusal, too, says what is left
        lease.begin()
        return lease


class EndLeases:
    """ASGI middleware: adds the rate-limit headers, and ends what counts towards a limit whatever becomes of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def send_with_headers(message: Message) -> None:
            lease: Lease | None = state.get("lease")
            if lease is not None and message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in lease.headers(path_of(scope))]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            if (lease := state.get("lease")) is not None:
                lease.end()


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RateLimitError as error:
        message = f"{error.message} (gateway.limits.{error.setting})"
        raise ApiError(
            "rate_limit_error",
            message,
            reason=error.setting,
            retry_after=error.retry_after,
            code="rate_limit_exceeded",
        ) from None
