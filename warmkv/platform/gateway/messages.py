"""The Anthropic Messages API: its requests, answers and stream events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from warmkv.platform.gateway.answer import Answer
from warmkv.platform.gateway.errors import anthropic_body, from_exception, invalid
from warmkv.platform.gateway.prompt import Block, Turn
from warmkv.platform.gateway.schema import Body, WarmkvOptions
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason, SamplingParams

STOP_REASONS: dict[FinishReason, str] = {
    "end": "end_turn",
    "length": "max_tokens",
    "stop": "stop_sequence",
    "cancelled": "end_turn",
}


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None  # an answer of ours may be sent back as the SDK holds it


class TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class DocumentBlock(Body):
    """A plain-text document; its title comes before its text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.source.data}" if self.title else self.source.data


ContentBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class NoThinking(Body):
    type: Literal["disabled"]


class CountRequest(Body):
    """Body of /v1/messages/count_tokens: what of a request makes its prompt."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = None
    thinking: NoThinking | None = None
    tools: list[Any] = Field([], max_length=0, description="not supported yet")


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
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


def turns(body: CountRequest, default_ttl: str) -> list[Turn]:
    """The conversation, the system prompt first, with the TTL of every mark."""
    found = []
    if body.system:
        found.append(Turn("system", _blocks(body.system, default_ttl)))
    for message in body.messages:
        found.append(Turn(message.role, _blocks(message.content, default_ttl)))
    if body.cache_control is not None:
        found[-1] = _mark_last(found[-1], body.cache_control.ttl or default_ttl)
    return found


def _blocks(content: str | list[TextBlock] | list[ContentBlock], default_ttl: str) -> tuple[Block, ...]:
    if isinstance(content, str):
        return (Block(content),)
    if not content:
        raise invalid("content: a message needs at least one content block")
    if any(block.cache_control is not None and not block.text for block in content):
        raise invalid("cache_control cannot be set for empty text blocks")
    return tuple(
        Block(block.text, (block.cache_control.ttl or default_ttl) if block.cache_control else None)
        for block in content
    )


def _mark_last(turn: Turn, ttl: str) -> Turn:
    """The top-level cache_control marks the last block of the prompt."""
    *before, last = turn.blocks
    if not last.text:
        raise invalid("cache_control: the last block is empty text, which cannot be cached")
    if last.ttl not in (None, ttl):
        raise invalid(f"cache_control: the last block is marked with ttl {last.ttl!r} already")
    return Turn(turn.role, (*before, Block(last.text, ttl)))


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
    """The whole answer as one message."""
    text = "".join([delta.text async for delta in answer.text()])
    return {
        **_head(answer),
        "content": [{"type": "text", "text": text}] if text else [],
        "stop_reason": STOP_REASONS[answer.end.reason],
        "stop_sequence": answer.end.stop_sequence,
        "usage": {**usage_fields(answer.usage), "warmkv": answer.details()},
    }


async def stream(answer: Answer, request_id: str) -> AsyncIterator[str]:
    """The answer as server-sent events. A fault after the first byte is an `error` event."""
    try:
        async with aclosing(answer):
            start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None}
            start["usage"] = {**usage_fields(answer.usage), "warmkv": answer.details()}
            yield _event({"type": "message_start", "message": start})
            opened = False
            async for delta in answer.text():
                if not opened:
                    opened = True
                    block = {"type": "text", "text": ""}
                    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
                content = {"type": "text_delta", "text": delta.text}
                yield _event({"type": "content_block_delta", "index": 0, "delta": content})
            if opened:
                yield _event({"type": "content_block_stop", "index": 0})
            stop = {"stop_reason": STOP_REASONS[answer.end.reason], "stop_sequence": answer.end.stop_sequence}
            usage = {**usage_fields(answer.usage), "warmkv": answer.details()}
            yield _event({"type": "message_delta", "delta": stop, "usage": usage})
            yield _event({"type": "message_stop"})
    except Exception as error:
        yield _event(anthropic_body(from_exception(error), request_id))


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
