"""The HTTP endpoints, as an ASGI application over a service; nothing here knows of Ray."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from warmkv import telemetry
from warmkv.config import PrefixCacheConfig
from warmkv.platform.control import Follower, PolicyControl
from warmkv.platform.gateway import messages, openai
from warmkv.platform.gateway.authentication import Authentication, operator_of, tenant_of
from warmkv.platform.gateway.errors import ApiError, anthropic_body, openai_body
from warmkv.platform.gateway.faults import api_of
from warmkv.platform.gateway.limits import EndLeases, Lease, Limits
from warmkv.platform.gateway.memory import memory_of
from warmkv.platform.gateway.policy import add_policy_endpoints
from warmkv.platform.gateway.prompt import Prompt, Turn, render, render_text
from warmkv.platform.gateway.request_ids import RequestIds
from warmkv.platform.gateway.schema import read_body
from warmkv.platform.gateway.service import Arrival, Service
from warmkv.platform.tenants_file import Outcome, Tenants

ReplicaStatus = Callable[[], Awaitable[dict[str, Any]]]
DropPrefixes = Callable[[str], Awaitable[list[int]]]


def create_app(
    service: Service,
    tokenizer: Any,
    secret: bytes,
    max_context: int,
    status: ReplicaStatus,
    drop: DropPrefixes,
    started_at: float,
    control: PolicyControl,
    name: str,
    taking: Callable[[], int],
) -> FastAPI:
    """All routes. `secret` salts the tenants' prefixes; `status` tells what is known of the replicas.

    `taking` counts the replicas that take requests, as far as this process knows: no call, no wait.

    `drop` has every replica forget the prefixes of a tenant's label and tells the bytes that each one freed.
    `max_context` is the most tokens that a replica takes: what is longer is refused before anything is computed.
    The application follows the policy of `control` from its start to its end, as the gateway of that name.
    """
    config = service.config

    def tenants_read(outcome: Outcome) -> None:
        service.recorder.add(telemetry.TENANTS_READ, 1, result=outcome)

    tenants = Tenants(config.gateway, secret, tenants_read)
    limits = Limits(config, service.clock, service.wall_clock)
    follower = Follower(control, name, service.take, config.control)

    @asynccontextmanager
    async def following(_: FastAPI) -> AsyncIterator[None]:
        await follower.start()
        tasks = [asyncio.create_task(follower.run()), asyncio.create_task(tenants.follow())]
        yield
        for task in tasks:
            task.cancel()

    app = FastAPI(title="warmkv", docs_url=None, redoc_url=None, lifespan=following)

    # Off the event loop, and one at a time: a tokenizer holds state while it encodes.
    tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())

    async def tokenizing(make: Callable[[], Prompt], texts: Iterable[str]) -> Prompt:
        """The prompt; a text that cannot fit is refused unread, so that nobody waits behind its tokenizing."""
        if sum(map(len, texts)) > max_context * longest_token:  # a character is a byte at least
            raise ApiError("invalid_request_error", f"The prompt exceeds the context of {max_context} tokens.")
        prompt = await asyncio.get_running_loop().run_in_executor(tokenizer_thread, make)
        if len(prompt.tokens) > max_context:
            raise ApiError(
                "invalid_request_error",
                f"{len(prompt.tokens)} prompt tokens exceed the context of {max_context} tokens",
            )
        return prompt

    def admitted(request: Request) -> Lease:
        """Count a request towards the limits of its tenant. Raises ApiError (403, 429)."""
        return limits.begin(request, tenant_of(request))

    def seed_of(chosen: int | None) -> int:
        return secrets.randbits(63) if chosen is None else chosen

    def refused(request: Request, error: Exception) -> Response:
        """Report an error and answer with it."""
        return error_response(request, service.faults.report(error, api_of(request.url.path)))

    app.add_middleware(EndLeases)
    app.add_middleware(Authentication, tenants=tenants, secret=secret, wall_clock=service.wall_clock, refuse=refused)
    app.add_middleware(RequestIds, on_fault=refused)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return refused(request, error)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        return refused(request, ApiError("not_found_error", f"{request.method} {request.url.path}"))

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> Response:
        return refused(request, ApiError("invalid_request_error", f"{request.method} is not allowed here"))

    @app.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        with service.arriving(request.state.context) as arrival:
            lease = admitted(request)
            messages.check_version(request.headers.get("anthropic-version"))
            body = await read_body(request, messages.MessagesRequest, config.gateway.max_body_bytes)
            service.check_model(body.model)
            if body.max_tokens == 0 and body.stream:
                raise ApiError("invalid_request_error", "stream: must be false when max_tokens is 0")
            prompt = await message_prompt(body, arrival.policy.config.prefix_cache)
            sampling = body.sampling(seed_of(body.warmkv.seed))
            choice = body.tool_choice.type if body.tool_choice else "auto"
            lease.reserve(len(prompt.tokens), sampling.max_tokens)
            answer = await service.start(
                "messages", arrival, lease.tenant, prompt, sampling, body.warmkv, explicit=True, tool_choice=choice
            )
            lease.answered(answer)
        if body.stream:
            return event_stream(messages.stream(answer))
        return JSONResponse(await messages.respond(answer))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        admitted(request)
        messages.check_version(request.headers.get("anthropic-version"))
        body = await read_body(request, messages.CountRequest, config.gateway.max_body_bytes)
        service.check_model(body.model)
        prompt = await message_prompt(body, service.policy.config.prefix_cache)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    async def message_prompt(body: messages.CountRequest, cache: PrefixCacheConfig) -> Prompt:
        turns = messages.turns(body, cache.default_ttl)
        service.check_marks([block.ttl for turn in turns for block in turn.blocks], cache)
        return await tokenizing(lambda: render(tokenizer, turns), texts(turns))

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        with service.arriving(request.state.context) as arrival:
            lease = admitted(request)
            body = await read_body(request, openai.ChatRequest, config.gateway.max_body_bytes)
            turns = openai.turns(body)
            return await complete("chat", arrival, lease, body, lambda: render(tokenizer, turns), texts(turns))

    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        with service.arriving(request.state.context) as arrival:
            lease = admitted(request)
            body = await read_body(request, openai.CompletionRequest, config.gateway.max_body_bytes)
            prompt = body.prompt
            return await complete("completions", arrival, lease, body, lambda: render_text(tokenizer, prompt), [prompt])

    async def complete(
        api: str,
        arrival: Arrival,
        lease: Lease,
        body: openai.CompletionBody,
        make_prompt: Callable[[], Prompt],
        parts: Iterable[str],
    ) -> Response:
        service.check_model(body.model)
        sampling = body.sampling(seed_of(body.warmkv.seed), config.gateway.default_output_tokens)
        prompt = await tokenizing(make_prompt, parts)
        lease.reserve(len(prompt.tokens), sampling.max_tokens)
        answer = await service.start(api, arrival, lease.tenant, prompt, sampling, body.warmkv, explicit=False)
        lease.answered(answer)
        chat = api == "chat"
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return event_stream(openai.stream(answer, chat, usage))
        return JSONResponse(await openai.respond(answer, chat))

    def described() -> dict[str, Any]:
        name = config.model.name
        created = {"created": int(started_at), "created_at": datetime.fromtimestamp(started_at, UTC).isoformat()}
        return {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "warmkv", **created}

    @app.get("/v1/models")
    async def list_models(_: Request) -> Response:
        name = config.model.name
        paging = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"object": "list", "data": [described()], **paging})

    @app.get("/v1/models/{name:path}")
    async def get_model(_: Request, name: str) -> Response:
        service.check_model(name)
        return JSONResponse(described())

    @app.get("/v1/warmkv/replicas")
    async def replicas(request: Request) -> Response:
        operator_of(request)
        return JSONResponse(await status())

    @app.get("/v1/warmkv/memory")
    async def memory(request: Request) -> Response:
        operator_of(request)
        found = (await status())["replicas"]
        return JSONResponse({"replicas": {name: memory_of(known) for name, known in found.items()}})

    @app.get("/v1/warmkv/tenants")
    async def list_tenants(request: Request) -> Response:
        operator_of(request)
        return JSONResponse({"gateway": name, **tenants.status()})

    @app.delete("/v1/warmkv/prefixes")
    async def drop_prefixes(request: Request) -> Response:
        freed = await drop(admitted(request).tenant.label)
        return JSONResponse({"type": "prefixes_dropped", "replicas": len(freed), "freed_bytes": sum(freed)})

    @app.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok", "model": config.model.name})

    @app.get("/readyz")
    async def readyz() -> Response:
        if found := taking():
            return JSONResponse({"status": "ready", "replicas": found})
        return JSONResponse({"status": "unavailable", "reason": "no replica takes requests", "replicas": 0}, 503)

    add_policy_endpoints(app, service, control, operator_of)
    return app


def texts(turns: Iterable[Turn]) -> Iterator[str]:
    return (block.text for turn in turns for block in turn.blocks)


def error_response(request: Request, error: ApiError) -> Response:
    """The error in the format of the API that was called."""
    headers = {}
    if error.status in (429, 529):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 0)))
    if error.final:
        headers["x-should-retry"] = "false"  # both SDKs would try a 500 again
    path = request.url.path
    request_id = request.state.context.id
    if path.endswith("/completions"):
        return JSONResponse(openai_body(error, request_id), error.status, headers)
    return JSONResponse(anthropic_body(error, request_id), error.status, headers)


def event_stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
