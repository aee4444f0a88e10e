"""The HTTP endpoints, as an ASGI application over a service; nothing here knows of Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from warmkv import telemetry
from warmkv.config import Capabilities
from warmkv.platform.control import LiveConfigControl, LiveConfigFollower
from warmkv.platform.gateway.access.audit import Audit, OperatorAction, came_of
from warmkv.platform.gateway.access.authentication import Authentication, operator_of, tenant_of
from warmkv.platform.gateway.access.browsers import OperatorsCors
from warmkv.platform.gateway.access.limits import EndLeases, TenantLimiter
from warmkv.platform.gateway.access.local_only import LocalOnly, is_local_only
from warmkv.platform.gateway.apis.errors import ApiError, anthropic_body, openai_body, refusals
from warmkv.platform.gateway.apis.json_answer import json_answer
from warmkv.platform.gateway.apis.messages import answers as messages
from warmkv.platform.gateway.apis.messages.requests import check_version
from warmkv.platform.gateway.apis.openai import answers as openai
from warmkv.platform.gateway.apis.openai.choices import Choices
from warmkv.platform.gateway.apis.responses import answers as responses
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.responses.store import Item, OtherGateways, ResponseStore
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.apis.thinking import restore
from warmkv.platform.gateway.console import add_console
from warmkv.platform.gateway.intake.body import Intake, LackingError
from warmkv.platform.gateway.intake.overload import LONGEST, OpenRequests, most_open, retry_header
from warmkv.platform.gateway.intake.parsing import Parsing
from warmkv.platform.gateway.live import summed
from warmkv.platform.gateway.live_config import add_policy_endpoints
from warmkv.platform.gateway.memory import memory_of
from warmkv.platform.gateway.methods import HeadAsGet, allowed_methods
from warmkv.platform.gateway.model_names import check_model, model_names
from warmkv.platform.gateway.paths import OF_TENANTS, api_of, of_operators, path_of, speaks_openai
from warmkv.platform.gateway.request_ids import RequestIds
from warmkv.platform.gateway.service import Arrival, Service
from warmkv.platform.gateway.streams import MESSAGES_PING, OPENAI_PING, PING_SECONDS, EventStream
from warmkv.platform.gateway.whatif import WhatIfControl, add_whatif_endpoints
from warmkv.platform.named_actors import ActorAwayError, replicas_name
from warmkv.platform.tenants import chain_root
from warmkv.platform.tenants_file import Outcome, Tenants
from warmkv.request_context import session_of_headers

ReplicaStatus = Callable[[], Awaitable[dict[str, Any]]]
DropPrefixes = Callable[[str, bytes], Awaitable[list[int]]]
Refuse = Callable[[Request, Exception], Response]


@dataclass(frozen=True)
class ApiContext:
    """Hold what the endpoints of all APIs share."""

    service: Service
    intake: Intake
    parsing: Parsing
    limits: TenantLimiter
    text_of: Callable[[int], str]  # of a token

    def admitted(self, request: Request) -> Arrival:
        """Count a request towards the limits of its tenant. Raises ApiError (403, 429)."""
        lease = self.limits.begin(request, tenant_of(request))
        return self.service.arrive(request.state.context, lease, session_of_headers(request.headers))


def create_app(
    service: Service,
    tokenizer: Any,
    *,
    secret: bytes,
    max_context: int,
    status: ReplicaStatus,
    drop: DropPrefixes,
    started_at: float,
    control: LiveConfigControl,
    name: str,
    taking: Callable[[], int],
    whatif: WhatIfControl | None = None,
    keep_action: Callable[[OperatorAction], None] | None = None,
    others: OtherGateways | None = None,
) -> FastAPI:
    """Return the application with all routes, which follows the policy of `control` from its start to its end.

    Args:
        secret: salts the tenants' prefixes.
        max_context: most tokens that a replica takes; what is longer is refused before anything is computed.
        status: reports the replicas.
        drop: has every replica forget the prefixes of a tenant's label, returning the bytes that each one freed, and
            every gateway the earlier prompts whose hashes begin with a root (`app.state.forget` does it here).
        started_at: Unix time at which the models are said to be made.
        name: of this gateway.
        taking: counts the replicas that take requests, as far as this process knows, without a call.
        keep_action: takes the lines of the audit log.
        others: asked for responses that are not in `app.state.responses`.
    """
    config = service.config

    def tenants_read(outcome: Outcome) -> None:
        service.recorder.add(telemetry.TENANTS_READ, 1, result=outcome)
        service.recorder.set(telemetry.TENANTS_REFUSED, outcome == "refused")

    tenants = Tenants(config.gateway, secret, tenants_read)
    follower = LiveConfigFollower(
        control, name, service.take, partial(service.recorder.set, telemetry.LIVE_CONFIG_REFUSED)
    )

    @asynccontextmanager
    async def following(_: FastAPI) -> AsyncIterator[None]:
        await follower.start()
        tasks = [asyncio.create_task(follower.run()), asyncio.create_task(tenants.follow())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        intake.close()
        operators.close()

    # a redirect would be made of the request's Host and http, and have clients send their key there
    app = FastAPI(title="warmkv", docs_url=None, redoc_url=None, lifespan=following, redirect_slashes=False)

    waiting = config.cluster.max_queued_requests
    intake = app.state.intake = Intake(config.gateway, waiting, tokenizer, service.clock)
    operators = Intake(config.gateway, waiting, None, service.clock)  # their bodies do not wait behind those of tenants
    parsing = Parsing(service, tokenizer, max_context, partial(restore, secret=secret))
    app.state.forget = parsing.forget
    stored = app.state.responses = ResponseStore(service.clock)
    limits = TenantLimiter(config, service.clock, service.wall_clock)
    text_of = cache(lambda token: tokenizer.decode([token]))  # of a vocabulary's tokens
    apis = ApiContext(service, intake, parsing, limits, text_of)

    def refused(request: Request, error: Exception) -> Response:
        """Report an error and answer with it."""
        path = path_of(request.scope)
        told = service.faults.report(error, api_of(path), of_operators=of_operators(path))
        came_of(request, told.message)
        return error_response(request, told, service.backlog.retry_after())

    app.add_middleware(OpenRequests, most=most_open(config), backlog=service.backlog, refuse=refused)
    app.add_middleware(EndLeases)
    if is_local_only(config.gateway):
        app.add_middleware(LocalOnly, refuse=refused)
    app.add_middleware(Authentication, tenants=tenants, secret=secret, wall_clock=service.wall_clock, refuse=refused)
    app.add_middleware(Audit, keep=keep_action, clock=service.clock, wall_clock=service.wall_clock)
    if config.control.allowed_origins:
        app.add_middleware(OperatorsCors, origins=config.control.allowed_origins)
    app.add_middleware(RequestIds, on_fault=refused)
    app.add_middleware(HeadAsGet)

    add_error_handlers(app, refused)
    add_messages(app, apis, secret)
    add_completions(app, apis)
    add_responses(app, apis, stored, others)
    add_models(app, service, max_context, started_at)
    add_status(app, service, tenants, status, name)
    add_prefixes(app, apis, drop)
    add_health(app, config.model.name, taking)
    add_console(app)
    add_policy_endpoints(app, service, operators, control, operator_of)
    add_whatif_endpoints(app, service, operators, whatif, operator_of)
    return app


def add_error_handlers(app: FastAPI, refused: Refuse) -> None:
    """Answer errors, unknown paths and wrong methods in the format of the API that was called."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return refused(request, error)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        path = request.url.path
        if api_of(path_of(request.scope)) == "embeddings":
            why = f"this server makes no embeddings: its model writes text ({request.method} {path})"
        else:
            why = f"there is no {request.method} {path} on this server"
        return refused(request, ApiError("not_found_error", why))

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> Response:
        methods = ", ".join(allowed_methods(app.routes, request.scope))
        why = f"{request.method} is not allowed here (allowed: {methods})"
        response = refused(request, ApiError("invalid_request_error", why, status=405))
        response.headers["allow"] = methods
        return response


