"""The Anthropic Messages API: its requests, answers and stream events."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from warmkv.config import PrefixCacheConfig
from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis import content
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.content import CacheControl, Message, TextBlock, Tool, ToolChoice
from warmkv.platform.gateway.apis.errors import anthropic_body, invalid
from warmkv.platform.gateway.apis.prompt import Turn
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.platform.gateway.streams import EventWriter
from warmkv.prefixes import breakpoints
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason, SamplingParams

VERSIONS = ("2023-01-01", "2023-06-01", "2026-10-21")
STOP_REASONS: dict[FinishReason, str] = {
    "end": "end_turn",
    "length": "max_tokens",
    "stop": "stop_sequence",
    "cancelled": "end_turn",
}


class NoThinking(Body):
    """Models here do not think before they answer, so this is the only value."""

    type: Literal["disabled"]


class CountRequest(Body):
    """Body of /v1/messages/count_tokens: what of a request makes its prompt."""

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: NoThinking | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> CountRequest:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: names must be unique")
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice: only allowed with tools")
        return self


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    warmkv: WarmkvOptions = WarmkvOptions()

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=tuple(self.stop_sequences),
            ignore_eos=self.warmkv.ignore_eos,
        )


def turns(body: CountRequest, cache: PrefixCacheConfig) -> list[Turn]:
    """Return the conversation as the turns of a prompt, with the TTL of every mark.

    Raises ApiError (400), also for marks that the contract refuses.
    """
    found = content.turns(body.tools, body.system, body.messages, cache.default_ttl)
    if body.cache_control is not None:
        found = content.mark_last(found, body.cache_control.ttl or cache.default_ttl)
    try:
        breakpoints.check_marks(
            [block.ttl for turn in found for block in turn.blocks], cache.ttls, cache.max_breakpoints
        )
    except breakpoints.BreakpointError as error:
        raise invalid(str(error)) from None
    return found


def check_version(version: str | None) -> None:
    """Raise ApiError (400) for an anthropic-version that is not known; none at all is fine."""
    if version is not None and version not in VERSIONS:
        raise invalid(f"anthropic-version: {version!r} is not one of {', '.join(VERSIONS)}")


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Token counts as the Messages API reports them."""
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.total_written,
        "cache_read_input_tokens": usage.read,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in usage.written.items()},
        "output_tokens": usage.output,
    }


async def respond(answer: Answer) -> dict[str, Any]:
    """Return the whole answer as one message."""
    text = await answer.text()
    return {
        **_head(answer),
        "content": [{"type": "text", "text": text}] if text else [],
        "stop_reason": STOP_REASONS[answer.end.reason],
        "stop_sequence": answer.end.stop_sequence,
        "usage": {**usage_fields(answer.usage), "warmkv": answer.details()},
    }


async def stream(admission: SubmittedRequest, out: EventWriter) -> None:
    """Write the answer as server-sent events. A fault after admission is an `error` event."""
    try:
        answer = await admission.begin()
        start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**usage_fields(answer.usage), "warmkv": answer.details()}
        await out.send(_event({"type": "message_start", "message": start}))
        if (first := await answer.more()) is not None:
            block = {"type": "text", "text": ""}
            await out.send(_event({"type": "content_block_start", "index": 0, "content_block": block}))
            more = {"type": "text_delta", "text": TEXT}
            event = event_of_text(_event({"type": "content_block_delta", "index": 0, "delta": more}))
            await out.send(event(first.text))
            await answer.write(out, event)
            await out.send(_event({"type": "content_block_stop", "index": 0}))
        stop = {"stop_reason": STOP_REASONS[answer.end.reason], "stop_sequence": answer.end.stop_sequence}
        usage = {**usage_fields(answer.usage), "warmkv": answer.details()}
        await out.send(_event({"type": "message_delta", "delta": stop, "usage": usage}))
        await out.send(_event({"type": "message_stop"}))
    except Exception as error:
        await out.send(_event(anthropic_body(admission.failed(error), admission.id)))


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