def add_messages(app: FastAPI, apis: ApiContext, secret: bytes) -> None:
    """Add Anthropic's Messages API; `secret` signs thinking."""

    @app.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        arrival = apis.admitted(request)
        check_version(request.headers.get("anthropic-version"))
        asked = await apis.intake.take(request, partial(apis.parsing.message, arrival))
        admission = await apis.service.start("messages", arrival, asked)
        if asked.stream:
            written = partial(messages.stream, admission, secret)
            return EventStream(written, admission, MESSAGES_PING, PING_SECONDS, asked.headers)
        return JSONResponse(await messages.respond(await admission.begin(), secret), headers=asked.headers)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        arrival = apis.admitted(request)
        check_version(request.headers.get("anthropic-version"))
        counted, headers = await apis.intake.take(request, partial(apis.parsing.count, arrival))
        return JSONResponse(counted, headers=headers)


def add_completions(app: FastAPI, apis: ApiContext) -> None:
    """Add OpenAI's chat completions and completions."""

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        arrival = apis.admitted(request)
        return await complete("chat", arrival, [await apis.intake.take(request, partial(apis.parsing.chat, arrival))])

    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        arrival = apis.admitted(request)
        prompts = await apis.intake.take(request, partial(apis.parsing.completion, arrival))
        return await complete("completions", arrival, prompts)

    async def complete(api: str, arrival: Arrival, prompts: list[ParsedRequest]) -> Response:
        choices = Choices(apis.service, api, arrival, prompts, apis.text_of)
        await choices.queued()
        if choices.asked.stream:
            written = partial(openai.stream, choices)
            return EventStream(written, choices, OPENAI_PING, PING_SECONDS, choices.asked.headers)
        asked = choices.asked
        return await json_answer(await openai.respond(choices), asked.headers, large=asked.tells_logprobs)


def add_responses(app: FastAPI, apis: ApiContext, stored: ResponseStore, others: OtherGateways | None) -> None:
    """Add OpenAI's Responses API. What is not `stored` here the `others` may have."""

    @contextmanager
    def all_told(name: str) -> Iterator[None]:
        """Raise ApiError where one of the gateways that are asked within does not answer."""
        try:
            yield
        except Exception as error:
            why = f"Not all gateways told whether they have the response {name}. Try again in a moment."
            raise ApiError("overloaded_error", why, reason="gateways") from error

    async def fetch_response(tenant: bytes, name: str) -> None:
        """Keep a response, and those that it goes on from, as another gateway has them. Raises ApiError."""
        with all_told(name):
            found = await others.responses(tenant, name) if others is not None else ()
        for chain in found:
            for one in chain:
                stored.keep(tenant, one)

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        arrival = apis.admitted(request)
        asked_for = set[str]()

        def history_of(tenant: bytes, name: str) -> list[Item] | None:  # in a thread of the intake
            if others is not None and name not in asked_for and not stored.chain(tenant, name):
                asked_for.add(name)
                raise LackingError(partial(fetch_response, tenant, name))
            return stored.history(tenant, name)

        def parsed(data: bytes, tokenizer: Any) -> tuple[ResponsesRequest, bytes, ParsedRequest]:
            body, asked = apis.parsing.response(history_of, arrival, data, tokenizer)
            return body, json.dumps(body.items).encode() if body.store else b"", asked

        body, items, asked = await apis.intake.take(request, parsed)
        admission = await apis.service.start("responses", arrival, asked)
        salt = arrival.lease.tenant.salt
        exchange = responses.Exchange(body, items, asked, admission, stored, salt, arrival.time, apis.text_of)
        if asked.stream:
            written = partial(responses.stream, exchange, apis.service.config.model.name)
            return EventStream(written, admission, OPENAI_PING, PING_SECONDS, asked.headers)
        return Response(await responses.respond(exchange), headers=asked.headers, media_type="application/json")

    @app.get("/v1/responses/{name}")
    async def get_response(request: Request, name: str) -> Response:
        tenant = tenant_of(request).salt
        if stored.get(tenant, name) is None and others is not None:
            apis.admitted(request)  # asking all gateways is work
            await fetch_response(tenant, name)
        if (found := stored.get(tenant, name)) is None:
            raise ApiError("not_found_error", f"there is no response {name} (any more)")
        return Response(found.response, media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def delete_response(request: Request, name: str) -> Response:
        tenant = tenant_of(request).salt
        if others is not None:
            apis.admitted(request)
            if stored.get(tenant, name) is None:
                await fetch_response(tenant, name)
        with all_told(name):
            deleted = others is not None and await others.delete_response(tenant, name)
        if not (stored.delete(tenant, name) or deleted):  # here last: whoever must try again finds it
            raise ApiError("not_found_error", f"there is no response {name} (any more)")
        return JSONResponse({"id": name, "object": "response", "deleted": True})


def add_models(app: FastAPI, service: Service, max_context: int, started_at: float) -> None:
    """Add the list of models."""
    config = service.config

    def described(name: str) -> dict[str, Any]:
        created = {"created": int(started_at), "created_at": datetime.fromtimestamp(started_at, UTC).isoformat()}
        own, *others = [_serving(group) for group in service.capabilities]
        groups = {"groups": dict(zip(map(replicas_name, config.groups()), (own, *others), strict=True))}
        named = {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "warmkv"}
        most = {"max_input_tokens": max_context, "max_tokens": min(config.gateway.max_output_tokens, max_context)}
        context = {**most, "max_model_len": max_context, "context_window": max_context}
        return {**named, **created, **context, "warmkv": groups if others else own}

    @app.get("/v1/models")
    async def list_models(_: Request) -> Response:
        names = model_names(config)
        paging = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": list(map(described, names)), **paging})

    @app.get("/v1/models/{name:path}")
    async def get_model(_: Request, name: str) -> Response:
        check_model(name, config)
        return JSONResponse(described(name))


def add_status(app: FastAPI, service: Service, tenants: Tenants, status: ReplicaStatus, name: str) -> None:
    """Add what operators see of replicas, their memory, this gateway and its tenants."""
    config = service.config

    async def reported() -> dict[str, Any]:
        with refusals({ActorAwayError: "overloaded_error"}):
            return await status()

    @app.get("/v1/warmkv/replicas")
    async def replicas(request: Request) -> Response:
        operator_of(request)
        return JSONResponse(await reported())

    @app.get("/v1/warmkv/memory")
    async def memory(request: Request) -> Response:
        operator_of(request)
        found = (await reported())["replicas"]
        return JSONResponse({"replicas": {name: memory_of(known) for name, known in found.items()}})

    @app.get("/v1/warmkv/live")
    async def live(request: Request) -> Response:
        operator_of(request)
        own = {"gateway": name, "gateways": config.cluster.gateways, "model": config.model.name}
        now = {"version": service.policy.terms.version, "waiting": service.backlog.waiting}
        return JSONResponse(
            {**own, **now, **service.recent.figures(), "replicas": summed((await reported())["replicas"])}
        )

    @app.get("/v1/warmkv/tenants")
    async def list_tenants(request: Request) -> Response:
        operator_of(request)
        return JSONResponse({"gateway": name, **tenants.status()})


def add_prefixes(app: FastAPI, apis: ApiContext, drop: DropPrefixes) -> None:
    """Let a tenant drop its prefixes, in all replicas and gateways."""

    @app.delete(OF_TENANTS)
    async def drop_prefixes(request: Request) -> Response:
        tenant = apis.admitted(request).lease.tenant
        root = chain_root(tenant.salt, apis.service.config)
        app.state.forget(root)
        freed = await drop(tenant.label, root)
        return JSONResponse({"type": "prefixes_dropped", "replicas": len(freed), "freed_bytes": sum(freed)})


def add_health(app: FastAPI, model: str, taking: Callable[[], int]) -> None:
    """Add what load balancers and clients probe."""

    @app.get("/health")  # as vLLM's server has it, for clients that ask before they begin
    @app.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok", "model": model})

    @app.get("/readyz")
    async def readyz() -> Response:
        if found := taking():
            return JSONResponse({"status": "ready", "replicas": found})
        return JSONResponse({"status": "unavailable", "reason": "no replica takes requests", "replicas": 0}, 503)


def _serving(group: Capabilities) -> dict[str, Any]:
    """Return what replicas of a group serve, for the list of models."""
    return {"engine": group.engine} | ({"policies": list(group.policies)} if group.policies is not None else {})


def error_response(request: Request, error: ApiError, retry_after: float) -> Response:
    """Return an error in the format of the API that was called. `retry_after` is for one that names no time itself."""
    headers = {}
    if error.status in (429, 529):
        seconds = retry_after if error.retry_after is None else error.retry_after
        headers["retry-after"] = retry_header(min(seconds, LONGEST) if error.status == 529 else seconds)
    if error.final:
        headers["x-should-retry"] = "false"  # both SDKs would try a 500 again
    request_id = request.state.context.id
    if speaks_openai(path_of(request.scope), request.headers):
        return JSONResponse(openai_body(error, request_id), error.status, headers)
    return JSONResponse(anthropic_body(error, request_id), error.status, headers)
